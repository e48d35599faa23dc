package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestFailedFreezeLeavesTheSandboxRunning(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Freezer.Fail("freeze", errors.New("device busy"))
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); err == nil || !strings.Contains(err.Error(), "device busy") {
		t.Fatalf("got %v", err)
	}
	if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateRunning {
		t.Errorf("state %s", s)
	}
	acquire(t, n.Manager, sb.ID).Release()
}

// As with a process that waits for a disk that does not respond.
func TestSandboxThatDoesNotFreezeKeepsRunning(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	release := n.Freezer.Block("freeze")
	update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
	n.Freezer.AwaitBlocked(t, "freeze")
	lease, err := n.Manager.Acquire(testkit.Context(t), sb.ID, sandbox.CausePreview)
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	testkit.Eventually(t, "the condition of a failed sleep", func() bool {
		return strings.HasPrefix(lease.Sandbox().Condition.Message, "freeze "+string(sb.ID))
	})
	release()
	lease.Release()
	nextEvent(t, events, sandbox.EventSlept)
	mustBeWell(t, n, sb.ID)
}

func TestGuestIsTrimmedBeforeItIsFrozen(t *testing.T) {
	for name, test := range map[string]struct {
		sleep func(*sandboxtest.Node, sandbox.ID) error
		trims int
	}{
		"requested": {func(n *sandboxtest.Node, id sandbox.ID) error {
			_, err := n.Manager.Sleep(context.Background(), id)
			return err
		}, 1},
		"forced": {func(n *sandboxtest.Node, id sandbox.ID) error {
			_, err := n.Manager.ForceSleep(context.Background(), id)
			return err
		}, 1},
		// Hundreds are frozen together, and resumed when the node starts again.
		"shutdown": {func(n *sandboxtest.Node, _ sandbox.ID) error { return n.Manager.Close(context.Background()) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			release := n.Freezer.Block("freeze")
			slept := make(chan error, 1)
			go func() { slept <- test.sleep(n, sb.ID) }()
			n.Freezer.AwaitBlocked(t, "freeze")
			if trims := n.Engine.Trims(); trims != test.trims {
				t.Errorf("the guest was trimmed %d times before the freeze, want %d", trims, test.trims)
			}
			release()
			if err := testkit.Receive(t, "the end of the sleep", slept); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSandboxIsFrozenAlthoughItsGuestDoesNotTrim(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == guest.RouteHello {
			fmt.Fprintf(w, `{"protocol":%d}`, guest.ProtocolVersion)
			return
		}
		<-r.Context().Done()
	}))
	sb := create(t, n.Manager, "app")
	if sb, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil || sb.State != sandbox.StateAsleep {
		t.Errorf("state %s, %v", sb.State, err)
	}
}

func TestUseDuringAnIdleFreezeKeepsAwake(t *testing.T) {
	t.Parallel()
	for name, keepAwake := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"a hold": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { askAPI(t, n, id, time.Hour) },
		"no sleep_after": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			update(t, n.Manager, id, sandbox.Patch{SleepAfter: new(sandbox.Duration)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			release := n.Freezer.Block("freeze")
			update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
			n.Freezer.AwaitBlocked(t, "freeze")
			keepAwake(t, n, sb.ID)
			release()
			n.Manager.RunCheckLate(sb.ID, sandbox.StateStopped) // waits for its turn, and does nothing
			if lease, err := n.Manager.AcquireRunning(sb.ID); err != nil {
				t.Error(err)
			} else {
				lease.Release()
			}
			if frozen, err := n.Freezer.Frozen(t.Context(), sb.ID); err != nil || frozen {
				t.Errorf("frozen %v, error %v", frozen, err)
			}
			mustBeWell(t, n, sb.ID)
			mustSleep(t, n.Manager, sb.ID)
		})
	}
}

func TestLeaseKeepsAwake(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	lease := acquire(t, m, sb.ID)
	if _, err := m.Sleep(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("sleep under a lease: %v", err)
	}
	if _, err := m.Stop(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("stop under a lease: %v", err)
	}
	lease.Release()
	mustSleep(t, m, sb.ID)
}

func TestForceSleepsAndStopsUnderALease(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	lease := acquire(t, m, sb.ID)
	if _, err := m.Hold(t.Context(), sb.ID, time.Hour); err != nil {
		t.Fatal(err)
	}
	got, err := m.ForceSleep(t.Context(), sb.ID)
	if err != nil || got.State != sandbox.StateAsleep || got.StateReason != sandbox.ReasonForced || !got.HoldUntil.IsZero() {
		t.Errorf("forced sleep: %s because %q, held until %v, error %v", got.State, got.StateReason, got.HoldUntil, err)
	}
	// The lease still counts: what it stands for is paused, and not to be ended by a stop.
	if _, err := m.Stop(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("stop of what is paused: %v", err)
	}
	acquire(t, m, sb.ID).Release()
	if _, err := m.Sleep(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("sleep after the next wake: %v", err)
	}
	for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep} {
		if state == sandbox.StateAsleep {
			acquire(t, m, sb.ID).Release()
			if _, err := m.ForceSleep(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := m.ForceStop(t.Context(), sb.ID); err != nil || got.State != sandbox.StateStopped {
			t.Errorf("forced stop of one that is %s: %s, error %v", state, got.State, err)
		}
	}
	lease.Release()
	acquire(t, m, sb.ID).Release()
	mustSleep(t, m, sb.ID) // every lease was counted once
}

func TestForcedSleepThatFailsLeavesItRunning(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	lease := acquire(t, n.Manager, sb.ID)
	defer lease.Release()
	n.Freezer.Fail("freeze", errors.New("device busy"))
	if _, err := n.Manager.ForceSleep(t.Context(), sb.ID); err == nil || !strings.Contains(err.Error(), "device busy") {
		t.Errorf("forced sleep: %v", err)
	}
	other, err := n.Manager.AcquireRunning(sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	other.Release()
}

func TestListensDoesNotCountAsUse(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	before, _ := m.ByID(sb.ID)
	if !m.Listens(t.Context(), sb.ID, port) {
		t.Error("it does not listen")
	}
	if after, _ := m.ByID(sb.ID); !after.LastActiveAt.Equal(before.LastActiveAt) {
		t.Errorf("it counts as use: %s after %s", after.LastActiveAt, before.LastActiveAt)
	}
	mustSleep(t, m, sb.ID) // no lease is left
	if m.Listens(t.Context(), sb.ID, port) || stateOf(t, m, sb.ID) != sandbox.StateAsleep {
		t.Error("it listens asleep, or was woken")
	}
	if m.Listens(t.Context(), "unknown00000", port) {
		t.Error("a sandbox that does not exist listens")
	}
}

// second is the shortest time of the idle rule. Tests set it once they watch.
var second = sandbox.Duration(time.Second)

func TestIdleSandboxSleepsThenStops(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second, StopAfter: &second})
	if ev := nextEvent(t, events, sandbox.EventSlept); ev.Reason != sandbox.ReasonIdle {
		t.Errorf("slept %+v", ev)
	}
	nextEvent(t, events, sandbox.EventStopped)
	lease := acquire(t, n.Manager, sb.ID)
	if kind := lease.Wake().Kind; kind != sandbox.WakeCold {
		t.Errorf("woke %q, want cold", kind)
	}
	lease.Release()
}

func TestCPUTimeKeepsAwake(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Freezer.WorkAlways(sb.ID, 0.5)
	update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
	for enough := time.After(3 * time.Second); enough != nil; {
		select {
		case <-enough:
			enough = nil
		case ev := <-events:
			if ev.Type == sandbox.EventSlept {
				t.Fatal("slept while it worked half of the time")
			}
		}
	}
	n.Freezer.WorkAlways(sb.ID, 0)
	nextEvent(t, events, sandbox.EventSlept)
}

func TestHoldKeepsAwakeUntilItEnds(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	held, err := n.Manager.Hold(t.Context(), sb.ID, 3*time.Second)
	if err != nil || held.HoldUntil.IsZero() {
		t.Fatalf("hold until %v, error %v", held.HoldUntil, err)
	}
	update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
	if ev := nextEvent(t, events, sandbox.EventSlept); ev.Time.Before(held.HoldUntil) {
		t.Errorf("slept at %v, before %v", ev.Time, held.HoldUntil)
	}
	var invalid *sandbox.InvalidError
	if _, err := n.Manager.Hold(t.Context(), sb.ID, 48*time.Hour); !errors.As(err, &invalid) {
		t.Errorf("a hold of two days: %v", err)
	}
}

func TestSleepEndsAHoldWhateverTheState(t *testing.T) {
	for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep, sandbox.StateStopped} {
		n := sandboxtest.Open(t, nil)
		sb := create(t, n.Manager, "app")
		switch state {
		case sandbox.StateAsleep:
			mustSleep(t, n.Manager, sb.ID)
		case sandbox.StateStopped:
			if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := n.Manager.Hold(t.Context(), sb.ID, time.Hour); err != nil {
			t.Fatal(err)
		}
		if got, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil || !got.HoldUntil.IsZero() {
			t.Errorf("%s: held until %v, error %v", state, got.HoldUntil, err)
		}
		testkit.Eventually(t, "the end of the hold is on disk", func() bool { return n.Store.Record(t, sb.ID).HoldUntil.IsZero() })
	}
}

func TestTimelineHasEachChange(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	mustSleep(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	events, err := m.Events(t.Context(), sb.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	var types []string
	for i, ev := range events {
		if ev.Seq != uint64(i+1) || ev.Sandbox != sb.ID || ev.Time.IsZero() {
			t.Errorf("event %d: %+v", i, ev)
		}
		types = append(types, string(ev.Type))
	}
	if got := strings.Join(types, " "); got != "created slept woke" {
		t.Errorf("timeline %q", got)
	}
	if ev := events[2]; ev.Kind != sandbox.WakeWarm || ev.Cause != sandbox.CauseExec {
		t.Errorf("woke %+v", ev)
	}
	rest, err := m.Events(t.Context(), sb.ID, 2, 100)
	if err != nil || len(rest) != 1 || rest[0].Seq != 3 {
		t.Errorf("after 2: %+v, error %v", rest, err)
	}
}
