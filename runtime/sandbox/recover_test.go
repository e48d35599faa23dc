package sandbox_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestRecovery(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	running, asleep, stopped, killed, vanished, half := create(t, m, "running"), create(t, m, "asleep"),
		create(t, m, "stopped"), create(t, m, "killed"), create(t, m, "vanished"), create(t, m, "half-destroyed")
	port, err := m.Expose(t.Context(), running.ID, sandbox.Port{Port: 3000})
	if err != nil {
		t.Fatal(err)
	}
	mustSleep(t, m, asleep.ID)
	if _, err := m.Stop(t.Context(), stopped.ID); err != nil {
		t.Fatal(err)
	}
	n.Engine.Fail("remove", syscall.EIO)
	if err := m.Destroy(t.Context(), half.ID); !errors.Is(err, syscall.EIO) {
		t.Fatalf("destroy: %v", err)
	}
	n.Engine.Fail("remove", nil)
	if err := n.Engine.Create(t.Context(), sandbox.ContainerSpec{ID: "orphan000000"}); err != nil {
		t.Fatal(err)
	}

	n.Crash(t, func() {
		n.Engine.Kill(t, killed.ID)
		if err := n.Engine.Remove(t.Context(), vanished.ID); err != nil {
			t.Fatal(err)
		}
	})
	m = n.Manager
	for name, want := range map[string]struct {
		state  sandbox.State
		reason sandbox.StateReason
	}{
		"running": {sandbox.StateRunning, ""}, "asleep": {sandbox.StateAsleep, sandbox.ReasonRequested},
		"stopped": {sandbox.StateStopped, sandbox.ReasonRequested}, "killed": {sandbox.StateStopped, sandbox.ReasonContainerExited},
		"vanished": {sandbox.StateStopped, sandbox.ReasonContainerLost},
	} {
		got, err := m.Get(owner, name)
		if err != nil || got.State != want.state || got.StateReason != want.reason {
			t.Errorf("%s: state %s (%s), error %v; want %s (%s)", name, got.State, got.StateReason, err, want.state, want.reason)
		}
	}
	if got, _ := m.Get(owner, "running"); len(got.Ports) != 1 || got.Ports[0] != port {
		t.Errorf("ports %+v, want %+v", got.Ports, port)
	}
	if _, err := m.Get(owner, "half-destroyed"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("half-destroyed: %v", err)
	}
	if n.Engine.Count() != 5 {
		t.Errorf("%d containers, want 5: the half-destroyed one is removed, and the one without a record is kept", n.Engine.Count())
	}
	for _, name := range []string{"running", "asleep", "stopped", "killed", "vanished"} {
		got, _ := m.Get(owner, name)
		acquire(t, m, got.ID).Release()
	}
}

func TestInterruptedStartIsEnded(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := create(t, n.Manager, "a").ID
	n.Crash(t, func() { n.Engine.ForgetStart(t, id) })
	if got, err := n.Manager.Get(owner, "a"); err != nil || got.State != sandbox.StateStopped {
		t.Errorf("state %s, error %v", got.State, err)
	}
	testkit.Eventually(t, "the first process has ended", func() bool { return !n.Engine.Runs(id) })
	if log := n.Log.String(); strings.Contains(log, "failed to thaw") {
		t.Errorf("the log: %s", log)
	}
	acquire(t, n.Manager, id).Release()
}

func TestShutdownSleepsAndTheNextStartResumes(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	a, b := create(t, n.Manager, "a"), create(t, n.Manager, "b")
	mustSleep(t, n.Manager, b.ID)
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if frozen, err := n.Freezer.Frozen(t.Context(), a.ID); err != nil || !frozen {
		t.Errorf("after shutdown frozen is %v, error %v", frozen, err)
	}
	if _, err := n.Manager.Acquire(t.Context(), a.ID, sandbox.CauseExec); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("acquire after close: %v", err)
	}
	n.Restart(t)
	if got := stateOf(t, n.Manager, a.ID); got != sandbox.StateRunning {
		t.Errorf("a is %s, want running as before", got)
	}
	if got := stateOf(t, n.Manager, b.ID); got != sandbox.StateAsleep {
		t.Errorf("b is %s, want asleep as before", got)
	}
}

func TestHoldResumesOnlySandboxesThatRan(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	held, free, asleep := create(t, m, "held"), create(t, m, "free"), create(t, m, "asleep")
	mustSleep(t, m, asleep.ID)
	for _, id := range []sandbox.ID{held.ID, asleep.ID} {
		if sb, err := m.Hold(t.Context(), id, time.Hour); err != nil || (sb.State == sandbox.StateAsleep) != (id == asleep.ID) {
			t.Fatalf("hold: state %s, error %v", sb.State, err)
		}
	}
	// As when the node died after it froze them and before it wrote that down.
	n.Crash(t, func() {
		for _, id := range []sandbox.ID{held.ID, free.ID} {
			if err := n.Freezer.Freeze(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
	})
	for id, want := range map[sandbox.ID]sandbox.State{held.ID: sandbox.StateRunning, free.ID: sandbox.StateAsleep, asleep.ID: sandbox.StateAsleep} {
		if got, _ := n.Manager.ByID(id); got.State != want {
			t.Errorf("%s is %s (%s), want %s", got.Name, got.State, got.StateReason, want)
		}
	}
	if got, _ := n.Manager.ByID(free.ID); got.StateReason != sandbox.ReasonRecovered {
		t.Errorf("%s is asleep for reason %q, want that it was found so", got.Name, got.StateReason)
	}
}

func TestLostFilesAreReportedWheneverTheContainerVanished(t *testing.T) {
	const lost = sandbox.ReasonContainerLost
	type reports struct{ stops, lost int }
	tell := func(m *sandbox.Manager, id sandbox.ID) (n reports) {
		t.Helper()
		events, err := m.Events(t.Context(), id, 0, 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, ev := range events {
			if ev.Type == sandbox.EventStopped {
				n.stops++
			}
			if ev.Type == sandbox.EventStopped && ev.Reason == lost {
				n.lost++
			}
		}
		return n
	}
	n := sandboxtest.Open(t, nil)
	atStart, atWake, asleep, fine := create(t, n.Manager, "at-start"), create(t, n.Manager, "at-wake"), create(t, n.Manager, "asleep"), create(t, n.Manager, "fine")
	for _, id := range []sandbox.ID{atStart.ID, atWake.ID, fine.ID} {
		mustStop(t, n.Manager, id)
	}
	mustSleep(t, n.Manager, asleep.ID)
	remove := func(id sandbox.ID) {
		t.Helper()
		if err := n.Engine.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	n.Crash(t, func() { remove(atStart.ID) })
	if got, _ := n.Manager.ByID(atStart.ID); got.State != sandbox.StateStopped || got.StateReason != lost {
		t.Errorf("at-start is %s (%s)", got.State, got.StateReason)
	}
	remove(atWake.ID)
	remove(asleep.ID)
	if err := n.Freezer.Remove(asleep.ID); err != nil { // as a cgroup goes with its container
		t.Fatal(err)
	}
	for id, want := range map[sandbox.ID]reports{atStart.ID: {2, 1}, atWake.ID: {2, 1}, asleep.ID: {1, 1}, fine.ID: {1, 0}} {
		acquire(t, n.Manager, id).Release()
		if got := tell(n.Manager, id); got != want {
			t.Errorf("%s has reports of stops and lost files %+v, want %+v", id, got, want)
		}
	}
}

func TestSandboxOfARemovedSizeKeepsItsLimits(t *testing.T) {
	var cfg sandbox.Config
	n := sandboxtest.Open(t, func(c *sandbox.Config) { cfg = *c })
	m := n.Manager
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app", Size: "standard"})
	if err != nil {
		t.Fatal(err)
	}
	want := cfg.Sizes["standard"]
	if got := n.Freezer.Limits(sb.ID); got != want {
		t.Fatalf("limits %+v, want %+v", got, want)
	}
	for _, c := range []struct {
		name  string
		sizes map[string]sandbox.Limits
		want  sandbox.Limits
	}{
		{"taken away", map[string]sandbox.Limits{"basic": {CPUs: 1}}, want},
		{"changed", map[string]sandbox.Limits{"basic": {CPUs: 1}, "standard": {CPUs: 3}}, sandbox.Limits{CPUs: 3}},
	} {
		cfg.Sizes = c.sizes
		if err := m.Configure(cfg); err != nil {
			t.Fatal(err)
		}
		mustStop(t, m, sb.ID)
		acquire(t, m, sb.ID).Release()
		if got, started := n.Freezer.Limits(sb.ID), n.Engine.Limits(sb.ID); got != c.want || started != c.want {
			t.Errorf("%s: limits %+v, of its processes %+v, want %+v", c.name, got, started, c.want)
		}
	}
}

func TestNothingIsDueAfterClose(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.SleepAfter, c.StopAfter = time.Hour, time.Hour })
	sb := create(t, n.Manager, "app")
	n.Freezer.FailOnce("freeze", syscall.EBUSY) // Close tries a second time
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if frozen, err := n.Freezer.Frozen(t.Context(), sb.ID); err != nil || !frozen {
		t.Errorf("frozen %v, error %v", frozen, err)
	}
	if n.Manager.Armed(sb.ID) {
		t.Error("a timer is set")
	}
}
