package client

import (
	"bufio"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve returns a client of a server with this handler.
func serve(t *testing.T, handler http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return connect(t, Config{URL: server.URL + "/api/v1", Token: "token"})
}

func connect(t *testing.T, cfg Config) *Client {
	t.Helper()
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// A node refuses an upload when it knows that it will fail, while the client still sends.
func TestUploadReportsAnEarlyRefusal(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 {
			t.Errorf("a transfer over %s", r.Proto)
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusInsufficientStorage)
		fmt.Fprintf(w, `{"code":%q,"status":507}`, problem.SandboxDiskFull)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	c := connect(t, Config{URL: server.URL + "/api/v1", CAFile: caOf(t, server)})
	for range 10 {
		if _, err := c.WriteFile(t.Context(), "shop", "/f", 0, io.LimitReader(zeros{}, 16<<20)); !problem.Has(err, problem.SandboxDiskFull) {
			t.Fatal(err)
		}
	}
}

// caOf returns a file with the certificate of a server.
func caOf(t *testing.T, server *httptest.Server) string {
	t.Helper()
	ca := filepath.Join(t.TempDir(), "ca.crt")
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(ca, cert, 0o600); err != nil {
		t.Fatal(err)
	}
	return ca
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestNamesUnderLocalhostLeadToTheLoopbackOverTLS(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "" || !strings.HasPrefix(r.Host, "example.com.localhost") {
			t.Errorf("got host %q", r.Host)
		}
		fmt.Fprintf(w, `{"node_id":"n","version":%q}`, r.Proto)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	ca := caOf(t, server)
	_, port, _ := net.SplitHostPort(server.Listener.Addr().String())
	// A proxy that must not be asked.
	t.Setenv("HTTPS_PROXY", "http://192.0.2.1:1")

	c := connect(t, Config{URL: "https://example.com.localhost:" + port, CAFile: ca})
	c.http.Transport.(*http.Transport).TLSClientConfig.ServerName = "example.com" // the test certificate's
	node, err := c.Node(t.Context())
	if err != nil || node.Version != "HTTP/2.0" {
		t.Fatalf("got %+v, %v; want a response over HTTP/2", node, err)
	}

	untrusting := connect(t, Config{URL: "https://example.com.localhost:" + port})
	var unreachable *UnreachableError
	if _, err := untrusting.Node(t.Context()); !errors.As(err, &unreachable) || !strings.Contains(err.Error(), "certificate") {
		t.Fatalf("got %v, want an error about the certificate", err)
	}
}

func TestNewRefusesWhatCannotBeRight(t *testing.T) {
	notPEM := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(notPEM, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		cfg  Config
		want string
	}{
		{"no host", Config{URL: "/api/v1"}, "not the URL"},
		{"another scheme", Config{URL: "ftp://localhost"}, "not the URL"},
		{"unparsable", Config{URL: "https://a b"}, "not the URL"},
		{"unencrypted", Config{URL: "http://example.com/api/v1"}, "unencrypted"},
		{"token with a newline", Config{Token: "a\nb"}, "copy it again"},
		{"missing CA", Config{CAFile: notPEM + ".missing"}, "no such file"},
		{"CA that is none", Config{CAFile: notPEM}, "no certificate"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want an error with %q", err, tt.want)
			}
		})
	}
}

func TestErrorsAreProblems(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer token" {
			t.Errorf("got authorization %q", r.Header.Get("Authorization"))
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, `{"title":"Sandbox not found","status":404,"code":"sandbox_not_found","detail":"no sandbox \"a/b\""}`)
	})
	_, err := c.Get(t.Context(), "a/b")
	var e *problem.Problem
	if !errors.As(err, &e) || e.Code != problem.SandboxNotFound || e.Status != 404 || e.Error() != `sandbox_not_found: no sandbox "a/b"` {
		t.Fatalf("got %v", err)
	}
	if !problem.Has(fmt.Errorf("wrapped: %w", err), problem.SandboxNotFound) {
		t.Fatal("problem.Has does not find wrapped errors")
	}
}

func TestResponsesOfOtherServersAreRecognized(t *testing.T) {
	tests := []struct {
		name    string
		handler http.HandlerFunc
	}{
		{"page", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(http.StatusBadGateway)
			io.WriteString(w, "<h1>Bad Gateway</h1>")
		}},
		{"redirect", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://example.com/", http.StatusFound)
		}},
		{"problem without a code", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusForbidden)
			io.WriteString(w, "{}")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var unexpected *UnexpectedResponseError
			if _, err := serve(t, tt.handler).Node(t.Context()); !errors.As(err, &unexpected) || !strings.Contains(err.Error(), unexpected.Host+" responded with status ") {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestResponsesAreBounded(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"version":"`)
		chunk := strings.Repeat("x", 1<<20)
		for range maxResponse>>20 + 1 {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
		}
		io.WriteString(w, `"}`)
	})
	if _, err := c.Node(t.Context()); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Fatalf("got %v, want an error about the size", err)
	}
}

func TestPathsAreEscaped(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if got := r.URL.EscapedPath(); got != "/api/v1/sandbox/..%2F..%2Fnode%3Fx" {
			t.Errorf("got path %s", got)
		}
		io.WriteString(w, "{}")
	})
	if _, err := c.Get(t.Context(), "../../node?x"); err != nil {
		t.Fatal(err)
	}
}

func TestListReadsAllPages(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("state") != "asleep" || strings.Join(q["label"], " ") != "a=b c=d" {
			t.Errorf("got query %s", r.URL.RawQuery)
		}
		switch q.Get("cursor") {
		case "":
			io.WriteString(w, `{"sandboxes":[{"name":"a"},{"name":"b"}],"next_cursor":"b"}`)
		case "b":
			io.WriteString(w, `{"sandboxes":[{"name":"c"}]}`)
		}
	})
	list, err := c.List(t.Context(), Filter{State: "asleep", Labels: []string{"a=b", "c=d"}})
	if err != nil || len(list) != 3 || list[2].Name != "c" {
		t.Fatalf("got %v, %v", list, err)
	}
}

// followed returns what following a log makes of a stream of events.
func followed(t *testing.T, body string) (stdout, stderr string, exit *types.Process, err error) {
	t.Helper()
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		io.WriteString(w, body)
	})
	var out, errs strings.Builder
	err = c.Logs(t.Context(), "a", "p-aaaaaaaa", true, func(l Log) error {
		switch {
		case l.Exit != nil:
			exit = l.Exit
		case l.Stream == "stderr":
			errs.Write(l.Data)
		default:
			out.Write(l.Data)
		}
		return nil
	})
	return out.String(), errs.String(), exit, err
}

func TestFollowedLog(t *testing.T) {
	stdout, stderr, exit, err := followed(t, ":\n\nevent: stdout\ndata: {\"data\":\"a\\n\"}\n\n"+
		"id: 4\r\nevent:stderr\r\ndata:{\"data\":\"/w==\",\r\ndata: \"encoding\":\"base64\"}\r\n\r\n"+
		"event: news\ndata: {}\n\n"+
		"event: exit\ndata: {\"exit_code\":3}\n\n")
	if err != nil || stdout != "a\n" || stderr != "\xff" || exit == nil || *exit.ExitCode != 3 {
		t.Fatalf("got %q, %q, %+v, %v", stdout, stderr, exit, err)
	}
}

func TestFollowedLogNeverInventsAnEnd(t *testing.T) {
	tests := []struct {
		name, body string
		check      func(error) bool
	}{
		{"ends early", "event: stdout\ndata: {\"data\":\"a\"}\n\n", func(err error) bool { return errors.Is(err, errNoEnd) }},
		{"exit is cut off", "event: exit\ndata: {\"exit_code\":0}\n", func(err error) bool { return errors.Is(err, errNoEnd) }},
		{"fails", "event: problem\ndata: {\"code\":\"guest_lost\",\"detail\":\"gone\",\"status\":502}\n\n", func(err error) bool { return problem.Has(err, problem.GuestLost) }},
		{"unknown encoding", "event: stdout\ndata: {\"data\":\"a\",\"encoding\":\"rot13\"}\n\n", func(err error) bool { return err != nil }},
		{"no JSON", "event: exit\ndata: x\n\n", func(err error) bool { return err != nil }},
		{"too large", "data: " + strings.Repeat("x", maxMessage+1) + "\n\n", func(err error) bool { return errors.Is(err, bufio.ErrTooLong) }},
		{"too large in lines", strings.Repeat("data: "+strings.Repeat("x", 1<<20)+"\n", maxMessage>>20) + "\n", func(err error) bool { return strings.Contains(err.Error(), "an event has more than") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, _, err := followed(t, tt.body); !tt.check(err) {
				t.Fatalf("got %v", err)
			}
		})
	}
}

func TestCloneIgnoresEventsOfLaterVersions(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: news\ndata: []\n\nevent: progress\ndata: {\"phase\":\"counting_objects\"}\n\nevent: complete\ndata: {\"branch\":\"main\"}\n\n")
	})
	var phases []types.GitPhase
	head, err := c.CloneRepository(t.Context(), "a", types.GitCloneRequest{}, func(p types.GitProgress) { phases = append(phases, p.Phase) })
	if err != nil || head.Branch != "main" || !slices.Equal(phases, []types.GitPhase{types.GitPhaseCounting}) {
		t.Errorf("got %+v, %v after %q", head, err, phases)
	}
}

func TestStreamEndsWithItsContext(t *testing.T) {
	gone := make(chan struct{})
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: woke\ndata: {\"seq\":1}\n\n")
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	})
	ctx, cancel := context.WithCancel(t.Context())
	err := c.Follow(ctx, "a", 0, func(e types.Event) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want context.Canceled", err)
	}
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Fatal("the server still has the connection")
	}
}

func TestStreamThatIsNone(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "{}") })
	if err := c.Follow(t.Context(), "a", 0, func(types.Event) error { return nil }); err == nil || !strings.Contains(err.Error(), "GET /sandbox/a/events responded with") || !strings.Contains(err.Error(), "stream of events") {
		t.Errorf("got %v", err)
	}
	if _, err := c.RunCodeStream(t.Context(), "a", RunCodeRequest{Context: "python"}, CodeEvents{}); err == nil || !strings.Contains(err.Error(), "POST /sandbox/a/contexts/python/run responded with") {
		t.Errorf("got %v", err)
	}
}

func TestStdinIsSentWholeAndFits(t *testing.T) {
	for name, stdin := range map[string][]byte{
		"text":    []byte(strings.Repeat("ä line\n", MaxStdin/8)),
		"bytes":   []byte(strings.Repeat("\xff\x00", MaxStdin/2)),
		"quotes":  []byte(strings.Repeat(`"`, MaxStdin)),
		"nothing": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var size int64
			c := serve(t, func(w http.ResponseWriter, r *http.Request) {
				size = r.ContentLength
				io.WriteString(w, "{}")
			})
			if _, err := c.Exec(t.Context(), "a", ExecRequest{Command: types.Command{Command: "cat"}, Stdin: stdin}); err != nil {
				t.Fatal(err)
			}
			if size > 1<<20 {
				t.Errorf("the request has %d bytes, more than a node takes", size)
			}
			body := ExecRequest{Stdin: stdin}.body()
			if back, err := body.StdinEncoding.Decode(body.Stdin); err != nil || string(back) != string(stdin) {
				t.Errorf("the sent input differs: %v", err)
			}
		})
	}
}

func FuzzStream(f *testing.F) {
	f.Add("event: stdout\ndata: {\"data\":\"a\"}\n\n")
	f.Add("data\n\n:x\r\n\r\nevent: problem\ndata: {}\n\n")
	f.Fuzz(func(t *testing.T, body string) {
		readEvents(t.Context(), strings.NewReader(body), func(m message) error {
			if len(m.data) == 0 || len(m.data) > maxMessage {
				t.Fatalf("got a message with %d bytes of data", len(m.data))
			}
			decode[types.Output](m)
			return nil
		})
	})
}
