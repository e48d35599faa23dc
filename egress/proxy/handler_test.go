package proxy

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const key = "doze_key"

// fakeEgress is an Egress that records the targets and implements Connect as a test requires.
type fakeEgress struct {
	mu      sync.Mutex
	targets []Target
	header  http.Header
	connect func(ctx context.Context, t *Tunnel)
}

func (egress *fakeEgress) note(to Target) {
	egress.mu.Lock()
	defer egress.mu.Unlock()
	egress.targets = append(egress.targets, to)
}

func (egress *fakeEgress) Connect(ctx context.Context, owner string, to Target, t *Tunnel) {
	egress.note(to)
	if owner != "ann" {
		panic("owner is " + owner)
	}
	if egress.connect != nil {
		egress.connect(ctx, t)
		return
	}
	t.Refuse(problem.New(problem.EgressDenied, "denied by the test"))
}

func (egress *fakeEgress) Request(w http.ResponseWriter, r *http.Request, _ string, to Target) {
	egress.note(to)
	egress.header = r.Header
	w.WriteHeader(http.StatusNoContent)
}

func newProxy(t *testing.T, egress *fakeEgress) *httptest.Server {
	t.Helper()
	h := &Handler{Egress: egress, Authenticate: func(k string) (string, bool) { return "ann", k == key }}
	server := httptest.NewUnstartedServer(h)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// handle passes a request to a Handler, as if it had arrived over TLS.
func handle(t *testing.T, egress *fakeEgress, text string, change ...func(*http.Request)) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	handleWith(t, w, egress, text, change...)
	return w.Result()
}

func handleWith(t *testing.T, w http.ResponseWriter, egress *fakeEgress, text string, change ...func(*http.Request)) {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(text, "\n", "\r\n") + "\r\n\r\n")))
	if err != nil {
		t.Fatal(err)
	}
	r.RemoteAddr = "127.0.0.1:5000"
	for _, c := range change {
		c(r)
	}
	h := &Handler{Egress: egress, Authenticate: func(k string) (string, bool) { return "ann", k == key }}
	h.ServeHTTP(w, r)
}

func basic(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

func TestRequestsRequireAKey(t *testing.T) {
	for field, ok := range map[string]bool{
		"Bearer " + key: true, "bearer  " + key: true, basic("any", key): true, basic("", key): true,
		"": false, "Bearer": false, "Bearer other": false, basic(key, ""): false, basic("any", "other"): false,
		"Basic " + key: false, "Digest " + key: false, key: false, "Bearer " + strings.Repeat("x", maxKey+1): false,
	} {
		egress := &fakeEgress{}
		header := ""
		if field != "" {
			header = "\nProxy-Authorization: " + field
		}
		res := handle(t, egress, "GET http://a.example/ HTTP/1.1\nHost: a.example"+header)
		if want := map[bool]int{true: http.StatusNoContent, false: http.StatusProxyAuthRequired}[ok]; res.StatusCode != want || ok != (len(egress.targets) == 1) {
			t.Errorf("%.40q: %d, targets %v", field, res.StatusCode, egress.targets)
		}
		if !ok && (len(res.Header["Proxy-Authenticate"]) != 2 || res.Header.Get(problem.HeaderError) != "proxy_authentication_required") {
			t.Errorf("%.40q: %v", field, res.Header)
		}
	}
	twice := "\nProxy-Authorization: Bearer " + key + "\nProxy-Authorization: Bearer other"
	if res := handle(t, &fakeEgress{}, "GET http://a.example/ HTTP/1.1\nHost: a.example"+twice); res.StatusCode != http.StatusProxyAuthRequired {
		t.Errorf("two keys: %d", res.StatusCode)
	}
}

func TestKeysFromOtherMachinesRequireTLS(t *testing.T) {
	for from, want := range map[string]int{
		"127.0.0.1:5000": 204, "[::1]:5000": 204, "[::ffff:127.0.0.1]:5000": 204,
		"192.0.2.1:5000": 403, "[2001:db8::1]:5000": 403, "@": 403, "": 403,
	} {
		res := handle(t, &fakeEgress{}, "GET http://a.example/ HTTP/1.1\nHost: a.example\nProxy-Authorization: Bearer "+key,
			func(r *http.Request) { r.RemoteAddr = from })
		if res.StatusCode != want {
			t.Errorf("from %q: %d, want %d", from, res.StatusCode, want)
		}
	}
}

func TestTargets(t *testing.T) {
	for line, want := range map[string]string{
		"CONNECT a.example:443":         `{a.example invalid IP 443 false}`,
		"CONNECT A.Example.:22":         `{a.example invalid IP 22 false}`,
		"CONNECT 192.0.2.1:443":         `{ 192.0.2.1 443 false}`,
		"CONNECT [::ffff:10.0.0.1]:443": `{ 10.0.0.1 443 false}`,
		"CONNECT [2001:db8::1]:443":     `{ 2001:db8::1 443 false}`,
		"GET http://a.example":          `{a.example invalid IP 80 false}`,
		"GET http://a.example:8080/x?y": `{a.example invalid IP 8080 false}`,
		"POST https://a.example/x":      `{a.example invalid IP 443 true}`,
		"GET http://user:pw@a.example/": `{a.example invalid IP 80 false}`,
		"CONNECT a.example":             "names no host and port",
		"CONNECT a.example:0":           "is not a port",
		"CONNECT a.example:65536":       "is not a port",
		"CONNECT :443":                  "neither the name of a host nor an address",
		"CONNECT 0x7f.1:443":            "neither the name of a host nor an address",
		"CONNECT 2130706433:443":        "neither the name of a host nor an address",
		"GET /x":                        "this is a proxy",
		"OPTIONS *":                     "this is a proxy",
		"GET ftp://a.example/":          "neither http nor https",
		"GET http://192.0.2.1/":         "or CONNECT",
		"GET http://a.example:0/":       "is not a port",
		"GET http://a_b!.example/":      "neither the name of a host nor an address",
		"CONNECT [fe80::1%25eth0]:443":  "has a zone",
	} {
		method, uri, _ := strings.Cut(line, " ")
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(method + " " + uri + " HTTP/1.1\r\nHost: other.example\r\n\r\n")))
		if err != nil {
			t.Errorf("%s: net/http refuses it: %v", line, err)
			continue
		}
		to, err := target(r)
		got := fmt.Sprint(to)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", line, got, want)
		}
	}
}

func TestFieldsForTheProxyAreRemoved(t *testing.T) {
	egress := &fakeEgress{}
	handle(t, egress, "GET http://a.example/ HTTP/1.1\nHost: a.example\nProxy-Authorization: Bearer "+key+"\nProxy-Connection: keep-alive\nProxy-Other: "+key+"\nX: 1")
	if len(egress.header) != 1 || egress.header.Get("X") != "1" {
		t.Errorf("%v", egress.header)
	}
}

// The server of the handler sets fields that describe itself, such as an alternative
// address. The client would attribute them to the upstream.
func TestServersOwnFieldsAreRemoved(t *testing.T) {
	w := httptest.NewRecorder()
	w.Header().Set("Alt-Svc", `h3=":3128"`)
	w.Header().Set("Server", "a proxy")
	handleWith(t, w, &fakeEgress{}, "GET http://a.example/ HTTP/1.1\nHost: a.example\nProxy-Authorization: Bearer "+key)
	if res := w.Result(); res.StatusCode != http.StatusNoContent || len(res.Header) != 0 {
		t.Errorf("%s %v", res.Status, res.Header)
	}
}

// The proxy itself refuses requests with these codes and statuses.
func TestRefusals(t *testing.T) {
	authorization := "\nProxy-Authorization: Bearer " + key
	for name, c := range map[string]struct {
		request string
		from    string // "": this machine
		code    problem.Code
		status  int
		detail  string
	}{
		"no key":            {"GET http://a.example/ HTTP/1.1\nHost: a.example", "", problem.ProxyAuthenticationRequired, 407, "no API key; send a key"},
		"invalid key":       {"GET http://a.example/ HTTP/1.1\nHost: a.example" + authorization + "x", "", problem.ProxyAuthenticationRequired, 407, "invalid API key; send a key"},
		"key without TLS":   {"GET http://a.example/ HTTP/1.1\nHost: a.example" + authorization, "192.0.2.1:5000", problem.ProxyTLSRequired, 403, "use https://"},
		"too long a header": {"GET http://a.example/ HTTP/1.1\nHost: a.example" + authorization + "\nX: " + strings.Repeat("x", maxHeader), "", problem.HeaderTooLarge, 431, "64 KiB"},
		"no target":         {"GET / HTTP/1.1\nHost: a.example" + authorization, "", problem.TargetInvalid, 400, "CONNECT"},
		"no port":           {"CONNECT a.example HTTP/1.1\nHost: a.example" + authorization, "", problem.TargetInvalid, 400, "example.com:443"},
		"a decision":        {"CONNECT a.example:7 HTTP/1.1\nHost: a.example:7" + authorization, "", problem.EgressDenied, 403, "denied by the test"},
		"a call of gRPC":    {"CONNECT a.example:7 HTTP/1.1\nHost: a.example:7\nContent-Type: application/grpc" + authorization, "", problem.EgressDenied, 403, "denied by the test"},
	} {
		t.Run(name, func(t *testing.T) {
			res := handle(t, &fakeEgress{}, c.request, func(r *http.Request) {
				if c.from != "" {
					r.RemoteAddr = c.from
				}
			})
			var why problem.Problem
			if err := json.NewDecoder(res.Body).Decode(&why); err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != c.status || why.Status != c.status || why.Code != c.code || !strings.Contains(why.Detail, c.detail) || res.Header.Get(problem.HeaderError) != c.code.String() {
				t.Errorf("%s %v %+v", res.Status, res.Header, why)
			}
		})
	}
}

// tunnel requests a tunnel from a proxy over HTTP/2.
func tunnel(t *testing.T, server *httptest.Server) (*io.PipeWriter, *http.Response) {
	t.Helper()
	body, up := io.Pipe()
	t.Cleanup(func() { up.Close() })
	r, err := http.NewRequestWithContext(testkit.Context(t), "CONNECT", server.URL, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "a.example:7"
	r.Header.Set("Proxy-Authorization", basic("any", key))
	res, err := server.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return up, res
}

func TestStreamReadContinuesAfterItsDeadline(t *testing.T) {
	result := make(chan error, 1)
	reading := make(chan struct{})
	egress := &fakeEgress{connect: func(_ context.Context, tunnel *Tunnel) {
		result <- func() error {
			conn, err := tunnel.Accept()
			if err != nil {
				return err
			}
			b := make([]byte, 16)
			conn.SetReadDeadline(time.Now().Add(time.Millisecond)) // expires while Read waits, or before
			if _, err := conn.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("before the deadline: %v", err)
			}
			var timeout net.Error
			if _, err := conn.Read(b); !errors.As(err, &timeout) || !timeout.Timeout() {
				return fmt.Errorf("after the deadline: %v", err)
			}
			conn.SetReadDeadline(time.Time{})
			close(reading)
			n, err := conn.Read(b)
			if err != nil || string(b[:n]) != "hello" {
				return fmt.Errorf("%q, %v", b[:n], err)
			}
			_, err = conn.Write([]byte("bye"))
			return err
		}()
	}}
	up, res := tunnel(t, newProxy(t, egress))
	<-reading
	fmt.Fprint(up, "hello")
	if got, err := io.ReadAll(res.Body); err != nil || string(got) != "bye" {
		t.Errorf("%q, %v", got, err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}

func TestClientIsNotifiedOfAnAbortedStream(t *testing.T) {
	egress := &fakeEgress{connect: func(_ context.Context, tunnel *Tunnel) {
		if conn, err := tunnel.Accept(); err == nil {
			_, _ = conn.Write([]byte("part"))
			conn.Abort()
			conn.Close()
		}
	}}
	_, res := tunnel(t, newProxy(t, egress))
	if got, err := io.ReadAll(res.Body); err == nil {
		t.Errorf("%q ends as if it were all", got)
	}
}

func TestAbortEndsABlockedWrite(t *testing.T) {
	result := make(chan error, 1)
	egress := &fakeEgress{connect: func(_ context.Context, tunnel *Tunnel) {
		conn, err := tunnel.Accept()
		if err != nil {
			result <- err
			return
		}
		writing := make(chan struct{})
		go func() { // ends with the write
			<-writing
			conn.Abort()
		}()
		_, err = conn.Write(make([]byte, 1))
		close(writing)
		for err == nil { // in total larger than any window
			_, err = conn.Write(make([]byte, 1<<20))
		}
		result <- nil
	}}
	tunnel(t, newProxy(t, egress))
	if err := testkit.Receive(t, "the end of the write", result); err != nil {
		t.Error(err)
	}
}

func TestTunnelIsDecidedOnOnce(t *testing.T) {
	result := make(chan error, 1)
	egress := &fakeEgress{connect: func(_ context.Context, tunnel *Tunnel) {
		tunnel.Refuse(problem.New(problem.EgressDenied, "first"))
		tunnel.Refuse(problem.New(problem.UpstreamUnreachable, "second"))
		_, err := tunnel.Accept()
		result <- err
	}}
	_, res := tunnel(t, newProxy(t, egress))
	body, _ := io.ReadAll(res.Body)
	if err := <-result; !errors.Is(err, ErrDecided) || res.StatusCode != http.StatusForbidden || !strings.Contains(string(body), "first") {
		t.Errorf("%v, %s %s", err, res.Status, body)
	}
}
