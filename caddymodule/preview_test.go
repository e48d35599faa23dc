package caddymodule

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddytls"
	"github.com/coder/websocket"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/wakeproxy"
)

func TestAPreviewWakesItsSandboxThroughCaddy(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("App", strings.Join([]string{r.Host, r.Header.Get("X-Forwarded-Host"), r.Header.Get("X-Forwarded-Proto"), r.Header.Get("X-Forwarded-For") + r.Header.Get("Keep-Alive")}, " "))
		io.WriteString(w, "hello")
	}, sandbox.Port{})
	preview, _ := url.Parse(address)

	for _, h2 := range []bool{false, true} {
		if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		req, _ := http.NewRequestWithContext(t.Context(), "GET", address, nil)
		req.Header.Set("X-Forwarded-For", "6.6.6.6")
		req.Header.Set("X-Forwarded-Host", "forged")
		req.Header.Set("Keep-Alive", "hop-by-hop")
		res := s.do(s.client(h2), req)
		if testkit.Body(t, res) != "hello" || res.Header.Get("Doze-Wake") != "warm" || !strings.HasPrefix(res.Header.Get("Server-Timing"), "wake;dur=") {
			t.Errorf("status %d, %v", res.StatusCode, res.Header)
		}
		if h2 != (res.ProtoMajor == 2) {
			t.Errorf("over HTTP/%d", res.ProtoMajor)
		}
		want := preview.Host + " " + preview.Host + " https 127.0.0.1"
		if got := res.Header.Get("App"); got != want {
			t.Errorf("the app saw %q, want %q", got, want)
		}
	}
}

// 1,000 concurrent requests: one wake, 1,000 responses.
func TestOneWakeForAThousandRequests(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	client := s.client(true)
	if _, err := s.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var served atomic.Int64
	for range 1000 {
		all.Go(func() {
			req, _ := http.NewRequestWithContext(t.Context(), "GET", address, nil)
			res, err := client.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if b, err := io.ReadAll(res.Body); err == nil && string(b) == "hello" {
				served.Add(1)
			}
		})
	}
	all.Wait()
	if n := served.Load(); n != 1000 {
		t.Errorf("%d answers", n)
	}
	events, err := s.Manager.Events(t.Context(), sb.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	wakes := 0
	for _, e := range events {
		if e.Type == sandbox.EventWoke {
			wakes++
		}
	}
	if wakes != 1 {
		t.Errorf("%d wakes", wakes)
	}
}

// devServer is like Vite's: it serves only its own host, and accepts a WebSocket
// only of its own origin. It also streams two events, the second one when more
// is closed.
func devServer(more <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { serveDev(w, r, more) }
}

func serveDev(w http.ResponseWriter, r *http.Request, more <-chan struct{}) {
	host, _, _ := strings.Cut(r.Host, ":")
	if host != "localhost" {
		http.Error(w, "blocked request: this host is not allowed", http.StatusForbidden)
		return
	}
	switch r.URL.Path {
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: one\n\n")
		http.NewResponseController(w).Flush()
		<-more
		io.WriteString(w, "data: two\n\n")
	default:
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, message, err := c.Read(r.Context())
			if err != nil || c.Write(r.Context(), kind, message) != nil {
				return
			}
		}
	}
}

// dial opens a WebSocket as a page of the preview would.
func (s *site) dial(address string) *websocket.Conn {
	s.t.Helper()
	c, _, err := websocket.Dial(s.t.Context(), strings.Replace(address, "https", "wss", 1)+"hmr", &websocket.DialOptions{
		HTTPClient: s.client(false),
		HTTPHeader: http.Header{"Origin": {strings.TrimSuffix(address, "/")}},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.CloseNow() })
	return c
}

func say(t *testing.T, c *websocket.Conn, words string) {
	t.Helper()
	if err := c.Write(t.Context(), websocket.MessageText, []byte(words)); err != nil {
		t.Fatal(err)
	}
	if _, got, err := c.Read(t.Context()); err != nil || string(got) != words {
		t.Fatalf("heard %q, %v", got, err)
	}
}

// A WebSocket passes the checks of a dev server through Caddy.
func TestAWebSocketThroughCaddySurvivesSleep(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(devServer(nil), sandbox.Port{})
	c := s.dial(address)
	say(t, c, "one")
	testkit.Eventually(t, "the silent WebSocket lets it sleep", func() bool {
		_, err := s.Manager.Sleep(t.Context(), sb.ID)
		return err == nil
	})
	say(t, c, "two")
	if got := s.get(sb.ID).State; got != sandbox.StateRunning {
		t.Errorf("a byte from the visitor left it %s", got)
	}
}

// Nor is a WebSocket without its token redirected to a login.
func TestAWebSocketWithoutItsTokenIsNotFoundAndNotRedirected(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(devServer(nil), sandbox.Port{})
	for _, wrong := range []string{
		strings.Replace(address, "-"+sb.Ports[0].Token, "", 1),
		strings.Replace(address, sb.Ports[0].Token, strings.Repeat("z", len(sb.Ports[0].Token)), 1),
	} {
		_, res, err := websocket.Dial(t.Context(), strings.Replace(wrong, "https", "wss", 1)+"hmr", &websocket.DialOptions{HTTPClient: s.client(false)})
		if err == nil || res == nil || res.StatusCode != 404 || res.Header.Get("Location") != "" {
			t.Errorf("%s: %v, %v", wrong, res, err)
		}
	}
}

func TestAHeldWebSocketKeepsItsSandboxAwake(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(devServer(nil), sandbox.Port{WebSocket: sandbox.WebSocketKeepAwake})
	c := s.dial(address)
	say(t, c, "one")
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("asked to sleep it said %v", err)
	}
	c.Close(websocket.StatusNormalClosure, "")
	testkit.Eventually(t, "it may sleep again", func() bool {
		_, err := s.Manager.Sleep(t.Context(), sb.ID)
		return err == nil
	})
}

// A stream counts as activity for as long as it lasts.
func TestAStreamKeepsItsSandboxAwake(t *testing.T) {
	s := newSite(t)
	more := make(chan struct{})
	sb, address := s.sandbox(devServer(more), sandbox.Port{})
	res := s.fetch(s.client(true), address+"events")
	lines := bufio.NewReader(res.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "data: one\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("asked to sleep it said %v", err)
	}
	close(more)
	if rest, err := io.ReadAll(lines); err != nil || string(rest) != "\ndata: two\n\n" {
		t.Errorf("%q, %v", rest, err)
	}
}

// Invariant: code from a sandbox never shares an origin with the API.
func TestPreviewsNeverServeTheAPIsOrigin(t *testing.T) {
	s := newSite(t)
	// An operator's mistake: the API on every host, previews on the API's.
	port := testkit.FreePort(t)
	s.mustLoad("", "http://:"+strconv.Itoa(port)+" {\n\thandle /api/* {\n\t\tdoze_api\n\t}\n\tdoze_preview\n}")
	_, address := s.sandbox(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "app "+r.URL.Path+" "+r.Header.Get("Authorization"))
	}, sandbox.Port{})
	preview, _ := url.Parse(address)

	get := func(base, host, path string) (int, string) {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", base+path, nil)
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+testToken)
		res := s.do(s.client(false), req)
		return res.StatusCode, testkit.Body(t, res)
	}
	if _, got := get(strings.TrimSuffix(address, "/"), preview.Host, "/api/v1/node"); got != "app /api/v1/node Bearer "+testToken {
		t.Errorf("the preview sent %q", got)
	}
	plain := "http://127.0.0.1:" + strconv.Itoa(port)
	plainGet := func(host, path string) (int, string) {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", plain+path, nil)
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+testToken)
		res := s.do(http.DefaultClient, req)
		return res.StatusCode, testkit.Body(t, res)
	}
	if _, got := plainGet(preview.Host, "/api/v1/node"); strings.Contains(got, `"enforced_limits"`) {
		t.Errorf("the API responded on a preview's host: %q", got)
	}
	if status, got := plainGet(apiHost, "/"); status != 404 || !strings.Contains(got, "preview_not_found") {
		t.Errorf("a preview responded on the API's host: %d %q", status, got)
	}
	if status, got := plainGet(apiHost, "/api/v1/node"); status != 200 || !strings.Contains(got, `"enforced_limits"`) {
		t.Errorf("the API on its own host: %d %q", status, got)
	}
}

func TestCertificatesAreForExistingPreviewsOnly(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	preview, _ := url.Parse(address)
	port := sb.Ports[0]
	app := newestApp(t)
	permission := &Permission{app: app, Domains: app.domains(nil)}
	const domain = defaultPreviewDomain
	for host, allowed := range map[string]bool{
		preview.Hostname():                                      true,
		strings.ToUpper(preview.Hostname()):                     true,
		wakeproxy.Name{Port: port.Port, ID: sb.ID}.Host(domain): false,
		wakeproxy.Name{Port: port.Port, ID: sb.ID, Token: "aaaaaaaaaaaaaaaaaaaa"}.Host(domain): false,
		wakeproxy.Name{Port: port.Port + 1, ID: sb.ID, Token: port.Token}.Host(domain):         false,
		wakeproxy.Name{Port: port.Port, ID: "aaaaaaaaaaaa", Token: port.Token}.Host(domain):    false,
		wakeproxy.Name{Port: port.Port, ID: sb.ID, Token: port.Token}.Host("other.example"):    false,
		"www." + domain: false, domain: false, apiHost: false, "": false,
	} {
		err := permission.CertificateAllowed(t.Context(), host)
		if allowed != (err == nil) || !allowed && !errors.Is(err, caddytls.ErrPermissionDenied) {
			t.Errorf("%q: %v, want allowed: %v", host, err, allowed)
		}
	}
	if got := s.get(sb.ID).State; got != sandbox.StateAsleep {
		t.Errorf("asking left it %s", got)
	}
}

// newestApp is the app of the configuration that runs.
func newestApp(t *testing.T) *App {
	t.Helper()
	var app *App
	nodes.Range(func(_, held any) bool {
		h := held.(*heldNode)
		h.mu.Lock()
		defer h.mu.Unlock()
		app = h.apps[len(h.apps)-1]
		return false
	})
	if app == nil {
		t.Fatal("no node is open")
	}
	return app
}
