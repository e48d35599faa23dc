package sandbox_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// A timer may fire just before the state changes, and find another one.
func TestLateTimerDoesNothingInAnotherState(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.SleepAfter, c.StopAfter = time.Hour, time.Second })
	m := n.Manager
	sb := create(t, m, "app")
	// Long enough for stop_after of a sandbox that were asleep.
	testkit.Eventually(t, "stop_after passes", func() bool { return time.Since(sb.StateSince) > 1500*time.Millisecond })
	hour := sandbox.Duration(time.Hour)
	for _, c := range []struct {
		name  string
		enter func()
		want  sandbox.State
		armed bool
	}{
		{"running for longer than stop_after", func() {}, sandbox.StateRunning, true},
		{"asleep", func() { update(t, m, sb.ID, sandbox.Patch{StopAfter: &hour}); mustSleep(t, m, sb.ID) }, sandbox.StateAsleep, true},
		{"running, just woken", func() { acquire(t, m, sb.ID).Release() }, sandbox.StateRunning, true},
		{"asleep again", func() { mustSleep(t, m, sb.ID) }, sandbox.StateAsleep, true},
		{"asleep without stop_after", func() { update(t, m, sb.ID, sandbox.Patch{StopAfter: new(sandbox.Duration)}) }, sandbox.StateAsleep, false},
		{"stopped", func() { mustStop(t, m, sb.ID) }, sandbox.StateStopped, false},
		{"running, just started", func() { acquire(t, m, sb.ID).Release() }, sandbox.StateRunning, true},
		{"running without sleep_after", func() { update(t, m, sb.ID, sandbox.Patch{SleepAfter: new(sandbox.Duration)}) }, sandbox.StateRunning, true},
	} {
		c.enter()
		before, _ := m.ByID(sb.ID)
		for _, was := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep, sandbox.StateStopped} {
			m.RunCheckLate(sb.ID, was)
			if after, _ := m.ByID(sb.ID); after.State != c.want || !after.StateSince.Equal(before.StateSince) {
				t.Fatalf("%s, the timer is of %s: it became %s (%s)", c.name, was, after.State, after.StateReason)
			}
			if c, err := n.Engine.Inspect(t.Context(), sb.ID); err != nil || (c.State == sandbox.ContainerRunning) != (before.State != sandbox.StateStopped) {
				t.Fatalf("%s, the timer is of %s: its container is %s, error %v", before.State, was, c.State, err)
			}
		}
		m.RunCheck(sb.ID)
		if armed := m.Armed(sb.ID); armed != c.armed || stateOf(t, m, sb.ID) != c.want {
			t.Errorf("%s: it is %s and its own timer is set: %v", c.name, stateOf(t, m, sb.ID), armed)
		}
	}
}

func update(t *testing.T, m *sandbox.Manager, id sandbox.ID, p sandbox.Patch) {
	t.Helper()
	if _, err := m.Update(t.Context(), id, p); err != nil {
		t.Fatal(err)
	}
}

func mustStop(t *testing.T, m *sandbox.Manager, id sandbox.ID) {
	t.Helper()
	if sb, err := m.Stop(t.Context(), id); err != nil || sb.State != sandbox.StateStopped {
		t.Fatalf("stop: state %s, error %v", sb.State, err)
	}
}

func TestStopAfterCountsFromTheLastSleep(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	mustSleep(t, m, sb.ID)
	first, _ := m.ByID(sb.ID)
	testkit.Eventually(t, "half of stop_after passes", func() bool { return time.Since(first.StateSince) > time.Second })
	acquire(t, m, sb.ID).Release()
	mustSleep(t, m, sb.ID)
	last, _ := m.ByID(sb.ID)
	twoSeconds := 2 * second
	update(t, m, sb.ID, sandbox.Patch{StopAfter: &twoSeconds})
	if stopped := nextEvent(t, events, sandbox.EventStopped); stopped.Time.Sub(last.StateSince) < 2*time.Second {
		t.Errorf("stopped %s after it fell asleep, want 2 s or more", stopped.Time.Sub(last.StateSince))
	}
}

// The retry for what was left of a container must not end its successor.
func TestRetriedStopSparesTheNextContainer(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	stranger := becomeUnknown(n)
	m := n.Manager
	sb := create(t, m, "app")
	n.Engine.Fail("stop", syscall.EIO)
	n.Crash(t, func() { stranger.Store(true) })
	m = n.Manager
	stranger.Store(false)
	n.Engine.HandleGuest(nil)
	testkit.Eventually(t, "it is given up", func() bool { return stateOf(t, m, sb.ID) == sandbox.StateStopped && m.Armed(sb.ID) })
	n.Engine.Fail("stop", nil)
	m.RunCheck(sb.ID)
	lease := acquire(t, m, sb.ID)
	m.RunCheckLate(sb.ID, sandbox.StateStopped)
	if _, err := lease.Guest().Hello(t.Context()); err != nil || stateOf(t, m, sb.ID) != sandbox.StateRunning {
		t.Errorf("it is %s, error %v", stateOf(t, m, sb.ID), err)
	}
	lease.Release()
	mustStop(t, m, sb.ID)
	if m.Armed(sb.ID) {
		t.Error("a check is due for a stopped sandbox")
	}
}

func TestIdleRuleWaitsForTheLastUse(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	leased, idle := create(t, n.Manager, "leased"), create(t, n.Manager, "idle")
	events, others := subscribe(t, n.Manager, leased.ID), subscribe(t, n.Manager, idle.ID)
	lease := acquire(t, n.Manager, leased.ID)
	for _, id := range []sandbox.ID{leased.ID, idle.ID} {
		update(t, n.Manager, id, sandbox.Patch{SleepAfter: &second})
	}
	if slept := nextEvent(t, others, sandbox.EventSlept); slept.Time.Sub(idle.LastActiveAt) < time.Second {
		t.Errorf("it slept %s after its last use", slept.Time.Sub(idle.LastActiveAt))
	}
	n.Manager.RunCheck(leased.ID)
	if s := stateOf(t, n.Manager, leased.ID); s != sandbox.StateRunning {
		t.Errorf("it is %s under a lease", s)
	}
	released := time.Now()
	lease.Release()
	if slept := nextEvent(t, events, sandbox.EventSlept); slept.Time.Sub(released) < time.Second {
		t.Errorf("it slept %s after its lease was released", slept.Time.Sub(released))
	}
}

// A machine that stalls looks late, and what it has nothing to compare with may work.
func TestLateFirstSampleDoesNotPutABusySandboxToSleep(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Freezer.WorkAlways(sb.ID, 100)
	testkit.Eventually(t, "sleep_after passes", func() bool { return time.Since(sb.LastActiveAt) > 1500*time.Millisecond })
	update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
	n.Manager.RunCheck(sb.ID)
	if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateRunning {
		t.Errorf("it is %s while it works", s)
	}
	n.Freezer.WorkAlways(sb.ID, 0)
	nextEvent(t, events, sandbox.EventSlept)
}

// More than a twentieth of a core counts as use, less does not.
func TestCPUTimeAboveTheThresholdCountsAsUse(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.SleepAfter = time.Hour })
	sb := create(t, n.Manager, "app")
	n.Manager.RunCheck(sb.ID) // from here on work is measured
	for _, c := range []struct {
		name string
		work func(sinceLook time.Duration) time.Duration
		used bool
	}{
		{"no work", func(time.Duration) time.Duration { return 0 }, false},
		{"a hundredth of a core", func(d time.Duration) time.Duration { return d / 100 }, false},
		{"four cores", func(time.Duration) time.Duration { return time.Hour }, true},
	} {
		before, _ := n.Manager.ByID(sb.ID)
		last := time.Now()
		testkit.Eventually(t, "a while passes", func() bool { return time.Since(last) > 10*time.Millisecond })
		n.Freezer.Work(sb.ID, c.work(time.Since(last)))
		n.Manager.RunCheck(sb.ID)
		after, _ := n.Manager.ByID(sb.ID)
		if used := after.LastActiveAt.After(before.LastActiveAt); used != c.used {
			t.Errorf("%s: counted as use: %v", c.name, used)
		}
	}
	before, _ := n.Manager.ByID(sb.ID)
	n.Manager.Touch(sb.ID)
	if after, _ := n.Manager.ByID(sb.ID); !after.LastActiveAt.After(before.LastActiveAt) {
		t.Error("traffic without a lease does not count as use")
	}
}

// Whatever puts it to sleep, memory, processes and files are as before.
func TestEachPathToSleepHasTheSameResult(t *testing.T) {
	for name, sleep := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"idle": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			events := subscribe(t, n.Manager, id)
			update(t, n.Manager, id, sandbox.Patch{SleepAfter: &second})
			nextEvent(t, events, sandbox.EventSlept)
		},
		"API": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) },
		"node shutdown": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			if err := n.Manager.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			p, err := n.Manager.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "600"}}, Name: "job"})
			if err != nil {
				t.Fatal(err)
			}
			before, err := n.Engine.Inspect(t.Context(), sb.ID)
			if err != nil {
				t.Fatal(err)
			}
			sleep(t, n, sb.ID)
			if frozen, err := n.Freezer.Frozen(t.Context(), sb.ID); err != nil || !frozen {
				t.Errorf("frozen %v, error %v", frozen, err)
			}
			if name == "node shutdown" {
				n.Restart(t)
			}
			lease := acquire(t, n.Manager, sb.ID)
			defer lease.Release()
			if after, err := n.Engine.Inspect(t.Context(), sb.ID); err != nil || after != before {
				t.Errorf("its container was %+v and is %+v, error %v", before, after, err)
			}
			if kind := lease.Wake().Kind; kind == sandbox.WakeCold {
				t.Error("it woke cold")
			}
			if got, err := guesttest.Process(t.Context(), lease.Guest(), p.ID); err != nil || got.State != guest.ProcessRunning {
				t.Errorf("its process is %+v, error %v", got, err)
			}
		})
	}
}

func TestFailedChecksAreRetriedWithBackoff(t *testing.T) {
	for name, c := range map[string]struct {
		fail, mend func(*testing.T, *sandboxtest.Node, sandbox.ID)
	}{
		"a sleep": {
			func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Freezer.Fail("freeze", syscall.EIO) },
			func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Freezer.Fail("freeze", nil) },
		},
		"a stop": {
			func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
				second := sandbox.Duration(time.Second)
				update(t, n.Manager, id, sandbox.Patch{StopAfter: &second})
				n.Engine.Fail("stop", syscall.EIO)
				mustSleep(t, n.Manager, id)
			},
			func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Engine.Fail("stop", nil) },
		},
		"the end of a container": {
			func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
				n.Engine.Fail("stop", syscall.EIO)
				n.Crash(t, func() { deafen(t, n, id) })
				testkit.Eventually(t, "it is given up", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped })
			},
			func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Engine.Fail("stop", nil) },
		},
		"an attachment": {
			func(t *testing.T, n *sandboxtest.Node, _ sandbox.ID) {
				n.Uplink.Fail("attach", syscall.EIO)
				n.Crash(t, func() {})
			},
			func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Uplink.Fail("attach", nil) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			second := sandbox.Duration(time.Second)
			update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
			least := n.Manager.RetryIn(sb.ID)
			c.fail(t, n, sb.ID)
			before := least
			testkit.Eventually(t, "the pauses have grown", func() bool {
				n.Manager.RunCheck(sb.ID)
				now := n.Manager.RetryIn(sb.ID)
				if now < before || now > time.Minute {
					t.Fatalf("after %s it is tried again in %s", before, now)
				}
				before = now
				return now == time.Minute
			})
			c.mend(t, n, sb.ID)
			testkit.Eventually(t, "it begins again", func() bool {
				n.Manager.RunCheck(sb.ID)
				return n.Manager.RetryIn(sb.ID) == least
			})
		})
	}
}
