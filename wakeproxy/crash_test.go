package wakeproxy

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// declare gives the fake a declared process that never listens.
func (f *fakeNode) declare() {
	f.set(func(f *fakeNode) { f.sb.Declared = []guest.ProcessSpec{{Name: "web", Restart: guest.RestartOnWake}} })
}

// crash ends the declared process.
func (f *fakeNode) crash() {
	f.set(func(f *fakeNode) {
		code, now := 3, time.Now()
		f.sb.Processes = []guest.Process{{PID: 7, Name: "web", State: guest.ProcessExited, ExitCode: &code, StartedAt: now, ExitedAt: &now}}
	})
}

func TestVisitorsGetACrashedServerAsTheReason(t *testing.T) {
	for _, access := range []sandbox.Access{sandbox.AccessToken, sandbox.AccessPublic} {
		t.Run(string(access), func(t *testing.T) {
			port, host := sandbox.Port{Access: access, Token: testToken}, previewHost()
			if access == sandbox.AccessPublic {
				port.Token, host = "", "3000-k3f9x2m7q1az."+domain
			}
			f := newFront(t, newFakeNode(t, "", port), Options{WaitTimeout: time.Hour, WaitingPageAfter: time.Hour})
			f.node.declare()
			f.node.sleep(sandbox.WakeCold, nil)
			page := asNavigation(f.request("GET", "/"))
			document, events := f.request("GET", "/"), f.request("GET", WakePath)
			page.Host, document.Host, events.Host = host, host, host
			f.node.begun.Store(true)
			var waiting sync.WaitGroup
			waiting.Go(func() {
				res := f.do(page)
				text := testkit.Body(t, res)
				if res.StatusCode != 502 || !strings.Contains(text, "process web exited with code 3") {
					t.Errorf("the page: status %d: %s", res.StatusCode, text)
				}
				if got := strings.Contains(text, "Error: no &lt;module&gt;"); got != (access == sandbox.AccessToken) {
					t.Errorf("the page shows the last lines: %v", got)
				}
			})
			waiting.Go(func() {
				res := f.do(document)
				var p problem.Problem
				if err := json.Unmarshal([]byte(testkit.Body(t, res)), &p); err != nil {
					t.Error(err)
				}
				if res.StatusCode != 502 || p.Code != problem.ProcessExited || p.Process == nil || p.Process.Name != "web" || *p.Process.ExitCode != 3 {
					t.Errorf("status %d, %+v", res.StatusCode, p)
				} else if got := p.Process.Output == lastOutput; got != (access == sandbox.AccessToken) {
					t.Errorf("the document has the last lines: %v", got)
				}
			})
			waiting.Go(func() {
				if got := testkit.Body(t, f.do(events)); !strings.Contains(got, `"code":"process_exited"`) {
					t.Errorf("the waiting page got %q", got)
				}
			})
			testkit.Eventually(t, "all wait", func() bool { return f.proxy.inFlight() == 3 && f.node.dials.Load() > 3 })
			f.node.crash()
			waiting.Wait()

			// Long after the start, without a wait, the reason is the same.
			f.node.set(func(n *fakeNode) { n.sb.StartedAt = n.sb.StartedAt.Add(-time.Hour) })
			late := f.request("GET", "/")
			late.Host = host
			wantProblem(t, f.do(late), 502, "process_exited")

			// A page of another origin may read the document, but not the process's output.
			foreign := f.request("GET", "/")
			foreign.Host = host
			foreign.Header.Set("Origin", "https://elsewhere.example")
			if p := wantProblem(t, f.do(foreign), 502, "process_exited"); p.Process == nil || p.Process.Output != "" {
				t.Errorf("a page of another origin can read %+v", p.Process)
			}
		})
	}
}

// A stop ends the processes first, and then the container.
func TestServerEndedByAStopHasNotCrashed(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{WaitTimeout: time.Hour})
	f.node.declare()
	f.node.sleep(sandbox.WakeCold, nil)
	answer := make(chan *http.Response, 1)
	go func() { res, _ := f.Client().Transport.RoundTrip(f.request("GET", "/")); answer <- res }()
	testkit.Eventually(t, "it waits", func() bool { return f.node.dials.Load() > 3 })
	f.node.set(func(n *fakeNode) { n.closing = true })
	f.node.crash()
	dials := f.node.dials.Load()
	testkit.Eventually(t, "it still waits", func() bool { return len(answer) > 0 || f.node.dials.Load() > dials+3 })
	f.node.set(func(n *fakeNode) { n.sb.State, n.sb.StateReason = sandbox.StateStopped, sandbox.ReasonForced })
	res := <-answer
	if res == nil {
		t.Fatal("no response")
	}
	defer res.Body.Close()
	wantProblem(t, res, 503, "sandbox_stopped")
}

// The connection of a request may be lost before the node notes the stop that ended it.
func TestRequestEndedByAStopGetsTheStopAsItsReason(t *testing.T) {
	var node *fakeNode
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		node.set(func(n *fakeNode) {
			n.closing = true
			n.read = func(n *fakeNode) { // so the proxy has to ask again
				n.sb.State, n.sb.StateReason = sandbox.StateStopped, sandbox.ReasonForced
			}
		})
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	}))
	t.Cleanup(app.Close)
	node = newFakeNode(t, app.Listener.Addr().String(), sandbox.Port{})
	f := newFront(t, node, Options{})
	req := f.request("POST", "/")
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader("data")), 4
	wantProblem(t, f.do(req), 503, "sandbox_stopped")
}
