package wakeproxy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func hello(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }

// wantProblem checks status and code of a problem document.
func wantProblem(t *testing.T, res *http.Response, status int, code string) problem.Problem {
	t.Helper()
	var p problem.Problem
	text := testkit.Body(t, res)
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatalf("%d with %q: %v", res.StatusCode, text, err)
	}
	if res.StatusCode != status || p.Status != status || p.Code.String() != code || res.Header.Get(problem.HeaderError) != code {
		t.Errorf("response %d with %+v, want %d %s", res.StatusCode, p, status, code)
	}
	if id := res.Header.Get("X-Request-Id"); id == "" || p.RequestID != id {
		t.Errorf("X-Request-Id %q, request_id %q", id, p.RequestID)
	}
	if got := res.Header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type %q", got)
	}
	return p
}

func TestFailedRequestIsLoggedWithItsRequestID(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	req := f.request("GET", "/?canary")
	req.Header.Set("Referer", "https://canary.example/")
	p := wantProblem(t, f.do(req), 502, "port_not_listening")
	var got string
	testkit.Eventually(t, "the failure is logged", func() bool { got = f.node.log.String(); return got != "" })
	for _, want := range []string{"preview request failed", "sandbox=" + string(testID), "port=3000", "code=port_not_listening", "status=502", "request_id=" + p.RequestID} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in %q", want, got)
		}
	}
	if strings.Contains(got, "canary") || strings.Contains(got, testToken) {
		t.Errorf("logged %q", got)
	}
}

// asNavigation makes a request a browser's navigation.
func asNavigation(req *http.Request) *http.Request {
	req.Header.Set("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
	req.Header.Set("Sec-Fetch-Mode", "navigate")
	return req
}

func TestRunningSandboxIsServedWithoutWakeHeaders(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	res := f.do(f.request("GET", "/"))
	if res.StatusCode != 200 || testkit.Body(t, res) != "hello" {
		t.Errorf("status %d", res.StatusCode)
	}
	if got := res.Header.Get("Doze-Wake") + res.Header.Get("Server-Timing"); got != "" {
		t.Errorf("says %q", got)
	}
	testkit.Eventually(t, "the lease is released", func() bool { return f.node.leases.Load() == 0 })
}

func TestRequestThatWakesReportsTheWake(t *testing.T) {
	for _, kind := range []sandbox.WakeKind{sandbox.WakeWarm, sandbox.WakeCold} {
		t.Run(string(kind), func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
			f.node.sleep(kind, nil)
			res := f.do(f.request("GET", "/"))
			if res.StatusCode != 200 || res.Header.Get("Doze-Wake") != string(kind) {
				t.Errorf("status %d, Doze-Wake %q", res.StatusCode, res.Header.Get("Doze-Wake"))
			}
			var ms float64
			if _, err := fmt.Sscanf(res.Header.Get("Server-Timing"), "wake;dur=%f", &ms); err != nil {
				t.Errorf("Server-Timing %q: %v", res.Header.Get("Server-Timing"), err)
			}
		})
	}
}

func TestAppCannotForgeWakeHeaders(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Doze-Wake", "warm")
		w.Header().Set("Server-Timing", "db;dur=3")
	}), sandbox.Port{}), Options{})
	res := f.do(f.request("GET", "/"))
	if got := res.Header.Get("Doze-Wake"); got != "" {
		t.Errorf("Doze-Wake %q", got)
	}
	if got := res.Header.Get("Server-Timing"); got != "db;dur=3" {
		t.Errorf("the app's own Server-Timing became %q", got)
	}
}

// Hosts that do not lead to a preview get identical responses, so that clients cannot
// find out which sandboxes and ports exist, and the API's host is one of them.
func TestMismatchesAreTheSame404(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	wrong := strings.Repeat("z", len(testToken))
	var first string
	for _, host := range []string{
		"3000-k3f9x2m7q1az-" + wrong + "." + domain,
		"3000-k3f9x2m7q1az." + domain,
		"3000-k3f9x2m7q1az-a." + domain,
		"3001-k3f9x2m7q1az-" + testToken + "." + domain,
		"3000-aaaaaaaaaaaa-" + testToken + "." + domain,
		"x." + domain, domain, "api.example.com", "localhost", "127.0.0.1",
	} {
		req := f.request("GET", "/")
		req.Host = host
		req.Header.Set("X-Request-Id", "the-same") // the node would make one up for each
		res := f.do(req)
		res.Header.Del("Date")
		got := fmt.Sprint(res.StatusCode, res.Header, testkit.Body(t, res))
		if first == "" {
			first = got
		}
		if res.StatusCode != 404 || got != first {
			t.Errorf("%s: %s\nwant %s", host, got, first)
		}
	}
	if n := f.node.acquired.Load(); n != 0 {
		t.Errorf("%d leases were taken", n)
	}
}

func TestPublicPortAcceptsNoToken(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{Access: sandbox.AccessPublic}), Options{})
	req := f.request("GET", "/")
	req.Host = "3000-k3f9x2m7q1az." + domain
	if res := f.do(req); res.StatusCode != 200 {
		t.Errorf("without: status %d", res.StatusCode)
	}
	if res := f.do(f.request("GET", "/")); res.StatusCode != 404 {
		t.Errorf("with one: status %d", res.StatusCode)
	}
}

func TestPortWithoutItsTokenIsNotPublic(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	f.node.set(func(n *fakeNode) { n.sb.Ports = []sandbox.Port{{Port: 3000, Access: sandbox.AccessToken}} })
	req := f.request("GET", "/")
	req.Host = "3000-k3f9x2m7q1az." + domain
	if res := f.do(req); res.StatusCode != 404 {
		t.Errorf("status %d", res.StatusCode)
	}
}

func TestModeNeverRespondsWith410AndDoesNotWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{Wake: sandbox.WakeNever}), Options{})
	if res := f.do(f.request("GET", "/")); res.StatusCode != 200 {
		t.Errorf("running: status %d", res.StatusCode)
	}
	f.node.sleep(sandbox.WakeWarm, nil)
	wantProblem(t, f.do(f.request("GET", "/")), 410, "sandbox_not_running")
	wantProblem(t, f.do(f.request("GET", WakePath)), 410, "sandbox_not_running")
	if sb, _ := f.node.ByID(testID); sb.State != sandbox.StateAsleep || f.node.wakes.Load() != 0 {
		t.Errorf("the sandbox is %s after %d wakes", sb.State, f.node.wakes.Load())
	}
}

// the wake takes longer than the request may wait; it goes on.
func TestWakeTimeoutIs504AndTheWakeContinues(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{WaitTimeout: 10 * time.Millisecond})
	waking := make(chan struct{})
	f.node.sleep(sandbox.WakeWarm, waking)
	res := f.do(f.request("POST", "/"))
	wantProblem(t, res, 504, "wake_timeout")
	if res.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	close(waking)
	if res := f.do(f.request("POST", "/")); res.StatusCode != 200 {
		t.Errorf("then: status %d", res.StatusCode)
	}
}

func TestFailuresOfAWake(t *testing.T) {
	for _, test := range []struct {
		name   string
		err    error
		status int
		code   string
		retry  bool
	}{
		{"too many waiters", sandbox.ErrTooManyWaiters, 503, "waiter_limit_exceeded", true},
		{"container exits", &sandbox.WakeError{ID: testID, Err: errors.New("its container exited with code 1"), LastLog: "boom"}, 502, "wake_failed", false},
		{"a wake's own time-out", &sandbox.WakeError{ID: testID, Err: context.DeadlineExceeded}, 502, "wake_failed", false},
		{"engine down", &sandbox.WakeError{ID: testID, Err: sandbox.ErrEngineDown}, 503, "engine_unavailable", true},
		{"closing", sandbox.ErrClosed, 503, "node_unavailable", true},
		{"destroyed meanwhile", sandbox.ErrDestroyed, 404, "preview_not_found", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
			f.node.sleep(sandbox.WakeCold, nil)
			f.node.set(func(n *fakeNode) { n.wakeErr = fmt.Errorf("fake: %w", test.err) })
			res := f.do(f.request("GET", "/"))
			p := wantProblem(t, res, test.status, test.code)
			if (res.Header.Get("Retry-After") != "") != test.retry {
				t.Errorf("Retry-After %q", res.Header.Get("Retry-After"))
			}
			var failed *sandbox.WakeError
			if errors.As(test.err, &failed) && p.ContainerOutput != failed.LastLog {
				t.Errorf("container_output %q, want %q", p.ContainerOutput, failed.LastLog)
			}
		})
	}
}

func TestNavigationGetsTheWaitingPage(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{WaitingPageAfter: 10 * time.Millisecond})
	waking := make(chan struct{})
	f.node.sleep(sandbox.WakeWarm, waking)

	res := f.do(asNavigation(f.request("GET", "/deep/link?x=1")))
	page := testkit.Body(t, res)
	if res.StatusCode != 503 || res.Header.Get("Retry-After") != "1" || res.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("status %d, headers %v", res.StatusCode, res.Header)
	}
	for _, secret := range []string{string(testID), testToken, domain, "3000"} {
		if strings.Contains(page, secret) {
			t.Errorf("the page says %q", secret)
		}
	}
	for _, outside := range []string{"http:", "https:", "src=", "<link"} {
		if strings.Contains(page, outside) {
			t.Errorf("the page has %q", outside)
		}
	}
	for _, part := range []string{WakePath, `<noscript><meta http-equiv="refresh"`, "prefers-color-scheme: dark"} {
		if !strings.Contains(page, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
	for _, tag := range []string{"style", "script"} {
		_, rest, _ := strings.Cut(page, "<"+tag+">")
		inline, _, _ := strings.Cut(rest, "</"+tag+">")
		if policy := res.Header.Get("Content-Security-Policy"); inline == "" || !strings.Contains(policy, hashOf(inline)) {
			t.Errorf("the policy %q does not allow the page's own %s", policy, tag)
		}
	}
	close(waking)
	if res := f.do(asNavigation(f.request("GET", "/deep/link?x=1"))); res.StatusCode != 200 || testkit.Body(t, res) != "hello" {
		t.Errorf("then: status %d", res.StatusCode)
	}
}

func TestRequestsOtherThanNavigationsWait(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*http.Request)
	}{
		{"a program", func(r *http.Request) {}},
		{"fetch of a page", func(r *http.Request) { r.Header.Set("Sec-Fetch-Mode", "cors") }},
		{"a form", func(r *http.Request) { r.Method = "POST" }},
		{"an image", func(r *http.Request) { r.Header.Set("Accept", "image/png,*/*") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{WaitingPageAfter: time.Nanosecond})
			waking := make(chan struct{})
			f.node.sleep(sandbox.WakeWarm, waking)
			req := f.request("GET", "/")
			if test.name != "a program" {
				asNavigation(req)
			}
			test.change(req)
			done := make(chan *http.Response)
			go func() { res, _ := f.Client().Transport.RoundTrip(req); done <- res }()
			testkit.Eventually(t, "it waits", func() bool { return f.proxy.inFlight() == 1 })
			close(waking)
			res := <-done
			if res == nil {
				t.Fatal("no response")
			}
			defer res.Body.Close()
			if res.StatusCode != 200 || testkit.Body(t, res) != "hello" {
				t.Errorf("status %d", res.StatusCode)
			}
		})
	}
}

// inFlight returns how many requests are in flight.
func (p *Proxy) inFlight() int {
	total, _ := p.requests.Used()
	return total
}

func TestErrorsArePagesForBrowsers(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	f.node.sleep(sandbox.WakeCold, nil)
	f.node.set(func(n *fakeNode) {
		n.wakeErr = &sandbox.WakeError{ID: testID, Err: errors.New("exited"), LastLog: "<script>alert(1)</script>"}
	})
	res := f.do(asNavigation(f.request("GET", "/")))
	page := testkit.Body(t, res)
	if res.StatusCode != 502 || !strings.Contains(res.Header.Get("Content-Type"), "text/html") || !strings.Contains(page, "wake_failed") {
		t.Errorf("status %d: %s", res.StatusCode, page)
	}
	if strings.Contains(page, "<script>alert") || !strings.Contains(page, "&lt;script&gt;") {
		t.Errorf("the container's output is not escaped: %s", page)
	}
}

func TestLeavingVisitorDoesNotEndTheWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	waking := make(chan struct{})
	f.node.sleep(sandbox.WakeWarm, waking)
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if res, err := f.Client().Transport.RoundTrip(f.request("GET", "/").WithContext(ctx)); err == nil {
			res.Body.Close()
		}
	}()
	testkit.Eventually(t, "it waits", func() bool { return f.proxy.inFlight() == 1 })
	leave()
	<-done
	testkit.Eventually(t, "it is forgotten", func() bool { return f.proxy.inFlight() == 0 && f.node.leases.Load() == 0 })
	close(waking)
	if res := f.do(f.request("GET", "/")); res.StatusCode != 200 {
		t.Errorf("then: status %d", res.StatusCode)
	}
}

func TestRequestsAreBoundedPerSandboxAndInTotal(t *testing.T) {
	for name, opts := range map[string]Options{
		"per sandbox": {MaxRequestsPerSandbox: 2},
		"in all":      {MaxRequests: 2},
	} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) { <-release }), sandbox.Port{}), opts)
			var held sync.WaitGroup
			for range 2 {
				held.Go(func() {
					if res, err := f.Client().Transport.RoundTrip(f.request("GET", "/")); err == nil {
						res.Body.Close()
					}
				})
			}
			testkit.Eventually(t, "two are in flight", func() bool { return f.proxy.inFlight() == 2 })
			res := f.do(f.request("GET", "/"))
			wantProblem(t, res, 503, "request_limit_exceeded")
			if res.Header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
			close(release)
			held.Wait()
			testkit.Eventually(t, "both have left", func() bool { return f.proxy.inFlight() == 0 })
			if res := f.do(f.request("GET", "/")); res.StatusCode != 200 {
				t.Errorf("then: status %d", res.StatusCode)
			}
			if _, n := f.proxy.requests.Used(); n > 1 {
				t.Errorf("%d counts are kept", n)
			}
		})
	}
}

// streams cut because only the start of a request counted as activity.
func TestStreamHoldsItsLeaseUntilItEnds(t *testing.T) {
	next := make(chan string)
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for text := range next {
			fmt.Fprintf(w, "data: %s\n\n", text)
			http.NewResponseController(w).Flush()
		}
	}), sandbox.Port{}), Options{})
	go func() { next <- "one" }()
	res := f.do(f.request("GET", "/events"))
	lines := bufio.NewReader(res.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "data: one\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if n := f.node.leases.Load(); n != 1 {
		t.Errorf("%d leases while it streams", n)
	}
	close(next)
	io.Copy(io.Discard, lines)
	testkit.Eventually(t, "the lease is released", func() bool { return f.node.leases.Load() == 0 })
}

func TestCloseEndsRequestsInFlight(t *testing.T) {
	started := make(chan struct{})
	f := newFront(t, newFakeNode(t, app(t, func(w http.ResponseWriter, r *http.Request) {
		close(started)
		<-r.Context().Done()
	}), sandbox.Port{}), Options{})
	done := make(chan *http.Response, 1)
	go func() { res, _ := f.Client().Transport.RoundTrip(f.request("GET", "/")); done <- res }()
	<-started
	f.proxy.Close()
	if res := <-done; res != nil {
		defer res.Body.Close()
		wantProblem(t, res, 503, "node_unavailable")
	}
	testkit.Eventually(t, "all have left", func() bool { return f.proxy.inFlight() == 0 && f.node.leases.Load() == 0 })
}
