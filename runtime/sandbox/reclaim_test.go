package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// withSwap returns a node that can reclaim memory, after a second of sleep.
func withSwap(t *testing.T, configure func(*sandbox.Config)) *sandboxtest.Node {
	t.Helper()
	n := sandboxtest.Prepare(t, func(c *sandbox.Config) {
		c.ReclaimAfter = time.Second
		if configure != nil {
			configure(c)
		}
	})
	n.Freezer.Enforce("cpu", "memory", "pids")
	n.Memory.Change(func(s *sandbox.MemoryState) { s.Swap = 1 << 30 })
	n.Restart(t)
	t.Cleanup(func() {
		if err := n.Manager.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return n
}

func TestMemoryOfASleepingSandboxIsReclaimedOnce(t *testing.T) {
	t.Parallel()
	n := withSwap(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	for round := 1; round <= 2; round++ {
		n.Freezer.SetMemory(sb.ID, 200*mib)
		mustSleep(t, n.Manager, sb.ID)
		slept, _ := n.Manager.ByID(sb.ID)
		ev := nextEvent(t, events, sandbox.EventReclaimed)
		if ev.MemoryBefore != 200*mib || ev.MemoryAfter != 20*mib {
			t.Errorf("event %+v", ev)
		}
		if after := ev.Time.Sub(slept.StateSince); after < time.Second {
			t.Errorf("reclaimed after %s asleep", after)
		}
		n.Manager.RunCheck(sb.ID)
		if got := n.Freezer.Reclaims(); len(got) != round || n.Manager.Armed(sb.ID) {
			t.Errorf("reclaimed %d times in %d sleeps; a check is due: %v", len(got), round, n.Manager.Armed(sb.ID))
		}
		if now, _ := n.Manager.ByID(sb.ID); now.State != sandbox.StateAsleep || !now.StateSince.Equal(slept.StateSince) {
			t.Errorf("it is %s", now.State)
		}
		for moment, want := range map[string]float64{"before": 200 * mib, "after": 20 * mib} {
			if got := counted(t, n, "doze_reclaim_memory_bytes_total", moment); got != want*float64(round) {
				t.Errorf("%v bytes %s are counted, want %v", got, moment, want*float64(round))
			}
		}
		lease := acquire(t, n.Manager, sb.ID)
		if wake := lease.Wake(); wake.Kind != sandbox.WakeWarm {
			t.Errorf("wake %+v", wake)
		}
		lease.Release()
	}
}

func TestSandboxThatIsStoppedAfterwardsIsReclaimedFirst(t *testing.T) {
	t.Parallel()
	n := withSwap(t, func(c *sandbox.Config) { c.StopAfter = 2 * time.Second })
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Freezer.SetMemory(sb.ID, 200*mib)
	mustSleep(t, n.Manager, sb.ID)
	nextEvent(t, events, sandbox.EventReclaimed)
	if ev := nextEvent(t, events, sandbox.EventStopped); ev.Reason != sandbox.ReasonStopAfter {
		t.Errorf("event %+v", ev)
	}
}

func TestNothingIsReclaimedWhereItIsImpossible(t *testing.T) {
	for name, change := range map[string]func(*sandboxtest.Node){
		"no swap":              func(n *sandboxtest.Node) { n.Memory.Change(func(s *sandbox.MemoryState) { s.Swap = 0 }) },
		"no memory controller": func(n *sandboxtest.Node) { n.Freezer.Enforce("cpu", "pids") },
		"unknown memory":       func(n *sandboxtest.Node) { n.Memory.Fail(syscall.EIO) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := withSwap(t, nil)
			change(n)
			testkit.NoError(t, "Close", n.Manager.Close(t.Context()))
			n.Restart(t)
			sb := create(t, n.Manager, "app")
			mustSleep(t, n.Manager, sb.ID)
			slept, _ := n.Manager.ByID(sb.ID)
			testkit.Eventually(t, "reclaim_after passes", func() bool { return time.Since(slept.StateSince) > 1100*time.Millisecond })
			n.Manager.RunCheck(sb.ID)
			if got := n.Freezer.Reclaims(); len(got) != 0 || n.Manager.Armed(sb.ID) {
				t.Errorf("reclaimed %v; a check is due: %v", got, n.Manager.Armed(sb.ID))
			}
		})
	}
}

func TestSwapThatIsAddedIsUsed(t *testing.T) {
	t.Parallel()
	n := withSwap(t, nil)
	n.Memory.Change(func(s *sandbox.MemoryState) { s.Swap = 0 })
	n.Manager.Relieve()
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Freezer.SetMemory(sb.ID, 200*mib)
	mustSleep(t, n.Manager, sb.ID)
	if n.Manager.Armed(sb.ID) {
		t.Error("a check is due without swap")
	}
	n.Memory.Change(func(s *sandbox.MemoryState) { s.Swap = 1 << 30 })
	n.Manager.Relieve()
	nextEvent(t, events, sandbox.EventReclaimed)
}

func TestReclaimAfterMayChange(t *testing.T) {
	t.Parallel()
	n := withSwap(t, func(c *sandbox.Config) { c.ReclaimAfter = 0 })
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Freezer.SetMemory(sb.ID, 200*mib)
	mustSleep(t, n.Manager, sb.ID)
	n.Manager.RunCheck(sb.ID)
	if n.Manager.Armed(sb.ID) || len(n.Freezer.Reclaims()) != 0 {
		t.Error("it is reclaimed although that is off")
	}
	cfg := sandbox.DefaultConfig()
	cfg.RunDir, cfg.MemoryInterval, cfg.ReclaimAfter = n.RunDir(""), time.Hour, time.Second
	testkit.NoError(t, "Configure", n.Manager.Configure(cfg))
	nextEvent(t, events, sandbox.EventReclaimed)
}

func TestWakeInterruptsTheReclaim(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"wake": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { acquire(t, n.Manager, id).Release() },
		"stop": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustStop(t, n.Manager, id) },
		"destroy": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := withSwap(t, nil)
			first, second := create(t, n.Manager, "first"), create(t, n.Manager, "second")
			events, others := subscribe(t, n.Manager, first.ID), subscribe(t, n.Manager, second.ID)
			release := n.Freezer.Block("reclaim")
			n.Freezer.SetMemory(first.ID, 200*mib)
			n.Freezer.SetMemory(second.ID, 200*mib)
			mustSleep(t, n.Manager, first.ID)
			n.Freezer.AwaitBlocked(t, "reclaim")
			mustSleep(t, n.Manager, second.ID)
			slept, _ := n.Manager.ByID(second.ID)
			testkit.Eventually(t, "the second is due", func() bool { return time.Since(slept.StateSince) > 1100*time.Millisecond })
			n.Manager.RunCheck(second.ID)
			if got := n.Freezer.Reclaims(); !slices.Equal(got, []sandbox.ID{first.ID}) {
				t.Errorf("%v are reclaimed at the same time", got)
			}
			end(t, n, first.ID)
			testkit.Eventually(t, "the next one is reclaimed", func() bool {
				return slices.Equal(n.Freezer.Reclaims(), []sandbox.ID{first.ID, second.ID})
			})
			release()
			nextEvent(t, others, sandbox.EventReclaimed)
			for len(events) > 0 {
				if ev := <-events; ev.Type == sandbox.EventReclaimed {
					t.Errorf("the interrupted reclaim has the event %+v", ev)
				}
			}
			if n.Log.Contains("failed to reclaim") {
				t.Error("the log has a failure")
			}
		})
	}
}

func TestFailedReclaimIsLogged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err      error
		attempts int
		line     string
	}{
		"a failure":                         {syscall.EIO, 2, "failed to reclaim the memory of a sandbox"},
		"a host that cannot":                {fmt.Errorf("no memory.reclaim: %w", errors.ErrUnsupported), 1, "not trying again"},
		"memory that is not worth an event": {nil, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := withSwap(t, nil)
			n.Freezer.Fail("reclaim", c.err)
			first, second := create(t, n.Manager, "first"), create(t, n.Manager, "second")
			events := subscribe(t, n.Manager, first.ID)
			for attempt, id := range []sandbox.ID{first.ID, second.ID} {
				mustSleep(t, n.Manager, id)
				slept, _ := n.Manager.ByID(id)
				testkit.Eventually(t, "it is due", func() bool { return time.Since(slept.StateSince) > 1100*time.Millisecond })
				n.Manager.RunCheck(id)
				testkit.Eventually(t, "the attempt", func() bool { return len(n.Freezer.Reclaims()) == min(attempt+1, c.attempts) && !n.Manager.Reclaiming() })
			}
			if got := strings.Count(n.Log.String(), "failed to reclaim"); got != c.attempts && c.err != nil || c.line != "" && !n.Log.Contains(c.line) {
				t.Errorf("the log has %d failures", got)
			}
			for len(events) > 0 {
				if ev := <-events; ev.Type == sandbox.EventReclaimed {
					t.Errorf("event %+v", ev)
				}
			}
			expectStates(t, n, []sandbox.ID{first.ID, second.ID}, "asleep asleep")
		})
	}
}
