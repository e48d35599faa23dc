package wakeproxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// Vite's HMR breaks because Host differs between HTTP and WebSocket;
// the WebSocket half is in tunnel_test.go.
func TestServerSeesOneAddress(t *testing.T) {
	preview := "http://" + previewHost()
	inside := "localhost:3000"
	for _, test := range []struct {
		name            string
		mode            sandbox.HostMode
		origin, referer string
		want            [3]string // Host, Origin, Referer
		proto           string
	}{
		{"rewrite", sandbox.HostRewrite, preview, preview + "/page?x=1", [3]string{inside, "http://" + inside, "http://" + inside + "/page?x=1"}, ""},
		{"rewrite, another site", sandbox.HostRewrite, "https://evil.example", "https://evil.example/", [3]string{inside, "https://evil.example", "https://evil.example/"}, ""},
		{"rewrite, a site that begins the same", sandbox.HostRewrite, preview + ".evil.example", preview + ".evil.example/", [3]string{inside, preview + ".evil.example", preview + ".evil.example/"}, ""},
		{"rewrite, opaque", sandbox.HostRewrite, "null", "", [3]string{inside, "null", ""}, ""},
		{"rewrite, none", sandbox.HostRewrite, "", "", [3]string{inside, "", ""}, ""},
		{"rewrite, trailing dot", sandbox.HostRewrite, preview + ".", preview + "./", [3]string{inside, "http://" + inside, "http://" + inside + "/"}, ""},
		{"preserve", sandbox.HostPreserve, preview, preview + "/", [3]string{previewHost(), preview, preview + "/"}, "http"},
		{"preserve, trailing dot", sandbox.HostPreserve, preview + ".", preview + "./", [3]string{previewHost(), preview, preview + "/"}, "http"},
		{"auto", sandbox.HostAuto, preview, preview + "/", [3]string{previewHost(), preview, preview + "/"}, "http"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got [3]string
			var header http.Header
			f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
				header = r.Header
				got = [3]string{r.Host, r.Header.Get("Origin"), r.Header.Get("Referer")}
			}), sandbox.Port{Host: test.mode}), Options{})
			req := f.request("GET", "/")
			req.Header.Set("X-Forwarded-Ssl", "on")
			for name, value := range map[string]string{"Origin": test.origin, "Referer": test.referer} {
				if value != "" {
					req.Header.Set(name, value)
				}
			}
			if strings.HasSuffix(test.name, "dot") {
				req.Host += "."
			}
			f.do(req)
			if got != test.want {
				t.Errorf("Host, Origin, Referer: %q, want %q", got, test.want)
			}
			host := previewHost()
			if test.mode == sandbox.HostRewrite {
				host = ""
			}
			if forwarded, proto := header.Get("X-Forwarded-Host"), header.Get("X-Forwarded-Proto"); forwarded != host || proto != test.proto || header.Get("X-Forwarded-Ssl") != "" {
				t.Errorf("X-Forwarded-Host %q, want %q; -Proto %q, want %q", forwarded, host, proto, test.proto)
			}
			if client := header.Get("X-Forwarded-For"); client != "127.0.0.1" {
				t.Errorf("X-Forwarded-For %q", client)
			}
		})
	}
}

// strict is a server that takes one host only, and counts its requests.
func strict(host string, status int, requests *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		if r.Host != host {
			w.WriteHeader(status)
			return
		}
		if r.URL.Path == "/missing" {
			w.WriteHeader(404)
		}
		io.Copy(w, r.Body)
		io.WriteString(w, "hello")
	}
}

func TestServerThatRefusesThePreviewsHostGetsLocalhost(t *testing.T) {
	for status, path := range map[int]string{400: "/missing", 403: "/", 421: "/"} {
		want := 200
		if path == "/missing" {
			want = 404
		}
		var requests atomic.Int64
		f := newFront(t, newFakeNode(t, app(t, strict("localhost:3000", status, &requests)), sandbox.Port{}), Options{})
		for range 3 {
			if res := f.do(f.request("GET", path)); res.StatusCode != want || testkit.Body(t, res) != "hello" {
				t.Errorf("%d: status %d", status, res.StatusCode)
			}
		}
		if n := requests.Load(); n != 4 {
			t.Errorf("%d: 3 requests became %d; only the first one is sent twice", status, n)
		}
		if log := f.node.log.String(); strings.Count(log, "refuses the preview's host") != 1 || strings.Contains(log, testToken) {
			t.Errorf("logged %q", log)
		}
	}
}

// Django does so with ALLOWED_HOSTS = ["*"] and no SECURE_PROXY_SSL_HEADER.
func TestRefusedFormOfTheServersOwnPageIsLogged(t *testing.T) {
	for _, host := range []sandbox.HostMode{sandbox.HostAuto, sandbox.HostPreserve, sandbox.HostRewrite} {
		f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == "POST" && r.Header.Get("Origin") != "http://localhost:3000" {
				w.WriteHeader(403)
			}
		}), sandbox.Port{Host: host}), Options{})
		f.do(f.request("GET", "/"))
		post := func(origin string) int {
			req := f.request("POST", "/")
			req.Header.Set("Origin", origin)
			return f.do(req).StatusCode
		}
		own := "http://" + f.request("POST", "/").Host
		if post("https://other.test"); strings.Contains(f.node.log.String(), "host rewrite") {
			t.Errorf("%s: another site's is logged: %s", host, f.node.log.String())
		}
		want, lines := 403, 1
		if host == sandbox.HostRewrite {
			want, lines = 200, 0
		}
		for range 2 {
			if got := post(own); got != want {
				t.Errorf("%s: status %d", host, got)
			}
		}
		if log := f.node.log.String(); strings.Count(log, "host rewrite") != lines || strings.Contains(log, testToken) {
			t.Errorf("%s: logged %q", host, log)
		}
	}
}

// A request with a body is sent once: to localhost, which servers do not refuse,
// until it is known what they accept.
func TestRequestWithABodyIsNotSentTwiceForItsHost(t *testing.T) {
	var host atomic.Pointer[string]
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		host.Store(&r.Host)
		if r.Method == "POST" && r.Host == previewHost() {
			w.WriteHeader(403)
		}
	}), sandbox.Port{}), Options{})
	post := func() int {
		req := f.request("POST", "/hook")
		req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data ")), 5
		return f.do(req).StatusCode
	}
	if status := post(); status != 200 || *host.Load() != "localhost:3000" {
		t.Errorf("the first one got %d from %s", status, *host.Load())
	}
	f.do(f.request("GET", "/"))
	if *host.Load() != previewHost() {
		t.Errorf("a GET went to %s", *host.Load())
	}
	if status := post(); status != 403 || *host.Load() != previewHost() {
		t.Errorf("after a GET was accepted it got %d from %s", status, *host.Load())
	}
}

func TestRefusalForAnotherReasonIsForwarded(t *testing.T) {
	var requests atomic.Int64
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		w.WriteHeader(403)
		io.WriteString(w, "as "+r.Host)
	}), sandbox.Port{}), Options{})
	const sent = 40
	for range sent {
		if got := testkit.Body(t, f.do(f.request("GET", "/"))); got != "as "+previewHost() {
			t.Errorf("got %q", got)
		}
	}
	if n := requests.Load(); n != sent+maxInconclusive {
		t.Errorf("%d requests became %d; after %d in vain none is sent twice", sent, n, maxInconclusive)
	}
	for _, mode := range []sandbox.HostMode{sandbox.HostPreserve, sandbox.HostRewrite} {
		requests.Store(0)
		f := newFront(t, newFakeNode(t, app(t, strict("neither", 403, &requests)), sandbox.Port{Host: mode}), Options{})
		if res := f.do(f.request("GET", "/")); res.StatusCode != 403 || requests.Load() != 1 {
			t.Errorf("%s: status %d after %d requests", mode, res.StatusCode, requests.Load())
		}
	}
}

// A visitor who leaves while a request is sent a second time says nothing of the server.
func TestLeavingVisitorsDoNotDecideTheHost(t *testing.T) {
	second := make(chan struct{})
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.HasPrefix(r.Host, "localhost:"):
			w.WriteHeader(http.StatusForbidden)
		case r.URL.Path == "/slow":
			second <- struct{}{}
			<-r.Context().Done()
		}
	}), sandbox.Port{}), Options{})
	for range maxInconclusive {
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan struct{})
		go func() {
			defer close(left)
			if res, err := f.Client().Transport.RoundTrip(f.request("GET", "/slow").WithContext(ctx)); err == nil {
				res.Body.Close()
			}
		}()
		<-second
		leave()
		<-left
		testkit.Eventually(t, "its handler has returned", func() bool { return f.proxy.inFlight() == 0 })
	}
	if res := f.do(f.request("GET", "/")); res.StatusCode != http.StatusOK {
		t.Errorf("a later request got %d", res.StatusCode)
	}
}

// A page that is open tries to connect again and again while its server is down.
func TestServerThatIsDownDoesNotDecideTheHost(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	for range 2 * maxInconclusive {
		req := f.request("GET", "/hmr")
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "websocket")
		wantProblem(t, f.do(req), 502, "port_not_listening")
	}
	f.node.serve(app(t, echo))
	c, _ := f.dial()
	say(t, c, "hello")
}

// Some servers take pages under any host and refuse only WebSockets, by a status
// or by ending the connection.
func TestWebSocketRefusedForItsOriginIsRetriedAsLocalhost(t *testing.T) {
	for name, refuse := range map[string]string{
		"status":       "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
		"no response":  "Unauthorized",
		"hangs up":     "",
		"bad response": "HTTP/1.1 4O3 Forbidden\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Upgrade") == "" {
					io.WriteString(w, "hello")
					return
				}
				if r.Header.Get("Origin") == "http://localhost:3000" {
					echo(w, r)
					return
				}
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				io.WriteString(conn, refuse)
			}), sandbox.Port{}), Options{})
			if got := testkit.Body(t, f.do(f.request("GET", "/"))); got != "hello" {
				t.Errorf("the page: %q", got)
			}
			c, _ := f.dial()
			say(t, c, "hello")
		})
	}
}

func TestForwardedHeadersOfVisitorsAreReplaced(t *testing.T) {
	var got http.Header
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) { got = r.Header }), sandbox.Port{}), Options{})
	req := f.request("GET", "/")
	for _, name := range []string{
		"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Prefix", "Forwarded", "Doze-Wake", "Doze-Anything",
		"X-Real-Ip", "True-Client-Ip", "CF-Connecting-IP", "X-Client-IP", "X-Cluster-Client-Ip", "X-Original-Host", "Proxy",
		"X_Forwarded_For", "x_real_ip", "Doze_Wake", "X-Forwarded",
	} {
		req.Header.Set(name, "forged")
	}
	req.Header.Set("Authorization", "Bearer of-the-app")
	req.Header.Set("Cookie", "session=1")
	f.do(req)
	for name, values := range got {
		if strings.Contains(strings.Join(values, ""), "forged") {
			t.Errorf("%s: %v", name, values)
		}
	}
	if got.Get("Authorization") != "Bearer of-the-app" || got.Get("Cookie") != "session=1" {
		t.Errorf("the app's own headers became %v", got)
	}
}

func TestInvalidStatusIsABadGateway(t *testing.T) {
	for name, test := range map[string]struct{ upgrade, response string }{
		"no status":                    {"", "HTTP/1.1 000 Nothing\r\nContent-Length: 0\r\n\r\n"},
		"below 100":                    {"", "HTTP/1.1 099 Nothing\r\nContent-Length: 0\r\n\r\n"},
		"an unrequested upgrade":       {"", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"},
		"an upgrade without a name":    {"", "HTTP/1.1 101 Switching Protocols\r\n\r\n"},
		"an upgrade to something else": {"websocket", "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, _ *http.Request) {
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				io.WriteString(conn, test.response)
			}), sandbox.Port{}), Options{})
			req := f.request("GET", "/")
			if test.upgrade != "" {
				req.Header.Set("Connection", "Upgrade")
				req.Header.Set("Upgrade", test.upgrade)
			}
			wantProblem(t, f.do(req), 502, "server_response_invalid")
		})
	}
}

// Without CORS headers, fetch hides a response from a script of another preview.
func TestErrorsOfTheNodeAreReadableByScripts(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	f.node.set(func(n *fakeNode) {
		n.sb.State, n.wakeErr = sandbox.StateStopped, &sandbox.WakeError{ID: testID, Err: errors.New("no"), LastLog: lastLog}
	})
	req := f.request("GET", "/")
	wantProblem(t, f.do(req), 502, "wake_failed")
	res := f.do(req)
	if h := res.Header.Get("Access-Control-Allow-Origin"); h != "" || !strings.Contains(testkit.Body(t, res), lastLog) {
		t.Errorf("without an origin: Access-Control-Allow-Origin %q", h)
	}
	req.Header.Set("Origin", "https://elsewhere.example")
	res = f.do(req)
	if res.Header.Get("Access-Control-Allow-Origin") != "https://elsewhere.example" || !strings.Contains(res.Header.Get("Vary"), "Origin") {
		t.Errorf("headers %v", res.Header)
	}
	if text := testkit.Body(t, res); !strings.Contains(text, "wake_failed") || strings.Contains(text, lastLog) {
		t.Errorf("a script of another origin reads %s", text)
	}
	// Only the application may allow what has to be asked for.
	req = f.request("OPTIONS", "/")
	req.Header.Set("Origin", "https://elsewhere.example")
	req.Header.Set("Access-Control-Request-Method", "PUT")
	res = f.do(req)
	if res.StatusCode/100 == 2 || res.Header.Get("Access-Control-Allow-Methods") != "" {
		t.Errorf("a preflight request got %d, %v", res.StatusCode, res.Header)
	}
}

func TestForwardedHeadersOfATrustedProxyAreUsed(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Header.Get("Origin")+" "+r.Header.Get("X-Forwarded-Port"))
		for name, values := range r.Header {
			if strings.Contains(name, "_") {
				t.Errorf("a proxy's header passed in a visitor's spelling: %s: %q", name, values)
			}
		}
	}), sandbox.Port{}), Options{Trusted: func(*http.Request) bool { return true }})
	req := f.request("GET", "/")
	req.Header.Set("X-Forwarded-Proto", "https")
	req.Header.Set("X-Forwarded-Port", "443")
	req.Header.Set("X_Forwarded_Host", "forged.example") // no proxy writes it so, and it may let a visitor's pass
	req.Header.Set("X-Forwarded_Proto", "http")
	req.Header.Set("Origin", "https://"+previewHost())
	if got := testkit.Body(t, f.do(req)); got != "https://"+previewHost()+" 443" {
		t.Errorf("the app saw %q", got)
	}
}

func TestRedirectsAndCookiesOfLocalhostBecomeThePreviews(t *testing.T) {
	own := "http://" + previewHost()
	foreign := "https://login.example/?client=1&redirect_uri="
	for in, want := range map[string]string{
		"http://localhost/login":   own + "/login",
		"https://localhost/login":  own + "/login",
		"http://[::1]/a":           own + "/a",
		"http://localhost:80/a":    "http://localhost:80/a",
		own + "/a":                 own + "/a",
		"https://" + previewHost(): own,
		foreign + "http%3A%2F%2Flocalhost%3A3000%2Fcallback%3Fa%3Db&state=x#f": foreign + url.QueryEscape(own+"/callback?a=b") + "&state=x#f",
		foreign + "http%3A%2F%2Flocalhost%3A3001%2Fcallback":                   foreign + "http%3A%2F%2Flocalhost%3A3001%2Fcallback",
		"http://localhost:3000/login?x=http://localhost:3000/#f":               own + "/login?x=http://localhost:3000/#f",
		"http://localhost:3000":               own,
		"https://LOCALHOST:3000/a":            own + "/a",
		"http://127.0.0.1:3000/a":             own + "/a",
		"http://[::1]:3000/a":                 own + "/a",
		"//localhost:3000/a":                  own + "/a",
		"/relative":                           "/relative",
		"../up?u=//localhost:3000/":           "../up?u=//localhost:3000/",
		"http://localhost:3001/other":         "http://localhost:3001/other",
		"https://elsewhere.example/":          "https://elsewhere.example/",
		"http://localhost:3000.evil.example/": "http://localhost:3000.evil.example/",
	} {
		f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Location"] = []string{in}
			w.WriteHeader(http.StatusFound)
		}), sandbox.Port{Host: sandbox.HostRewrite}), Options{})
		if got := f.do(f.request("GET", "/")).Header.Get("Location"); got != want {
			t.Errorf("Location %q became %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{
		"a=b; Domain=localhost; Path=/; HttpOnly":     "a=b; Path=/; HttpOnly",
		"a=b;domain=.localhost;Secure":                "a=b;Secure",
		"a=domain; Path=/":                            "a=domain; Path=/",
		"a=b; Domain=preview.example.com; SameSite=x": "a=b; SameSite=x",
		"domain=value":                                "domain=value",
	} {
		if got := withoutDomain(in); got != want {
			t.Errorf("cookie %q became %q, want %q", in, got, want)
		}
	}
}

// A server that knows the preview's name speaks of localhost for another reason.
func TestRedirectsOfAServerThatKnowsThePreviewsName(t *testing.T) {
	own := "http://" + previewHost()
	foreign := "https://login.example/?redirect_uri="
	for _, test := range []struct{ query, in, want string }{
		{"", "https://" + previewHost() + "/a", own + "/a"},     // it knows nothing of TLS, or of none
		{"", "http://" + previewHost() + ":3000/a", own + "/a"}, // nor of the port outside
		{"", "http://localhost:3000/a", own + "/a"},             // by its configuration
		{"", "http://localhost/a", "http://localhost/a"},        // the visitor's own machine
		{"", "http://localhost:4003/a", "http://localhost:4003/a"},
		// An OAuth client in another sandbox, which serves the same port there.
		{"", "https://localhost:3000/callback?code=1", "https://localhost:3000/callback?code=1"},
		{"?redirect_uri=http%3A%2F%2Flocalhost%3A3000%2Fcallback", "http://localhost:3000/callback?code=1", "http://localhost:3000/callback?code=1"},
		{"", foreign + url.QueryEscape("https://"+previewHost()+"/callback"), foreign + url.QueryEscape(own+"/callback")},
	} {
		f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Location"] = []string{test.in}
			w.WriteHeader(http.StatusFound)
		}), sandbox.Port{}), Options{})
		if got := f.do(f.request("GET", "/"+test.query)).Header.Get("Location"); got != test.want {
			t.Errorf("after %q, Location %q became %q, want %q", test.query, test.in, got, test.want)
		}
	}
}

func TestOtherHeadersOfTheServersAddressAreRewritten(t *testing.T) {
	own := "http://" + previewHost()
	socket := "ws://" + previewHost()
	for _, test := range []struct{ name, in, want string }{
		{"Content-Location", "http://localhost:3000/a", own + "/a"},
		{"Access-Control-Allow-Origin", "http://localhost:3000", own},
		{"Access-Control-Allow-Origin", "*", "*"},
		{"Access-Control-Allow-Origin", "https://other.example", "https://other.example"},
		{"Link", `<http://localhost:3000/a?x=1>; rel="next", </b>; rel=x, <http://localhost:3001/>; rel=y`, `<` + own + `/a?x=1>; rel="next", </b>; rel=x, <http://localhost:3001/>; rel=y`},
		{"Refresh", "5; url=http://localhost:3000/a", "5; url=" + own + "/a"},
		{"Refresh", "0;URL='http://localhost:3000/a'", "0;URL='" + own + "/a'"},
		{"Refresh", "5", "5"},
		{"Content-Security-Policy", "connect-src 'self' ws://localhost:3000 http://localhost:3000/api; img-src https://cdn.example;", "connect-src 'self' " + socket + " " + own + "/api; img-src https://cdn.example;"},
		{"Content-Security-Policy-Report-Only", "default-src http://localhost:3000", "default-src " + own},
	} {
		f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(test.name, test.in)
		}), sandbox.Port{Host: sandbox.HostRewrite}), Options{})
		if got := f.do(f.request("GET", "/")).Header.Get(test.name); got != test.want {
			t.Errorf("%s %q became %q, want %q", test.name, test.in, got, test.want)
		}
	}
}

// awaitPooled waits until the connection of the last request is kept: its
// visitor may have the whole response a moment before.
func (f *front) awaitPooled() {
	f.t.Helper()
	testkit.Eventually(f.t, "its handler has returned", func() bool { return f.proxy.inFlight() == 0 })
}

func TestConnectionsArePooled(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	for range 10 {
		testkit.Body(t, f.do(f.request("GET", "/")))
		f.awaitPooled()
	}
	f.node.sleep(sandbox.WakeWarm, nil)
	testkit.Body(t, f.do(f.request("GET", "/")))
	if n := f.node.dials.Load(); n != 1 {
		t.Errorf("%d connections for 10 requests in a row and one after a warm wake", n)
	}
}

// A server whose keep-alive time passed while it was frozen closes its idle
// connections at the moment it thaws.
func TestRequestWithABodyUsesNoConnectionFromBeforeTheSleep(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	post := func() {
		req := f.request("POST", "/")
		// Chunked: of a body whose length is known, the server has all before
		// the proxy has seen its end, and may respond so early that the
		// connection is not kept.
		req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), -1
		if res := f.do(req); testkit.Body(t, res) != "hello" {
			t.Errorf("status %d", res.StatusCode)
		}
		f.awaitPooled()
	}
	post()
	post()
	if n := f.node.dials.Load(); n != 1 {
		t.Errorf("%d connections for 2 requests in a row", n)
	}
	f.node.sleep(sandbox.WakeWarm, nil)
	post()
	if n := f.node.dials.Load(); n != 2 {
		t.Errorf("%d connections after the wake, want a second one", n)
	}
}

// Elsewhere a preview stayed dead after a wake, because a connection of the previous
// container was still used.
func TestConnectionOfAnOlderContainerIsNotReused(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		t.Run(method, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "old") }), sandbox.Port{}), Options{})
			send := func() string {
				req := f.request(method, "/")
				if method == "POST" {
					req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), 4
				}
				return testkit.Body(t, f.do(req))
			}
			send()
			f.node.sleep(sandbox.WakeCold, nil)
			f.node.serve(app(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "new") }))
			if got := send(); got != "new" {
				t.Errorf("the response is of the %s one", got)
			}
		})
	}
}

// woken, but the service inside is not up yet.
func TestRequestsWaitForThePortAfterAColdWake(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		t.Run(method, func(t *testing.T) {
			node := newFakeNode(t, "", sandbox.Port{})
			f := newFront(t, node, Options{})
			node.sleep(sandbox.WakeCold, nil)
			var all sync.WaitGroup
			var served atomic.Int64
			const visitors = 20
			for i := range visitors {
				if i == 1 { // the others find it running, and the first one waiting
					testkit.Eventually(t, "the first one waits for the port", func() bool { return node.dials.Load() > 0 })
				}
				all.Go(func() {
					req := f.request(method, "/")
					if method == "POST" {
						req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), 4
					}
					res, err := f.Client().Transport.RoundTrip(req)
					if err != nil {
						return
					}
					defer res.Body.Close()
					if got, _ := io.ReadAll(res.Body); string(got) == "hello" {
						served.Add(1)
					}
				})
			}
			testkit.Eventually(t, "all wait", func() bool { return f.proxy.inFlight() == visitors && node.dials.Load() > 4 })
			node.serve(app(t, hello))
			all.Wait()
			if n := served.Load(); n != visitors {
				t.Errorf("%d of %d were served", n, visitors)
			}
			if n := len(f.proxy.gates.open); n != 0 {
				t.Errorf("%d gates are kept", n)
			}
		})
	}
}

// A server that listens before it can serve, such as one that loads its data, gets no
// request until it is ready.
func TestRequestsWaitForTheReadinessOfTheProcess(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		t.Run(method, func(t *testing.T) {
			node := newFakeNode(t, app(t, hello), sandbox.Port{})
			ready := make(chan struct{})
			node.pending = ready
			f := newFront(t, node, Options{})
			done := make(chan string, 1)
			go func() {
				req := f.request(method, "/")
				if method == "POST" {
					req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), 4
				}
				done <- testkit.Body(t, f.do(req))
			}()
			testkit.Eventually(t, "the request waits", func() bool { return f.proxy.inFlight() == 1 })
			if n := node.dials.Load(); n != 0 {
				t.Errorf("%d connections before the process was ready", n)
			}
			node.set(func(n *fakeNode) { n.pending = nil })
			close(ready)
			if got := testkit.Receive(t, "the response", done); got != "hello" {
				t.Errorf("the response is %q", got)
			}
		})
	}
	t.Run("not in time", func(t *testing.T) {
		node := newFakeNode(t, app(t, hello), sandbox.Port{})
		node.pending = make(chan struct{})
		f := newFront(t, node, Options{WaitTimeout: time.Millisecond})
		res := f.do(f.request("GET", "/"))
		if got := testkit.Body(t, res); res.StatusCode != http.StatusGatewayTimeout || !strings.Contains(got, "port_not_ready") {
			t.Errorf("status %d: %s", res.StatusCode, got)
		}
	})
}

// Vite listens on its port for a moment, to check that it is free.
func TestServerThatProbesItsPortIsNotReady(t *testing.T) {
	t.Run("the connection is reset while it is made", func(t *testing.T) {
		node := newFakeNode(t, "", sandbox.Port{})
		node.dialErr = syscall.ECONNRESET
		f := newFront(t, node, Options{})
		node.sleep(sandbox.WakeCold, nil)
		go func() { // ends with the first attempts
			for node.dials.Load() < 2 && t.Context().Err() == nil {
				runtime.Gosched()
			}
			node.set(func(n *fakeNode) { n.dialErr = nil })
			node.serve(app(t, hello))
		}()
		if got := testkit.Body(t, f.do(f.request("GET", "/"))); got != "hello" {
			t.Errorf("the response is %q", got)
		}
	})
	t.Run("the connection is reset after it was made", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		node := newFakeNode(t, listener.Addr().String(), sandbox.Port{})
		f := newFront(t, node, Options{})
		node.sleep(sandbox.WakeCold, nil)
		server := app(t, hello)
		defer listener.Close() // not earlier: its port could be reused
		go func() {            // ends with the first connection
			conn, err := listener.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			node.serve("")
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
			for node.dials.Load() < 3 && t.Context().Err() == nil {
				runtime.Gosched()
			}
			node.serve(server)
		}()
		if got := testkit.Body(t, f.do(f.request("GET", "/"))); got != "hello" {
			t.Errorf("the response is %q", got)
		}
	})
}

// The same for requests after the wake, or after a start by another client.
func TestRequestsWaitForADeclaredServerAfterAnyStart(t *testing.T) {
	node := newFakeNode(t, "", sandbox.Port{})
	node.sb.StartedAt = time.Now()
	node.sb.Declared = []guest.ProcessSpec{{Command: guest.Command{Command: "serve"}}}
	f := newFront(t, node, Options{})
	done := make(chan *http.Response)
	go func() { res, _ := f.Client().Transport.RoundTrip(f.request("GET", "/")); done <- res }()
	testkit.Eventually(t, "the port was tried", func() bool { return node.dials.Load() > 3 })
	node.serve(app(t, hello))
	res := <-done
	if res == nil {
		t.Fatal("no response")
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestPortThatNeverListensIs504(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{WaitTimeout: 20 * time.Millisecond})
	f.node.sleep(sandbox.WakeCold, nil)
	res := f.do(f.request("POST", "/"))
	wantProblem(t, res, 504, "port_not_ready")
	if res.Header.Get("Doze-Wake") != "cold" {
		t.Error("does not report that it woke the sandbox")
	}
}

// The end of a container fails all waits for its port immediately.
func TestContainerThatEndsFailsTheWaitForItsPort(t *testing.T) {
	for name, test := range map[string]struct {
		end    func(*fakeNode)
		status int
		code   string
	}{
		"noticed by the node": {func(n *fakeNode) { n.sb.State = sandbox.StateStopped }, 502, "wake_failed"},
		"started again":       {func(n *fakeNode) { n.sb.StartedAt = n.sb.StartedAt.Add(1) }, 502, "wake_failed"},
		"noticed by the dial": {func(n *fakeNode) { n.dialErr = syscall.ESRCH }, 502, "wake_failed"},
		"noticed by the dial before its owner's stop ends": {func(n *fakeNode) {
			n.dialErr = syscall.ESRCH
			go n.set(func(n *fakeNode) {
				n.sb.State, n.sb.StateReason = sandbox.StateStopped, sandbox.ReasonRequested
			})
		}, 503, "sandbox_stopped"},
		"destroyed, so forgotten": {func(n *fakeNode) { n.sb.ID = "another00000" }, 404, "preview_not_found"},
		"being destroyed":         {func(n *fakeNode) { n.sb.State = sandbox.StateDestroyed }, 404, "preview_not_found"},
		"stopped by its owner": {func(n *fakeNode) {
			n.sb.State, n.sb.StateReason = sandbox.StateStopped, sandbox.ReasonRequested
		}, 503, "sandbox_stopped"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newFakeNode(t, "", sandbox.Port{})
			node.sb.Declared = []guest.ProcessSpec{{Command: guest.Command{Command: "serve"}}}
			f := newFront(t, node, Options{})
			node.sleep(sandbox.WakeCold, nil)
			const visitors = 10
			answers := make(chan *http.Response, visitors)
			for range visitors {
				go func() { res, _ := f.Client().Transport.RoundTrip(f.request("GET", "/")); answers <- res }()
			}
			testkit.Eventually(t, "all wait for the port", func() bool { return f.proxy.waitersAt() == visitors })
			node.set(test.end)
			for range visitors {
				res := <-answers
				if res == nil {
					t.Fatal("no response")
				}
				defer res.Body.Close()
				if p := wantProblem(t, res, test.status, test.code); (p.ContainerOutput == lastLog) != (test.status == 502) {
					t.Errorf("container_output %q", p.ContainerOutput)
				}
			}
			if n := node.lastLogs.Load(); n != 1 && test.status == 502 {
				t.Errorf("the log was read %d times", n)
			}
			if n := node.wakes.Load(); n != 1 {
				t.Errorf("%d wakes, want 1", n)
			}
		})
	}
}

// A container may end just before a request comes, and the node notices it just
// after. The request is served by the next one.
func TestRequestStartsAContainerThatEndedUnnoticed(t *testing.T) {
	for name, prepare := range map[string]func(*fakeNode){
		"long after its start": func(*fakeNode) {},
		"soon after its start": func(n *fakeNode) {
			n.sb.Declared = []guest.ProcessSpec{{Command: guest.Command{Command: "serve"}}}
			n.sb.StartedAt = time.Now()
		},
	} {
		for _, kept := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, connection kept %v", name, kept), func(t *testing.T) {
				server := httptest.NewServer(http.HandlerFunc(hello))
				defer server.Close()
				node := newFakeNode(t, server.Listener.Addr().String(), sandbox.Port{})
				node.set(prepare)
				f := newFront(t, node, Options{})
				if kept {
					if res := f.do(f.request("GET", "/")); res.StatusCode != 200 {
						t.Fatalf("status %d", res.StatusCode)
					}
				}
				server.CloseClientConnections()
				before := node.dials.Load()
				node.set(func(n *fakeNode) { n.dialErr = syscall.ESRCH })
				done := make(chan *http.Response, 1)
				go func() { res, _ := f.Client().Transport.RoundTrip(f.request("GET", "/")); done <- res }()
				testkit.Eventually(t, "the request has dialed", func() bool { return node.dials.Load() > before })
				node.set(func(n *fakeNode) { n.dialErr, n.sb.State, n.kind = nil, sandbox.StateStopped, sandbox.WakeCold })
				res := <-done
				if res == nil {
					t.Fatal("no response")
				}
				defer res.Body.Close()
				if res.StatusCode != 200 || res.Header.Get("Doze-Wake") != "cold" {
					t.Errorf("status %d, woke %q", res.StatusCode, res.Header.Get("Doze-Wake"))
				}
				testkit.Eventually(t, "no lease is held", func() bool { return node.leases.Load() == 0 })
			})
		}
	}
}

// A request that may not wake it gets that as the reason, and one that cannot be
// repeated gets the loss.
func TestSomeRequestsDoNotStartAContainerThatEndedUnnoticed(t *testing.T) {
	for name, c := range map[string]struct {
		port   sandbox.Port
		body   string
		status int
		code   string
	}{
		"refuses":    {sandbox.Port{Wake: sandbox.WakeNever}, "", 410, "sandbox_not_running"},
		"has a body": {sandbox.Port{}, "data", 502, "server_disconnected"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newFakeNode(t, "", c.port)
			node.dialErr = syscall.ESRCH
			f := newFront(t, node, Options{})
			done := make(chan *http.Response, 1)
			req := f.request("POST", "/")
			if c.body != "" {
				req.Body, req.ContentLength = io.NopCloser(strings.NewReader(c.body)), int64(len(c.body))
			}
			go func() { res, _ := f.Client().Transport.RoundTrip(req); done <- res }()
			testkit.Eventually(t, "the request has dialed", func() bool { return node.dials.Load() > 0 })
			node.sleep(sandbox.WakeCold, nil)
			res := <-done
			if res == nil {
				t.Fatal("no response")
			}
			wantProblem(t, res, c.status, c.code)
			if n := node.wakes.Load(); n != 0 {
				t.Errorf("it was woken %d times", n)
			}
		})
	}
}

// waitersAt counts the requests that wait at gates.
func (p *Proxy) waitersAt() (n int) {
	p.gates.mu.Lock()
	defer p.gates.mu.Unlock()
	for _, gt := range p.gates.open {
		n += gt.waiters
	}
	return n
}

func TestRunningSandboxWithoutAServerIs502AfterOneRetry(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	wantProblem(t, f.do(f.request("GET", "/")), 502, "port_not_listening")
	if n := f.node.dials.Load(); n != 2 {
		t.Errorf("GET: %d attempts, want 2", n)
	}
	req := f.request("POST", "/")
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), 4
	wantProblem(t, f.do(req), 502, "port_not_listening")
	if n := f.node.dials.Load(); n != 3 {
		t.Errorf("POST with a body: %d attempts, want 1", n-2)
	}
}

// droppingApp closes the first connections without a response, after it has
// read the request and, if half is set, sent a part of a response.
func droppingApp(t *testing.T, drop int, half string) (addr string, requests *atomic.Int64) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	requests = new(atomic.Int64)
	var done sync.WaitGroup
	t.Cleanup(func() { ln.Close(); done.Wait() })
	done.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			done.Go(func() {
				defer conn.Close()
				req, err := http.ReadRequest(bufio.NewReader(conn))
				if err != nil {
					return
				}
				if req.Method == "PRI" { // the question whether it speaks HTTP/2
					return
				}
				io.Copy(io.Discard, req.Body)
				if requests.Add(1) <= int64(drop) {
					io.WriteString(conn, half)
					conn.(*net.TCPConn).SetLinger(0) // a reset
					return
				}
				io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
			})
		}
	})
	return ln.Addr().String(), requests
}

func TestLostConnectionIsRetriedOnceForBodylessRequests(t *testing.T) {
	for _, test := range []struct {
		name, method, body, half string
		drop                     int
		status                   int
		requests                 int64
	}{
		{"GET", "GET", "", "", 1, 200, 2},
		{"POST without a body", "POST", "", "", 1, 200, 2},
		{"only once", "GET", "", "", 2, 502, 2},
		{"with a body", "POST", "data", "", 1, 502, 1},
		{"after the first byte", "GET", "", "HTTP/1.1 200", 1, 502, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr, requests := droppingApp(t, test.drop, test.half)
			f := newFront(t, newFakeNode(t, addr, sandbox.Port{}), Options{})
			req := f.request(test.method, "/")
			if test.body != "" {
				req.Body, req.ContentLength = io.NopCloser(strings.NewReader(test.body)), int64(len(test.body))
			}
			res := f.do(req)
			if res.StatusCode != test.status || requests.Load() != test.requests {
				t.Errorf("status %d after %d requests, want %d after %d", res.StatusCode, requests.Load(), test.status, test.requests)
			}
		})
	}
}

// keepingApp responds to warm requests on connections that it keeps, and closes a
// connection without a response when another request comes on it. It counts the
// requests that are not warm; if dies, it responds to none of those.
func keepingApp(t *testing.T, dies bool) (addr string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	used := func(r *http.Request) bool { return r.Context().Value(usedKey{}).(*atomic.Bool).Swap(true) }
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		again := used(r)
		if r.URL.Path == "/warm" {
			io.WriteString(w, "warm")
			return
		}
		requests.Add(1)
		if again || dies {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				conn.Close()
			}
			return
		}
		io.WriteString(w, "hello")
	}))
	server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, usedKey{}, new(atomic.Bool))
	}
	server.Start()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String(), requests
}

type usedKey struct{}

// After a sleep all kept connections may be dead: the one retry uses none of
// them, and http.Transport adds none of its own.
func TestLostIdleConnectionIsRetriedOnceOverANewOne(t *testing.T) {
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "DELETE", "POST"} {
		for _, dies := range []bool{false, true} {
			t.Run(fmt.Sprint(method, " dies ", dies), func(t *testing.T) {
				addr, requests := keepingApp(t, dies)
				node := newFakeNode(t, addr, sandbox.Port{})
				f := newFront(t, node, Options{})
				const kept = 4
				var open []*http.Response
				for range kept { // each holds its connection until its body is read
					open = append(open, f.do(f.request("GET", "/warm")))
				}
				for _, res := range open {
					testkit.Body(t, res)
				}
				f.awaitPooled()
				dials := node.dials.Load()
				res := f.do(f.request(method, "/"))
				want, attempts := 200, int64(2)
				if dies {
					want = 502
				}
				if res.StatusCode != want || requests.Load() != attempts {
					t.Errorf("status %d after %d requests, want %d after %d", res.StatusCode, requests.Load(), want, attempts)
				}
				if n := node.dials.Load() - dials; n != 1 {
					t.Errorf("%d new connections, want 1", n)
				}
			})
		}
	}
}

// The errors of net/http for a dead idle connection are not exported.
func TestAnyErrorOfAReusedConnectionIsALoss(t *testing.T) {
	closed := errors.New("http: server closed idle connection")
	for _, test := range []struct {
		err  error
		want bool
	}{
		{&beforeResponseError{error: closed, reused: true}, true},
		{&beforeResponseError{error: closed}, false},
		{&beforeResponseError{error: fmt.Errorf("dial: %w", syscall.ECONNREFUSED)}, true},
		{closed, false}, // after the first byte
		{syscall.ECONNRESET, false},
	} {
		if got := isLost(test.err); got != test.want {
			t.Errorf("%#v: %v", test.err, got)
		}
	}
}

// The server does not see the trick that prevents http.Transport's own retries.
func TestBodylessRequestIsSentWithoutABody(t *testing.T) {
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "DELETE", "POST"} {
		got := make(chan string, 1)
		f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			got <- fmt.Sprint(r.ContentLength, r.TransferEncoding, len(b), err)
		}), sandbox.Port{}), Options{})
		f.do(f.request(method, "/"))
		if text := <-got; text != "0 [] 0 <nil>" {
			t.Errorf("%s came with %s", method, text)
		}
	}
}

// A preview that responded with 502 recovers as soon as its server does.
func TestPreviewRecoversWithItsServer(t *testing.T) {
	first := httptest.NewServer(http.HandlerFunc(hello))
	f := newFront(t, newFakeNode(t, first.Listener.Addr().String(), sandbox.Port{}), Options{})
	testkit.Body(t, f.do(f.request("GET", "/")))
	first.Close() // the connection that was kept dies with it
	f.node.serve("")
	for range 3 {
		wantProblem(t, f.do(f.request("GET", "/")), 502, "port_not_listening")
	}
	f.node.serve(app(t, hello))
	for _, method := range []string{"GET", "POST"} {
		if res := f.do(f.request(method, "/")); res.StatusCode != 200 || testkit.Body(t, res) != "hello" {
			t.Errorf("%s: status %d", method, res.StatusCode)
		}
	}
}

// A failure of the node is logged, though not once for every visitor, and not shown
// to visitors. A failure of the sandbox is not logged.
func TestDialFailureOfTheNodeIsLogged(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	wantProblem(t, f.do(f.request("GET", "/")), 502, "port_not_listening")
	if got := f.node.log.String(); strings.Contains(got, "failed to dial") {
		t.Errorf("logged %q", got)
	}
	f.node.set(func(n *fakeNode) { n.dialErr = errors.New("the namespace helper ended") })
	for range 20 {
		if p := wantProblem(t, f.do(f.request("GET", "/")), 502, "server_disconnected"); strings.Contains(p.Detail, "helper") {
			t.Errorf("the visitor reads %q", p.Detail)
		}
	}
	got := f.node.log.String()
	if lines := strings.Count(got, "failed to dial"); lines == 0 || lines >= 20 || !strings.Contains(got, "sandbox="+string(testID)) || !strings.Contains(got, "the namespace helper ended") {
		t.Errorf("logged %q", got)
	}
}

// A 103 goes through the reverse proxy by another way than a response.
func TestEarlyHintsAreCleanedLikeResponses(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</a.css>; rel=preload")
		w.Header().Set("Doze-Wake", "warm")
		w.Header().Set("Set-Cookie", "a=b; Domain=example.com; Path=/")
		w.WriteHeader(http.StatusEarlyHints)
	}), sandbox.Port{}), Options{})
	var early http.Header
	req := f.request("GET", "/")
	f.do(req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, header textproto.MIMEHeader) error { early = http.Header(header).Clone(); return nil },
	})))
	if early.Get("Link") == "" || early.Get("Doze-Wake") != "" || early.Get("Set-Cookie") != "a=b; Path=/" {
		t.Errorf("the hints became %v", early)
	}
}

func TestRequestWithoutAHandlerIsRefused(t *testing.T) {
	req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://sandbox/", nil)
	if res, err := New(newFakeNode(t, "", sandbox.Port{}), slog.New(slog.DiscardHandler)).RoundTrip(req); err == nil {
		res.Body.Close()
		t.Error("was sent")
	}
}

func TestResponseHeaderIsBounded(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Huge", strings.Repeat("x", 2*maxResponseHeader))
	}), sandbox.Port{}), Options{})
	wantProblem(t, f.do(f.request("GET", "/")), 502, "server_disconnected")
}
