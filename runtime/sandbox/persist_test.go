package sandbox_test

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// newPersisting creates a sandbox with a file a and that setting.
func newPersisting(t *testing.T, n *sandboxtest.Node, p sandbox.Persist) sandbox.ID {
	t.Helper()
	id := newDisk(t, n, "")
	update(t, n.Manager, id, sandbox.Patch{Persist: &p})
	return id
}

// sleeps are all ways to put a sandbox to sleep.
var sleeps = map[sandbox.StateReason]func(*testing.T, *sandboxtest.Node, sandbox.ID){
	sandbox.ReasonIdle: func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
		events := subscribe(t, n.Manager, id)
		update(t, n.Manager, id, sandbox.Patch{SleepAfter: &second})
		nextEvent(t, events, sandbox.EventStopped)
	},
	sandbox.ReasonSlept: func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
		if sb, err := n.Manager.Sleep(t.Context(), id); err != nil || sb.State != sandbox.StateStopped {
			t.Fatalf("it is %s, %v", sb.State, err)
		}
	},
}

func TestSleepKeepsWhatPersists(t *testing.T) {
	t.Parallel()
	for persist, files := range map[sandbox.Persist]map[string]string{sandbox.PersistDisk: {"a": "1"}, sandbox.PersistNone: {}} {
		for reason, sleep := range sleeps {
			t.Run(string(persist)+" "+string(reason), func(t *testing.T) {
				n := sandboxtest.Open(t, nil)
				id := newPersisting(t, n, persist)
				sleep(t, n, id)
				sb, _ := n.Manager.ByID(id)
				if sb.State != sandbox.StateStopped || sb.StateReason != reason || sb.StoppedOnPurpose() {
					t.Errorf("it is %s (%s), stopped on purpose: %t", sb.State, sb.StateReason, sb.StoppedOnPurpose())
				}
				testkit.Eventually(t, "files that do not persist are deleted before its wake", func() bool {
					return len(n.Engine.Files(id)) == len(files)
				})
				wantFiles(t, n, id, files)
				if sb, _ := n.Manager.ByID(id); sb.Condition.Code != "" {
					t.Errorf("condition %+v", sb.Condition)
				}
			})
		}
	}
}

func TestDiskThatDoesNotPersistEndsWithEachStop(t *testing.T) {
	for name, stop := range map[string]func(*sandboxtest.Node, sandbox.ID){
		"stop":           func(n *sandboxtest.Node, id sandbox.ID) { stopped(t, n, id) },
		"exit":           func(n *sandboxtest.Node, id sandbox.ID) { n.Engine.Kill(t, id) },
		"host restarted": func(n *sandboxtest.Node, id sandbox.ID) { n.Crash(t, func() { n.Engine.Kill(t, id) }) },
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newPersisting(t, n, sandbox.PersistNone)
			stop(n, id)
			testkit.Eventually(t, "it has stopped", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped })
			wantFiles(t, n, id, map[string]string{})
		})
	}
}

// With a snapshot as its base, a sandbox begins as that again, and a snapshot of it is equal.
func TestDisposableSandboxOfASnapshotBeginsAsItAgain(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	s := snapshotOf(t, n, newDisk(t, n, "source"), "")
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "job", Snapshot: string(s.ID), Persist: sandbox.PersistNone})
	if err != nil {
		t.Fatal(err)
	}
	n.Engine.Write(sb.ID, "b", "2")
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	testkit.Diff(t, "files of a copy", n.Engine.Files(createFrom(t, n, "copy", string(snapshotOf(t, n, sb.ID, "").ID)).ID), map[string]string{"a": "1"})
	wantFiles(t, n, sb.ID, map[string]string{"a": "1"})
}

// The node's shutdown is not a sleep: the next start resumes the sandbox.
func TestShutdownStopsNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newPersisting(t, n, sandbox.PersistNone)
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Restart(t)
	if state := stateOf(t, n.Manager, id); state != sandbox.StateRunning {
		t.Errorf("it is %s", state)
	}
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
}

func TestDiskIsDiscardedByTheNextWakeIfTheStopFailsTo(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newPersisting(t, n, sandbox.PersistNone)
	n.Disks.Fail("discard", errors.New("broken"))
	if _, err := n.Manager.Sleep(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
	n.Disks.Fail("discard", nil)
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Restart(t)
	wantFiles(t, n, id, map[string]string{})
}

func TestDiskIsNotDiscardedWhileItsContainerRunsOn(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	stranger := becomeUnknown(n)
	id := newPersisting(t, n, sandbox.PersistNone)
	n.Engine.Fail("stop", syscall.EIO)
	n.Crash(t, func() { stranger.Store(true) })
	n.Engine.HandleGuest(nil)
	testkit.Eventually(t, "it is given up", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped && n.Manager.Armed(id) })
	if _, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{}); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("snapshot: %v", err)
	}
	wantFiles(t, n, id, map[string]string{})
}

func TestBusySandboxIsNotStoppedByASleep(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newPersisting(t, n, sandbox.PersistDisk)
	lease := acquire(t, n.Manager, id)
	if _, err := n.Manager.Sleep(t.Context(), id); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("got %v", err)
	}
	lease.Release()
	if _, err := n.Manager.Hold(t.Context(), id, time.Hour); err != nil {
		t.Fatal(err)
	}
	if sb, err := n.Manager.Sleep(t.Context(), id); err != nil || sb.State != sandbox.StateStopped || !sb.HoldUntil.IsZero() {
		t.Errorf("it is %s, held until %v, %v", sb.State, sb.HoldUntil, err)
	}
}

func TestUnknownPersistIsRefused(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "app")
	unknown := sandbox.Persist("ram")
	_, err := n.Manager.Update(t.Context(), id, sandbox.Patch{Persist: &unknown})
	if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != "persist" {
		t.Errorf("got %v", err)
	}
	if sb, _ := n.Manager.ByID(id); sb.Persist != sandbox.PersistMemory {
		t.Errorf("it is %q", sb.Persist)
	}
}
