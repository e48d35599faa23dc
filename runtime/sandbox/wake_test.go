package sandbox_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestWakeIsSharedByAllWaiters(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	var wg sync.WaitGroup
	var got atomic.Int32
	for range 1000 {
		wg.Go(func() {
			lease, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
			if err != nil {
				t.Error(err)
				return
			}
			got.Add(1)
			lease.Release()
			lease.Release() // the second does nothing
		})
	}
	wg.Wait()
	if _, thaws := n.Freezer.Counts(); got.Load() != 1000 || thaws != 1 {
		t.Errorf("%d leases after %d thaws, want 1000 after 1", got.Load(), thaws)
	}
	if info := n.Manager.Info(t.Context()); info.Leases != 0 || info.Waiters != 0 {
		t.Errorf("%d leases and %d waiters are left", info.Leases, info.Waiters)
	}
}

func TestRequestsDuringSleepAllGetTheirLease(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	stop := make(chan struct{})
	var sleeper, users sync.WaitGroup
	sleeper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil && !errors.Is(err, sandbox.ErrBusy) {
				t.Error(err)
			}
		}
	})
	for range 20 {
		users.Go(func() {
			for range 200 {
				lease, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
				if err != nil {
					t.Error(err)
					return
				}
				if state := lease.Sandbox().State; state != sandbox.StateRunning {
					t.Errorf("a lease on a sandbox that is %s", state)
				}
				if frozen, _ := n.Freezer.Frozen(t.Context(), sb.ID); frozen {
					t.Error("a lease on a frozen sandbox")
				}
				lease.Release()
			}
		})
	}
	users.Wait()
	close(stop)
	sleeper.Wait()
}

func TestWakeOutlivesItsCaller(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	events := subscribe(t, n.Manager, sb.ID)
	release := n.Engine.Block("start")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Acquire(ctx, sb.ID, sandbox.CausePreview)
		done <- err
	}()
	n.Engine.AwaitBlocked(t, "start")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	release()
	if ev := nextEvent(t, events, sandbox.EventWoke); ev.Kind != sandbox.WakeCold || ev.Cause != sandbox.CausePreview {
		t.Errorf("woke %+v", ev)
	}
	if info := n.Manager.Info(t.Context()); info.Leases != 0 {
		t.Errorf("%d leases are left by a caller who went away", info.Leases)
	}
}

func TestWaitersAreBounded(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.MaxWaitersPerSandbox = 3 })
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	release := n.Engine.Block("start")
	errs := make(chan error, 5)
	for range 5 {
		go func() {
			lease, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
			if err == nil {
				lease.Release()
			}
			errs <- err
		}()
	}
	for range 2 { // the two that are too many return while the wake is held up
		if err := <-errs; !errors.Is(err, sandbox.ErrTooManyWaiters) {
			t.Errorf("got %v", err)
		}
	}
	release()
	for range 3 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestFailedWakeFailsItsWaitersWithTheLastLogLine(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	n.Engine.Fail("start", errors.New("exec format error"))
	_, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
	var we *sandbox.WakeError
	if !errors.As(err, &we) || we.LastLog != sandboxtest.LastLog || !strings.Contains(err.Error(), "exec format error") {
		t.Fatalf("got %v", err)
	}
	if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateStopped {
		t.Errorf("state %s after a failed wake", s)
	}
	n.Engine.Fail("start", nil)
	acquire(t, n.Manager, sb.ID).Release()
}

func TestTimeoutOfAWakeHasTheLastLogLine(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.WakeTimeout = 200 * time.Millisecond })
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	n.Engine.HandleGuest(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	_, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
	var we *sandbox.WakeError
	if !errors.As(err, &we) || we.LastLog != sandboxtest.LastLog {
		t.Errorf("acquire: %v", err)
	}
}

func TestAcquireRunningDoesNotWake(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	lease, err := m.AcquireRunning(sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	lease.Release()
	mustSleep(t, m, sb.ID)
	if _, err := m.AcquireRunning(sb.ID); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("got %v", err)
	}
	if s := stateOf(t, m, sb.ID); s != sandbox.StateAsleep {
		t.Errorf("state %s", s)
	}
}

func TestReadsWakeNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	mustSleep(t, m, sb.ID)
	_, thawsBefore := n.Freezer.Counts()
	for range 233 {
		if _, err := m.Get(owner, "app"); err != nil {
			t.Fatal(err)
		}
		m.List(owner, sandbox.Filter{}, "", 0)
		m.Info(t.Context())
		if _, err := m.Events(t.Context(), sb.ID, 0, 10); err != nil {
			t.Fatal(err)
		}
	}
	if _, thaws := n.Freezer.Counts(); thaws != thawsBefore || stateOf(t, m, sb.ID) != sandbox.StateAsleep {
		t.Errorf("%d thaws by reading", thaws-thawsBefore)
	}
}

func TestKilledGuestIsFoundAndWokenAgain(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Engine.Kill(t, sb.ID)
	stopped := nextEvent(t, events, sandbox.EventStopped)
	if stopped.Reason != sandbox.ReasonContainerExited || !strings.Contains(stopped.Error, "exited with code ") {
		t.Errorf("stopped for reason %q, error %q", stopped.Reason, stopped.Error)
	}
	lease := acquire(t, n.Manager, sb.ID)
	defer lease.Release()
	if kind := lease.Wake().Kind; kind != sandbox.WakeCold {
		t.Errorf("woke %q, want cold", kind)
	}
	if _, err := lease.Guest().Hello(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestVanishedContainerIsMadeAgain(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if err := n.Engine.Remove(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	acquire(t, n.Manager, sb.ID).Release()
}

func TestLostDiskIsInTheTimelineAndACondition(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	stopped, running, atStart := create(t, n.Manager, "stopped"), create(t, n.Manager, "running"), create(t, n.Manager, "at-start")
	mustStop(t, n.Manager, stopped.ID)
	mustStop(t, n.Manager, atStart.ID)
	n.Crash(t, func() {
		if err := n.Engine.Remove(t.Context(), atStart.ID); err != nil {
			t.Fatal(err)
		}
	})
	m := n.Manager
	mustHaveCondition(t, n, atStart.ID, sandbox.ConditionDiskLost, "files are lost")
	for _, id := range []sandbox.ID{stopped.ID, running.ID} {
		if err := n.Engine.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	// Whether its end is seen before it is gone, or after, is up to chance.
	testkit.Eventually(t, "the end of the running one is seen", func() bool { return stateOf(t, m, running.ID) == sandbox.StateStopped })
	for _, id := range []sandbox.ID{stopped.ID, running.ID, atStart.ID} {
		acquire(t, m, id).Release()
		mustHaveCondition(t, n, id, sandbox.ConditionDiskLost, "files are lost")
		events, err := m.Events(t.Context(), id, 0, 100)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(events, func(ev sandbox.Event) bool {
			return ev.Type == sandbox.EventDiskLost && ev.Reason == "" && strings.Contains(ev.Error, "files are lost")
		}) {
			t.Errorf("the timeline has no event of the lost files: %+v", events)
		}
		mustStop(t, m, id)
		acquire(t, m, id).Release()
		mustBeWell(t, n, id)
	}
}

func BenchmarkAcquireRunning(b *testing.B) {
	m := sandboxtest.New(b)
	sb, _, err := m.Create(b.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	if err != nil {
		b.Fatal(err)
	}
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			lease, err := m.Acquire(context.Background(), sb.ID, sandbox.CausePreview)
			if err != nil {
				b.Error(err)
				return
			}
			lease.Release()
		}
	})
}
