package wakeproxy

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

const (
	chrome = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/146.0.0.0 Safari/537.36"
	html   = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
)

// fetched is the header of a browser's request.
func fetched(mode, dest, site string, more ...string) []string {
	return append([]string{"User-Agent", chrome, "Sec-Fetch-Mode", mode, "Sec-Fetch-Dest", dest, "Sec-Fetch-Site", site}, more...)
}

func TestReachOfRequests(t *testing.T) {
	upgrade := []string{"Connection", "Upgrade", "Upgrade", "websocket"}
	for name, test := range map[string]struct {
		method, path string
		header       []string
		want         reach
	}{
		"an address typed in":            {"GET", "/", fetched("navigate", "document", "none", "Sec-Fetch-User", "?1", "Accept", html), reachStopped},
		"a link on another site":         {"GET", "/", fetched("navigate", "document", "cross-site", "Accept", html), reachStopped},
		"a form":                         {"POST", "/", fetched("navigate", "document", "same-origin", "Accept", html), reachStopped},
		"an iframe":                      {"GET", "/", fetched("navigate", "iframe", "cross-site", "Accept", html), reachStopped},
		"a navigation of a worker":       {"GET", "/", fetched("navigate", "empty", "same-origin", "Service-Worker-Navigation-Preload", "true"), reachStopped},
		"a page of an old browser":       {"GET", "/", []string{"User-Agent", chrome, "Accept", html}, reachStopped},
		"curl":                           {"GET", "/", []string{"User-Agent", "curl/8.5.0", "Accept", "*/*"}, reachStopped},
		"git":                            {"GET", "/a.git/info/refs", []string{"User-Agent", "git/2.47.0"}, reachStopped},
		"gRPC":                           {"POST", "/a.B/C", []string{"User-Agent", "grpc-go/1.80.0", "Content-Type", "application/grpc"}, reachStopped},
		"no User-Agent":                  {"POST", "/api", nil, reachStopped},
		"fetch of Node":                  {"GET", "/", []string{"User-Agent", "node", "Sec-Fetch-Mode", "cors", "Accept", "*/*"}, reachStopped},
		"a program's WebSocket":          {"GET", "/ws", upgrade, reachStopped},
		"a person's agent":               {"GET", "/", []string{"User-Agent", "Mozilla/5.0 (compatible; ChatGPT-User/1.0)", "Accept", html}, reachStopped},
		"OAuth discovery":                {"GET", "/.well-known/oauth-protected-resource", []string{"User-Agent", "mcp-client"}, reachStopped},
		"ACME":                           {"GET", "/.well-known/acme-challenge/x", []string{"User-Agent", "letsencrypt"}, reachStopped},
		"a script":                       {"GET", "/a.js", fetched("no-cors", "script", "same-origin"), reachAsleep},
		"an image":                       {"GET", "/a.png", fetched("no-cors", "image", "same-origin"), reachAsleep},
		"a fetch":                        {"GET", "/api", fetched("cors", "empty", "same-origin"), reachAsleep},
		"a fetch that claims HTML":       {"GET", "/", fetched("cors", "empty", "same-origin", "Accept", html), reachAsleep},
		"a fetch of another site":        {"POST", "/api", fetched("cors", "empty", "cross-site"), reachAsleep},
		"a preflight":                    {"OPTIONS", "/api", fetched("cors", "empty", "cross-site"), reachAsleep},
		"an event stream":                {"GET", "/events", fetched("cors", "empty", "same-origin", "Accept", "text/event-stream"), reachAsleep},
		"a service worker's update":      {"GET", "/sw.js", fetched("same-origin", "serviceworker", "same-origin"), reachAsleep},
		"a WebSocket of Chrome":          {"GET", "/ws", append(upgrade, "User-Agent", chrome, "Origin", "https://a.test"), reachAsleep},
		"a WebSocket of Firefox":         {"GET", "/ws", append(upgrade, fetched("websocket", "empty", "same-origin", "Origin", "https://a.test")...), reachAsleep},
		"a WebSocket over HTTP/2":        {"CONNECT", "/ws", []string{":protocol", "websocket", "Origin", "https://a.test"}, reachAsleep},
		"a resource of an old browser":   {"GET", "/a.png", []string{"User-Agent", chrome, "Accept", "image/webp,*/*"}, reachAsleep},
		"HEAD":                           {"HEAD", "/", []string{"User-Agent", "curl/8.5.0"}, reachAsleep},
		"an icon":                        {"GET", "/favicon.ico", []string{"User-Agent", "curl/8.5.0"}, reachAsleep},
		"an icon of Apple":               {"GET", "/apple-touch-icon-120x120-precomposed.png", nil, reachAsleep},
		"DevTools":                       {"GET", "/.well-known/appspecific/com.chrome.devtools.json", nil, reachAsleep},
		"a preview of a link":            {"GET", "/", []string{"User-Agent", "Slackbot-LinkExpanding 1.0 (+https://api.slack.com/robots)", "Accept", html}, reachAsleep},
		"a search engine":                {"GET", "/", []string{"User-Agent", "Mozilla/5.0 (compatible; Googlebot/2.1)", "Accept", html}, reachAsleep},
		"a long User-Agent":              {"GET", "/", []string{"User-Agent", strings.Repeat("a", 4096)}, reachStopped},
		"robots.txt":                     {"GET", "/robots.txt", []string{"User-Agent", "curl/8.5.0"}, reachRunning},
		"a prefetch":                     {"GET", "/", fetched("navigate", "document", "same-origin", "Sec-Purpose", "prefetch", "Accept", html), reachRunning},
		"a prerender":                    {"GET", "/", fetched("navigate", "document", "none", "Sec-Purpose", "prefetch;prerender", "Accept", html), reachRunning},
		"a prefetch of an older browser": {"GET", "/", []string{"User-Agent", chrome, "Purpose", "prefetch", "Accept", html}, reachRunning},
	} {
		r := httptest.NewRequest(test.method, "/", nil)
		r.URL.Path = test.path
		for i := 0; i < len(test.header); i += 2 {
			r.Header[test.header[i]] = []string{test.header[i+1]}
		}
		if got := reachOf(r, sandbox.WakeNavigation); got != test.want {
			t.Errorf("%s: reach %d, want %d", name, got, test.want)
		}
		if got := reachOf(r, sandbox.WakeAny); got != reachStopped {
			t.Errorf("%s, mode any: reach %d", name, got)
		}
		if got := reachOf(r, sandbox.WakeNever); got != reachRunning {
			t.Errorf("%s, mode never: reach %d", name, got)
		}
	}
}

// requestWith makes a request with a header.
func (f *front) requestWith(method, path string, header ...string) *http.Request {
	f.t.Helper()
	req := f.request(method, path)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return req
}

func TestBackgroundRequestsWakeASleepingSandboxAndStartNone(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	fetch := fetched("cors", "empty", "same-origin")
	f.node.sleep(sandbox.WakeCold, nil)
	res := f.do(f.requestWith("GET", "/api", fetch...))
	wantProblem(t, res, 503, "sandbox_stopped")
	if res.Header.Get("Retry-After") == "" || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("headers %v", res.Header)
	}
	handshake := f.requestWith("GET", "/ws", "Connection", "Upgrade", "Upgrade", "websocket", "Origin", "http://"+previewHost(),
		"Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
	wantProblem(t, f.do(handshake), 503, "sandbox_stopped")
	if n := f.node.wakes.Load(); n != 0 {
		t.Fatalf("%d wakes", n)
	}
	if res := f.do(f.requestWith("GET", "/", fetched("navigate", "document", "none", "Accept", html)...)); res.StatusCode != 200 {
		t.Errorf("a navigation: status %d", res.StatusCode)
	}
	f.node.sleep(sandbox.WakeWarm, nil)
	if res := f.do(f.requestWith("GET", "/api", fetch...)); res.StatusCode != 200 {
		t.Errorf("while it is asleep: status %d", res.StatusCode)
	}
	if n := f.node.wakes.Load(); n != 2 {
		t.Errorf("%d wakes, want 2", n)
	}
}

// Another tab's request comes while the first one's wake is under way.
func TestBackgroundRequestJoinsAWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	waking := make(chan struct{})
	f.node.sleep(sandbox.WakeCold, waking)
	f.node.begun.Store(true)
	done := make(chan *http.Response, 1)
	go func() { done <- f.do(f.requestWith("GET", "/api", fetched("cors", "empty", "same-origin")...)) }()
	testkit.Eventually(t, "it waits", func() bool { return f.proxy.inFlight() == 1 })
	close(waking)
	if res := <-done; res.StatusCode != 200 {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestBackgroundRequestWaitsForASandboxThatIsBeingMade(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	f.node.sleep(sandbox.WakeCold, nil)
	f.node.set(func(n *fakeNode) { n.sb.State = sandbox.StateStarting })
	if res := f.do(f.requestWith("GET", "/api", fetched("cors", "empty", "same-origin")...)); res.StatusCode != 200 {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestPrefetchesWakeNothing(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	prefetch := fetched("navigate", "document", "same-origin", "Sec-Purpose", "prefetch")
	for kind, code := range map[sandbox.WakeKind]string{sandbox.WakeWarm: "sandbox_asleep", sandbox.WakeCold: "sandbox_stopped"} {
		f.node.sleep(kind, nil)
		wantProblem(t, f.do(f.requestWith("GET", "/", prefetch...)), 503, code)
	}
	f.do(f.request("GET", "/"))
	if res := f.do(f.requestWith("GET", "/", prefetch...)); res.StatusCode != 200 || f.node.wakes.Load() != 1 {
		t.Errorf("while it is running: status %d, %d wakes", res.StatusCode, f.node.wakes.Load())
	}
}

func TestRobotsAreServedWithoutAWake(t *testing.T) {
	for _, mode := range []sandbox.WakeMode{sandbox.WakeNavigation, sandbox.WakeNever} {
		f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{Wake: mode}), Options{})
		if got := testkit.Body(t, f.do(f.request("GET", "/robots.txt"))); got == robots {
			t.Error("the server was not asked although it runs")
		}
		for _, kind := range []sandbox.WakeKind{sandbox.WakeWarm, sandbox.WakeCold} {
			f.node.sleep(kind, nil)
			res := f.do(f.request("GET", "/robots.txt"))
			if got := testkit.Body(t, res); res.StatusCode != 200 || got != "User-agent: *\nDisallow: /\n" || res.Header.Get("Content-Type") != "text/plain; charset=utf-8" {
				t.Errorf("%s, %s: status %d, %q", mode, kind, res.StatusCode, got)
			}
			if res := f.do(f.request("HEAD", "/robots.txt")); res.StatusCode != 200 || res.ContentLength != int64(len(robots)) {
				t.Errorf("HEAD: status %d, length %d", res.StatusCode, res.ContentLength)
			}
		}
		if n := f.node.wakes.Load(); n != 0 {
			t.Errorf("%s: %d wakes", mode, n)
		}
	}
}
