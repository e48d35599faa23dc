package wakeproxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestWaitingPageIsNotifiedWhenTheSandboxIsReady(t *testing.T) {
	node := newFakeNode(t, "", sandbox.Port{})
	f := newFront(t, node, Options{})
	waking := make(chan struct{})
	node.sleep(sandbox.WakeCold, waking)
	node.begun.Store(true)
	res := f.do(f.request("GET", WakePath)) // responds while it still waits
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, %v", res.StatusCode, res.Header)
	}
	close(waking)
	testkit.Eventually(t, "the port was tried", func() bool { return node.dials.Load() > 3 })
	node.serve(app(t, hello))
	if got := testkit.Body(t, res); !strings.HasSuffix(got, "event: ready\ndata: {}\n\n") {
		t.Errorf("got %q", got)
	}
	testkit.Eventually(t, "the lease is released", func() bool { return node.leases.Load() == 0 })
}

func TestWaitingPageGetsTheReasonOfAFailure(t *testing.T) {
	t.Run("wake", func(t *testing.T) {
		f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
		f.node.sleep(sandbox.WakeCold, nil)
		f.node.begun.Store(true)
		f.node.set(func(n *fakeNode) {
			n.wakeErr = &sandbox.WakeError{ID: testID, Err: errors.New("exited"), LastLog: "missing\nfile"}
		})
		if got := testkit.Body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, "event: failed\ndata: {") || !strings.Contains(got, `"container_output":"missing\nfile"`) {
			t.Errorf("got %q", got)
		}
	})
	t.Run("port", func(t *testing.T) {
		f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{WaitTimeout: 20 * time.Millisecond})
		f.node.sleep(sandbox.WakeCold, nil)
		f.node.begun.Store(true)
		if got := testkit.Body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, "port_not_listening") {
			t.Errorf("got %q", got)
		}
	})
}

// Otherwise a page that waits would undo a stop.
func TestWaitingPageDoesNotStartAStoppedSandbox(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{})
	f.node.sleep(sandbox.WakeCold, nil)
	if got := testkit.Body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, `event: failed`) || !strings.Contains(got, `"sandbox_stopped"`) {
		t.Errorf("got %q", got)
	}
	// Nor is a wake that failed before the page could join it tried again.
	f.node.set(func(n *fakeNode) {
		n.sb.Condition = sandbox.Condition{Code: sandbox.ConditionWakeFailed, Message: "exited"}
	})
	if got := testkit.Body(t, f.do(f.request("GET", WakePath))); !strings.Contains(got, `"wake_failed"`) || !strings.Contains(got, lastLog) {
		t.Errorf("got %q", got)
	}
	if n := f.node.wakes.Load(); n != 0 {
		t.Errorf("%d wakes", n)
	}
}

func TestWaitingPageReconnectsDuringALongWake(t *testing.T) {
	f := newFront(t, newFakeNode(t, "", sandbox.Port{}), Options{WaitTimeout: 10 * time.Millisecond})
	f.node.sleep(sandbox.WakeCold, make(chan struct{}))
	f.node.begun.Store(true)
	if got := testkit.Body(t, f.do(f.request("GET", WakePath))); got != "retry: 1000\n\n" {
		t.Errorf("got %q", got)
	}
}

func TestWakePathIsNotForwardedAndNeedsTheToken(t *testing.T) {
	f := newFront(t, newFakeNode(t, app(t, hello), sandbox.Port{}), Options{})
	wantProblem(t, f.do(f.request("POST", WakePath)), 405, "method_not_allowed")
	req := f.request("GET", WakePath)
	req.Host = "3000-k3f9x2m7q1az." + domain
	wantProblem(t, f.do(req), 404, "preview_not_found")
}
