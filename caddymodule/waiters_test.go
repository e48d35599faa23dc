package caddymodule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// visitResult of a request that is on its way.
type visitResult struct {
	status  int
	header  http.Header
	problem struct {
		Code    string
		LastLog string `json:"container_output"`
	}
	err error
}

// visit sends a request and returns immediately.
func (s *site) visit(ctx context.Context, address string) <-chan visitResult {
	client := s.client(true)
	answers := make(chan visitResult, 1)
	go func() {
		var a visitResult
		defer func() { answers <- a }()
		req, err := http.NewRequestWithContext(ctx, "GET", address, nil)
		if err != nil {
			a.err = err
			return
		}
		res, err := client.Do(req)
		if err != nil {
			a.err = err
			return
		}
		defer res.Body.Close()
		a.status, a.header = res.StatusCode, res.Header
		if res.StatusCode != 200 {
			a.err = json.NewDecoder(res.Body).Decode(&a.problem)
		}
	}()
	return answers
}

func (s *site) stop(id sandbox.ID) {
	s.t.Helper()
	if _, err := s.Manager.Stop(s.t.Context(), id); err != nil {
		s.t.Fatal(err)
	}
}

// A visitor beyond the quota gets Retry-After immediately; the others are served.
func TestWaitersAreBoundedPerSandboxAndInAll(t *testing.T) {
	for _, test := range []struct {
		name         string
		each, all    int
		other        bool // the one too many asks for another sandbox
		waitersTotal int
	}{
		{"per sandbox", 3, 100, false, 3},
		{"in all", 100, 3, true, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSite(t, fmt.Sprintf("max_waiters_per_sandbox %d\nmax_waiters %d", test.each, test.all))
			sb, address := s.sandbox(hello, sandbox.Port{})
			other, otherAddress := s.sandbox(hello, sandbox.Port{})
			s.stop(sb.ID)
			s.stop(other.ID)
			release := s.Engine.Block("start")
			// Of one more than may wait, one is refused while the wake is held up.
			all := make(chan visitResult, test.waitersTotal+1)
			for i := range test.waitersTotal + 1 {
				to := address
				if test.other && i%2 == 1 {
					to = otherAddress
				}
				visit := s.visit(t.Context(), to)
				go func() { all <- <-visit }()
			}
			if a := <-all; a.err != nil || a.status != 503 || a.problem.Code != "waiter_limit_exceeded" || a.header.Get("Retry-After") == "" {
				t.Errorf("one too many got %+v", a)
			}
			release()
			for range test.waitersTotal {
				if a := <-all; a.err != nil || a.status != 200 {
					t.Errorf("one who waited got %+v", a)
				}
			}
		})
	}
}

func TestAVisitorWhoLeavesStopsNoWake(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	s.stop(sb.ID)
	release := s.Engine.Block("start")
	ctx, leave := context.WithCancel(t.Context())
	visit := s.visit(ctx, address)
	s.Engine.AwaitBlocked(t, "start")
	leave()
	if a := <-visit; !errors.Is(a.err, context.Canceled) {
		t.Errorf("the visitor got %+v", a)
	}
	release()
	testkit.Eventually(t, "the wake goes on", func() bool { return s.get(sb.ID).State == sandbox.StateRunning })
}

func TestAContainerThatDoesNotStartFailsItsWaitersWithItsLastLine(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{})
	s.stop(sb.ID)
	s.Engine.Fail("start", fmt.Errorf("exited with code 1"))
	if a := <-s.visit(t.Context(), address); a.err != nil || a.status != 502 || a.problem.Code != "wake_failed" || a.problem.LastLog != sandboxtest.LastLog {
		t.Errorf("the visitor got %+v", a)
	}
	s.Engine.Fail("start", nil)
	if a := <-s.visit(t.Context(), address); a.err != nil || a.status != 200 || a.header.Get("Doze-Wake") != "cold" {
		t.Errorf("then %+v", a)
	}
}

// Nothing listens yet, and the container ends: no visitor waits until its limit.
func TestAContainerThatEndsFailsItsWaitersWithItsLastLine(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandboxAt(sandbox.Port{Port: uint16(testkit.FreePort(t))})
	s.stop(sb.ID)
	visit := s.visit(t.Context(), address)
	testkit.Eventually(t, "it was started", func() bool { return s.get(sb.ID).State == sandbox.StateRunning })
	s.Engine.Kill(t, sb.ID)
	if a := <-visit; a.err != nil || a.status != 502 || a.problem.Code != "wake_failed" || a.problem.LastLog != sandboxtest.LastLog {
		t.Errorf("the visitor got %+v", a)
	}
}

// Caddy takes a canceled request for a visitor that left.
func TestRequestsInFlightEndWithNodeUnavailable(t *testing.T) {
	s := newSite(t)
	reached := make(chan struct{})
	_, address := s.sandbox(func(_ http.ResponseWriter, r *http.Request) {
		close(reached)
		<-r.Context().Done()
	}, sandbox.Port{})
	visit := s.visit(t.Context(), address)
	<-reached
	newestApp(t).held.EndRequests()
	if a := <-visit; a.err != nil || a.status != 503 || a.problem.Code != "node_unavailable" || a.header.Get("Retry-After") == "" {
		t.Errorf("the visitor got %+v", a)
	}
}
