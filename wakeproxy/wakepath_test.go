package wakeproxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

func TestTheWaitingPageHearsWhenTheSandboxIsReady(t *testing.T) {
	node := newFakeNode("", sandbox.Port{})
	f := newFront(t, node, Options{})
	waking := make(chan struct{})
	node.sleep(sandbox.WakeCold, waking)
	node.begun.Store(true)
	res := f.do(f.request("GET", WakePath)) // answered while it still waits
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, %v", res.StatusCode, res.Header)
	}
	close(waking)
	eventually(t, "the port was tried", func() bool { return node.dials.Load() > 3 })
	node.serve(app(t, hello))
	if got := body(t, res); !strings.HasSuffix(got, "event: ready\ndata: {}\n\n") {
		t.Errorf("heard %q", got)
	}
	eventually(t, "the lease is released", func() bool { return node.leases.Load() == 0 })
}

func TestTheWaitingPageHearsWhyItFailed(t *testing.T) {
	t.Run("wake", func(t *testing.T) {
		f := newFront(t, newFakeNode("", sandbox.Port{}), Options{})
		f.node.sleep(sandbox.WakeCold, nil)
		f.node.begun.Store(true)
		f.node.set(func(n *fakeNode) {
			n.wakeErr = &sandbox.WakeError{ID: testID, Err: errors.New("exited"), LastLog: "no such\nfile"}
		})
		if got := body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, "event: failed\ndata: {") || !strings.Contains(got, `"container_output":"no such\nfile"`) {
			t.Errorf("heard %q", got)
		}
	})
	t.Run("port", func(t *testing.T) {
		f := newFront(t, newFakeNode("", sandbox.Port{}), Options{WaitTimeout: 20 * time.Millisecond})
		f.node.sleep(sandbox.WakeCold, nil)
		f.node.begun.Store(true)
		if got := body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, "port_not_listening") {
			t.Errorf("heard %q", got)
		}
	})
}

// Otherwise a page that waits would undo a stop.
func TestTheWaitingPageStartsNothingThatIsStopped(t *testing.T) {
	f := newFront(t, newFakeNode("", sandbox.Port{}), Options{})
	f.node.sleep(sandbox.WakeCold, nil)
	if got := body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, `event: failed`) || !strings.Contains(got, `"sandbox_stopped"`) {
		t.Errorf("heard %q", got)
	}
	// Nor is a wake that failed before the page could join it tried again.
	f.node.set(func(n *fakeNode) {
		n.sb.Condition = sandbox.Condition{Code: sandbox.ConditionWakeFailed, Message: "exited"}
	})
	if got := body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, `"wake_failed"`) || !strings.Contains(got, lastLog) {
		t.Errorf("heard %q", got)
	}
	if n := f.node.wakes.Load(); n != 0 {
		t.Errorf("%d wakes", n)
	}
}

func TestTheWaitingPageAsksAgainWhenAWakeIsLong(t *testing.T) {
	f := newFront(t, newFakeNode("", sandbox.Port{}), Options{WaitTimeout: 10 * time.Millisecond})
	f.node.sleep(sandbox.WakeCold, make(chan struct{}))
	f.node.begun.Store(true)
	if got := body(t, f.do(f.request("GET", WakePath))); got != "retry: 1000\n\n" {
		t.Errorf("heard %q", got)
	}
}

func TestTheWakePathIsNeverForwardedAndNeedsTheToken(t *testing.T) {
	f := newFront(t, newFakeNode(app(t, hello), sandbox.Port{}), Options{})
	wantProblem(t, f.do(f.request("POST", WakePath)), 405, "method_not_allowed")
	req := f.request("GET", WakePath)
	req.Host = "3000-k3f9x2m7q1az." + domain
	wantProblem(t, f.do(req), 404, "preview_not_found")
}
