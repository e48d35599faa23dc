package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// newDisk creates a sandbox with a file a.
func newDisk(t *testing.T, n *sandboxtest.Node, name string) sandbox.ID {
	t.Helper()
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: name})
	if err != nil {
		t.Fatal(err)
	}
	n.Engine.Write(sb.ID, "a", "1")
	return sb.ID
}

func snapshotOf(t *testing.T, n *sandboxtest.Node, id sandbox.ID, name string) sandbox.Snapshot {
	t.Helper()
	s, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func createFrom(t *testing.T, n *sandboxtest.Node, name, snapshot string) sandbox.Sandbox {
	t.Helper()
	sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: name, Snapshot: snapshot})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func stopped(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	if _, err := n.Manager.ForceStop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

func wantFiles(t *testing.T, n *sandboxtest.Node, id sandbox.ID, files map[string]string) {
	t.Helper()
	if _, err := n.Manager.Wake(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	testkit.Diff(t, "files", n.Engine.Files(id), files)
}

func TestSandboxOfASnapshotHasItsSettings(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	changed := furnish(t, n)
	s := snapshotOf(t, n, changed.ID, "")
	got := createFrom(t, n, "copy", string(s.ID))
	if got.Image != changed.Image || got.Size != changed.Size || got.SleepAfter != changed.SleepAfter || got.StopAfter != changed.StopAfter || got.Persist != changed.Persist || got.Env["A"] != "b" {
		t.Errorf("settings of %+v, want as in %+v", got, changed)
	}
	testkit.Diff(t, "declared processes", got.Declared, changed.Declared)
	if len(got.Ports) != 0 || got.TTL != 0 || got.Snapshot != s.ID {
		t.Errorf("ports %v, ttl %v, snapshot %s", got.Ports, got.TTL, got.Snapshot)
	}
	again, created, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "copy", Snapshot: string(s.ID)})
	if err != nil || created || again.ID != got.ID {
		t.Errorf("second creation: %s, created %t, %v", again.ID, created, err)
	}
	other := snapshotOf(t, n, changed.ID, "")
	_, _, err = n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "copy", Snapshot: string(other.ID)})
	if conflict, ok := errors.AsType[*sandbox.ConflictError](err); !ok {
		t.Errorf("creation from another snapshot: %v, %v", conflict, err)
	}
}

func TestSnapshotsOfOtherOwnersAreUnknown(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "mine")
	s := snapshotOf(t, n, id, "name")
	theirs, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: "other", Name: "theirs"})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{string(s.ID), s.Name} {
		_, found := n.Manager.Snapshot("other", name)
		_, restored := n.Manager.Restore(t.Context(), theirs.ID, sandbox.SnapshotID(name), true)
		_, _, created := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: "other", Snapshot: name})
		deleted := n.Manager.DeleteSnapshot(t.Context(), "other", sandbox.SnapshotID(name))
		for _, err := range []error{found, restored, created, deleted} {
			if !errors.Is(err, sandbox.ErrSnapshotNotFound) {
				t.Errorf("%s of another owner: %v", name, err)
			}
		}
	}
	if list, _ := n.Manager.Snapshots("other", "", "", 0); len(list) != 0 {
		t.Errorf("another owner sees %v", list)
	}
	if sb, _ := n.Manager.ByID(theirs.ID); sb.State != sandbox.StateRunning {
		t.Errorf("the refused restore left the sandbox %s", sb.State)
	}
}

func TestNameOfASnapshotIsUnique(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotOf(t, n, id, "name")
	_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "name"})
	if exists, ok := errors.AsType[*sandbox.SnapshotExistsError](err); !ok || exists.ID != s.ID {
		t.Errorf("second snapshot of the name: %v", err)
	}
	if err := n.Manager.DeleteSnapshot(t.Context(), owner, s.ID); err != nil {
		t.Fatal(err)
	}
	snapshotOf(t, n, id, "name")
}

func TestSnapshotNamedLikeAnIDHidesNoSnapshot(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	first := snapshotOf(t, n, id, "first")
	second := snapshotOf(t, n, id, string(first.ID))
	if s, err := n.Manager.Snapshot(owner, string(first.ID)); err != nil || s.ID != first.ID {
		t.Errorf("the id of the first names %s: %v", s.ID, err)
	}
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, first.ID))
	if s, err := n.Manager.Snapshot(owner, string(second.ID)); err != nil || s.ID != second.ID {
		t.Errorf("deleting the first by its id deleted the second: %v", err)
	}
}

func TestInvalidSnapshotsChangeNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	for _, req := range []sandbox.SnapshotRequest{{Name: "No"}, {RetainLast: -1}, {MaxAge: -1}, {MaxAge: 1}} {
		_, err := n.Manager.CreateSnapshot(t.Context(), id, req)
		if _, ok := errors.AsType[*sandbox.InvalidError](err); !ok {
			t.Errorf("%+v: %v", req, err)
		}
	}
	for _, req := range []sandbox.ForkRequest{{}, {Count: 101}, {Count: 2, Names: []string{"a"}}, {Count: 2, Names: []string{"a", "a"}}, {Count: 1, Names: []string{"box"}}, {Count: 1, Names: []string{"-"}}} {
		if forks, err := n.Manager.Fork(t.Context(), id, req); err == nil {
			t.Errorf("%+v: %v", req, forks)
		}
	}
	if got := n.Engine.Snapshots(); got != 0 || n.Engine.Count() != 1 {
		t.Errorf("%d snapshots, %d containers", got, n.Engine.Count())
	}
}

func TestFailedSnapshotLeavesNothing(t *testing.T) {
	for _, operation := range []string{"prefetch", "capture", "publish"} {
		t.Run(operation, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			n.Disks.FailOnce(operation, syscall.ENOSPC)
			if _, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "s"}); !errors.Is(err, sandbox.ErrStoreFull) {
				t.Errorf("got %v", err)
			}
			if got := n.Engine.Snapshots(); got != 0 {
				t.Errorf("%d snapshots are left", got)
			}
			if frozen, err := n.Freezer.Frozen(t.Context(), id); frozen || err != nil {
				t.Errorf("the sandbox is frozen: %t, %v", frozen, err)
			}
			snapshotOf(t, n, id, "s") // the name is free
		})
	}
}

// A full disk refuses the record of a failed snapshot, too, but its files, which take space, do not stay.
func TestFailedSnapshotOnAFullDiskLeavesNothing(t *testing.T) {
	for _, operation := range []string{"prefetch", "capture", "publish"} {
		t.Run(operation, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			n.Disks.FailOnce(operation, syscall.ENOSPC)
			release := n.Disks.Block(operation)
			failed := make(chan error, 1)
			go func() {
				_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "s"})
				failed <- err
			}()
			n.Disks.AwaitBlocked(t, operation)
			n.Store.Fill(true)
			release()
			testkit.ErrorIs(t, "CreateSnapshot", testkit.Receive(t, "the end of the snapshot", failed), sandbox.ErrStoreFull)
			if got := n.Engine.Snapshots(); got != 0 {
				t.Errorf("%d snapshots are left", got)
			}
			n.Store.Fill(false)
			snapshotOf(t, n, id, "s") // the name is free
		})
	}
}

// The helper that moves the disk of a stopped sandbox ends before or after that, and the next helper does not respond.
func TestInterruptedMoveKeepsTheFiles(t *testing.T) {
	for _, end := range []string{"move", "end_move"} {
		for name, next := range map[string]func(*testing.T, *sandboxtest.Node){
			"wake":  func(*testing.T, *sandboxtest.Node) {},
			"crash": func(t *testing.T, n *sandboxtest.Node) { n.Crash(t, func() {}) },
		} {
			t.Run(end+", then "+name, func(t *testing.T) {
				n := sandboxtest.Open(t, nil)
				id := newDisk(t, n, "box")
				stopped(t, n, id)
				failed := errors.New("the helper ended")
				n.Disks.FailOnce(end, failed)
				n.Disks.FailOnce("moved", failed)
				_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "s"})
				testkit.ErrorIs(t, "CreateSnapshot", err, failed)
				next(t, n)
				wantFiles(t, n, id, map[string]string{"a": "1"})
				if end == "move" {
					wantSnapshots(t, n, 0)
					snapshotOf(t, n, id, "s") // the name is free
				}
			})
		}
	}
}

func TestRefusedRecordOfAMoveFreesTheName(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	puts := 0
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if operation == "put_snapshot" {
			puts++
		}
		if puts == 2 { // the first one reserves the name
			return sandbox.ErrStoreFull
		}
		return nil
	})
	_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "s"})
	testkit.ErrorIs(t, "CreateSnapshot", err, sandbox.ErrStoreFull)
	n.Store.Hook(nil)
	snapshotOf(t, n, id, "s")
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestUnsettledMoveKeepsTheSandboxStopped(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	failed := errors.New("the helper ended")
	n.Disks.FailOnce("move", failed)
	n.Disks.Fail("moved", failed)
	_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{})
	testkit.ErrorIs(t, "CreateSnapshot", err, failed)
	_, err = n.Manager.Wake(t.Context(), id)
	testkit.ErrorIs(t, "Wake", err, failed)
	n.Disks.Fail("moved", nil)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestCrashDuringASnapshotLeavesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	release := n.Disks.Block("publish")
	go func() {
		_, _ = n.Manager.CreateSnapshot(context.WithoutCancel(t.Context()), id, sandbox.SnapshotRequest{Name: "s"})
	}()
	n.Disks.AwaitBlocked(t, "publish")
	n.Disks.Fail("delete", syscall.EIO)
	n.Crash(t, func() {
		release()
		n.Disks.Fail("delete", nil)
	})
	testkit.Eventually(t, "nothing is left", func() bool { return n.Engine.Snapshots() == 0 })
	if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != 0 {
		t.Errorf("unfinished snapshots: %v", list)
	}
	snapshotOf(t, n, id, "s")
}

// TestCrashAfterAMoveLosesNoFile: the node ends between the move of a disk and the records of it.
func TestCrashAfterAMoveLosesNoFile(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	dead := errors.New("the node is dead")
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if operation == "put" && len(n.Engine.Files(id)) == 0 {
			return dead
		}
		return nil
	})
	if _, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{}); !errors.Is(err, dead) {
		t.Fatalf("got %v", err)
	}
	n.Crash(t, func() { n.Store.Hook(nil) })
	list, _ := n.Manager.Snapshots(owner, id, "", 0)
	if len(list) != 1 {
		t.Fatalf("snapshots %v", list)
	}
	wantFiles(t, n, id, map[string]string{"a": "1"})
	wantFiles(t, n, createFrom(t, n, "copy", string(list[0].ID)).ID, map[string]string{"a": "1"})
}

func TestStoppedSandboxGoesOnWithItsFilesAfterASnapshot(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	first := snapshotOf(t, n, id, "")
	second := snapshotOf(t, n, id, "") // of a disk that has not been used since
	if second.Parent != first.ID || second.Depth != 2 {
		t.Errorf("second snapshot %+v", second)
	}
	n.Crash(t, func() {})
	wantFiles(t, n, id, map[string]string{"a": "1"})
	n.Engine.Write(id, "b", "2")
	n.Crash(t, func() {})
	wantFiles(t, n, id, map[string]string{"a": "1", "b": "2"})
}

// A disk has at most 64 layers. Agents that search a tree of attempts fork forks of forks.
func TestForksOfForksHaveABoundedDepth(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	want := map[string]string{"a": "1"}
	depths := map[int]int{} // how many snapshots have a depth
	for i := range 150 {
		name := fmt.Sprint(i)
		n.Engine.Write(id, name, name)
		want[name] = name
		if i%2 == 0 {
			stopped(t, n, id)
		}
		s := snapshotOf(t, n, id, "")
		if depths[s.Depth]++; s.Depth > 64 || s.Depth == 1 != (s.Parent == "") {
			t.Fatalf("snapshot %+v", s)
		}
		next := createFrom(t, n, "box-"+name, string(s.ID)).ID
		testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
		testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
		id = next
	}
	wantFiles(t, n, id, want)
	if depths[63] != 2 || depths[1] != 3 || depths[64] != 0 {
		t.Errorf("snapshots by depth: %v", depths)
	}
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
	wantSnapshots(t, n, 0)
}

func TestRestoreReplacesTheDisk(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	port, err := n.Manager.Expose(t.Context(), id, sandbox.Port{Port: 3000})
	if err != nil {
		t.Fatal(err)
	}
	s := snapshotOf(t, n, id, "")
	n.Engine.Write(id, "a", "2")
	n.Engine.Write(id, "b", "2")
	lease, err := n.Manager.Acquire(t.Context(), id, sandbox.CauseExec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Manager.Restore(t.Context(), id, s.ID, false); !errors.Is(err, sandbox.ErrBusy) {
		t.Errorf("restore of a sandbox in use: %v", err)
	}
	lease.Release()
	sb, err := n.Manager.Restore(t.Context(), id, s.ID, false)
	if err != nil {
		t.Fatal(err)
	}
	if sb.State != sandbox.StateRunning || len(sb.Ports) != 1 || sb.Ports[0].Token != port.Token {
		t.Errorf("restored to %+v", sb)
	}
	wantFiles(t, n, id, map[string]string{"a": "1"})
	stopped(t, n, id)
	if sb, err := n.Manager.Restore(t.Context(), id, s.ID, false); err != nil || sb.State != sandbox.StateStopped {
		t.Errorf("restored a stopped sandbox: %s, %v", sb.State, err)
	}
}

func TestFailedRestoreIsFinishedByTheNextWake(t *testing.T) {
	for _, operation := range []string{"discard", "remove", "create", "sync"} {
		t.Run(operation, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			s := snapshotOf(t, n, id, "")
			n.Engine.Write(id, "a", "2")
			n.Disks.FailOnce(operation, syscall.EIO)
			n.Engine.FailOnce(operation, syscall.EIO)
			if _, err := n.Manager.Restore(t.Context(), id, s.ID, false); err == nil {
				t.Error("the failure was not reported")
			}
			n.Crash(t, func() {})
			wantFiles(t, n, id, map[string]string{"a": "1"})
		})
	}
}

// TestOlderRecordsDiscardNoNewerDisk: the node's data are an older copy, in which a restore is
// unfinished that has been finished since.
func TestOlderRecordsDiscardNoNewerDisk(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotOf(t, n, id, "")
	stopped(t, n, id)
	if _, err := n.Manager.Restore(t.Context(), id, s.ID, false); err != nil {
		t.Fatal(err)
	}
	older := n.Store.Record(t, id)
	wantFiles(t, n, id, map[string]string{"a": "1"})
	n.Engine.Write(id, "newer", "2")
	stopped(t, n, id)
	n.Restored = true
	n.Crash(t, func() {
		if err := n.Store.PutSandbox(t.Context(), older); err != nil {
			t.Fatal(err)
		}
	})
	wantFiles(t, n, id, map[string]string{"a": "1", "newer": "2"})
}

func TestDeletedSnapshotIsRemovedAfterItsLastSandbox(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotOf(t, n, id, "")
	of := createFrom(t, n, "copy", string(s.ID))
	if err := n.Manager.DeleteSnapshot(t.Context(), owner, s.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Manager.Snapshot(owner, string(s.ID)); !errors.Is(err, sandbox.ErrSnapshotNotFound) {
		t.Errorf("the deleted snapshot: %v", err)
	}
	n.Crash(t, func() {})
	stopped(t, n, of.ID)
	wantFiles(t, n, of.ID, map[string]string{"a": "1"})
	if err := n.Manager.Destroy(t.Context(), of.ID); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it is removed", func() bool { return n.Engine.Snapshots() == 0 })
}

// TestDeletedSnapshotIsRemovedWithTheContainerThatWasBasedOnIt: not at the next regular check.
func TestDeletedSnapshotIsRemovedWithTheContainerThatWasBasedOnIt(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	old := snapshotOf(t, n, id, "")
	_, err := n.Manager.Restore(t.Context(), id, old.ID, false)
	testkit.NoError(t, "Restore", err)
	s := snapshotOf(t, n, id, "")
	stopped(t, n, id)
	_, err = n.Manager.Restore(t.Context(), id, s.ID, false)
	testkit.NoError(t, "Restore", err)
	release := n.Disks.Block("delete")
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, old.ID))
	n.Disks.AwaitBlocked(t, "delete")
	release()
	n.Manager.CollectSnapshots() // after the collection of the deletion
	testkit.Diff(t, "snapshots before the start", n.Engine.Snapshots(), 2)
	mustWake(t, n, id)
	testkit.Eventually(t, "it is removed", func() bool { return n.Engine.Snapshots() == 1 })
}

func TestForkThatFailsLeavesNothing(t *testing.T) {
	n := sandboxtest.Open(t, func(cfg *sandbox.Config) { cfg.MaxSandboxes = 3 })
	id := newDisk(t, n, "box")
	if forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 3}); !errors.Is(err, sandbox.ErrTooManySandboxes) {
		t.Errorf("got %v, %v", forks, err)
	}
	testkit.Eventually(t, "nothing is left", func() bool { return n.Engine.Count() == 1 && n.Engine.Snapshots() == 0 })
	forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2, Names: []string{"x", "y"}})
	if err != nil || forks[0].Name != "x" || forks[1].Name != "y" {
		t.Fatalf("%v, %v", forks, err)
	}
	for _, fork := range forks {
		wantFiles(t, n, fork.ID, map[string]string{"a": "1"})
	}
}

// The last write of a fork, before which it is not acknowledged, is the deletion of its snapshot.
func TestForkWhoseLastWriteFails(t *testing.T) {
	for name, c := range map[string]struct {
		die, restored   bool
		left, snapshots int
	}{
		"leaves nothing":                         {false, false, 1, 0},
		"leaves nothing after a crash":           {true, false, 1, 0},
		"stays if the data of the node is older": {true, true, 3, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, func(cfg *sandbox.Config) { cfg.SnapshotInterval = 10 * time.Millisecond })
			id := newDisk(t, n, "box")
			release := n.Engine.Block("start")
			defer release()
			forked := make(chan error, 1)
			go func() {
				_, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2})
				forked <- err
			}()
			n.Engine.AwaitBlocked(t, "start")
			atEnd := func(operation string) bool { return operation == "put_snapshot" }
			if c.die {
				died, revive := dieWhen(n, atEnd)
				release()
				if err := testkit.Receive(t, "its error", forked); err == nil || !died() {
					t.Errorf("Fork returned %v; the node died: %t", err, died())
				}
				n.Restored = c.restored
				n.Crash(t, revive)
			} else {
				failed := errors.New("the disk has failed")
				n.Store.Hook(func(operation string, _ []sandbox.Event) error {
					if atEnd(operation) {
						return failed
					}
					return nil
				})
				release()
				testkit.ErrorIs(t, "Fork", testkit.Receive(t, "its error", forked), failed)
				n.Store.Hook(nil)
			}
			testkit.Eventually(t, "the forks are as they should be", func() bool {
				sandboxes, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0)
				return len(sandboxes) == c.left && n.Engine.Count() == c.left && n.Engine.Snapshots() == c.snapshots
			})
		})
	}
}

// The snapshot of a fork is neither listed nor known, and the retention of other snapshots neither counts nor deletes it.
func TestSnapshotOfAForkIsTemporary(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	kept := snapshotOf(t, n, id, "")
	release := n.Engine.Block("start")
	defer release()
	var forks []sandbox.Sandbox
	forked := make(chan error, 1)
	go func() {
		var err error
		forks, err = n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2})
		forked <- err
	}()
	n.Engine.AwaitBlocked(t, "start")
	list, _ := n.Manager.Snapshots(owner, "", "", 0)
	testkit.Diff(t, "snapshots", list, []sandbox.Snapshot{kept})
	for _, retain := range []int{2, 1} {
		_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{RetainLast: retain})
		testkit.NoError(t, "snapshot", err)
		if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != retain {
			t.Errorf("with keep_last %d there are %+v", retain, list)
		}
	}
	sandboxes, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0)
	temporary := sandboxes[slices.IndexFunc(sandboxes, func(sb sandbox.Sandbox) bool { return sb.CreatedFrom != "" })].CreatedFrom
	for name, operate := range map[string]func() error{
		"Snapshot":       func() error { _, err := n.Manager.Snapshot(owner, string(temporary)); return err },
		"Restore":        func() error { _, err := n.Manager.Restore(t.Context(), id, temporary, false); return err },
		"DeleteSnapshot": func() error { return n.Manager.DeleteSnapshot(t.Context(), owner, temporary) },
		"Create": func() error {
			_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Snapshot: string(temporary)})
			return err
		},
	} {
		testkit.ErrorIs(t, name, operate(), sandbox.ErrSnapshotNotFound)
	}
	release()
	testkit.NoError(t, "fork", testkit.Receive(t, "the forks", forked))
	for _, fork := range forks {
		wantFiles(t, n, fork.ID, map[string]string{"a": "1"})
		testkit.NoError(t, "destroy", n.Manager.Destroy(t.Context(), fork.ID))
	}
	testkit.Eventually(t, "only the last snapshot is left", func() bool { return n.Engine.Snapshots() == 1 })
}

func TestForkWhoseCallerLeavesLeavesNothing(t *testing.T) {
	for name, block := range map[string]func(*sandboxtest.Node) (blocked func(testing.TB), release func()){
		"during the snapshot": func(n *sandboxtest.Node) (func(testing.TB), func()) {
			release := n.Disks.Block("publish")
			return func(t testing.TB) { n.Disks.AwaitBlocked(t, "publish") }, release
		},
		"during the creations": func(n *sandboxtest.Node) (func(testing.TB), func()) {
			release := n.Engine.Block("start")
			return func(t testing.TB) { n.Engine.AwaitBlocked(t, "start") }, release
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			awaitBlocked, release := block(n)
			ctx, leave := context.WithCancel(t.Context())
			forked := make(chan error, 1)
			go func() {
				_, err := n.Manager.Fork(ctx, id, sandbox.ForkRequest{Count: 20})
				forked <- err
			}()
			awaitBlocked(t)
			leave()
			if err := testkit.Receive(t, "the end of the call", forked); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			release()
			testkit.Eventually(t, "nothing is left", func() bool {
				list, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0)
				return len(list) == 1 && n.Engine.Count() == 1 && n.Engine.Snapshots() == 0
			})
		})
	}
}

func TestRestoreWhoseCallerLeavesWakesTheSandbox(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotOf(t, n, id, "")
	n.Engine.Write(id, "a", "2")
	release := n.Engine.Block("stop")
	ctx, leave := context.WithCancel(t.Context())
	restored := make(chan error, 1)
	go func() {
		_, err := n.Manager.Restore(ctx, id, s.ID, false)
		restored <- err
	}()
	n.Engine.AwaitBlocked(t, "stop")
	leave()
	if err := testkit.Receive(t, "the end of the call", restored); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	events := subscribe(t, n.Manager, id)
	release()
	nextEvent(t, events, sandbox.EventRestored)
	nextEvent(t, events, sandbox.EventWoke)
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
}

// Another owner may have a disk with many files, or a container that does not end.
func TestSlowDisksDoNotBlockCreationsFromSnapshots(t *testing.T) {
	for name, block := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID, sandbox.Snapshot) (release func()){
		"a deletion": func(t *testing.T, n *sandboxtest.Node, _ sandbox.ID, s sandbox.Snapshot) func() {
			release := n.Disks.Block("delete")
			if err := n.Manager.DeleteSnapshot(t.Context(), owner, s.ID); err != nil {
				t.Fatal(err)
			}
			n.Disks.AwaitBlocked(t, "delete")
			return release
		},
		"a restore": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID, s sandbox.Snapshot) func() {
			release := n.Engine.Block("stop")
			go func() {
				if _, err := n.Manager.Restore(context.WithoutCancel(t.Context()), id, s.ID, true); err != nil {
					t.Error(err)
				}
			}()
			n.Engine.AwaitBlocked(t, "stop")
			return release
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			s, other := snapshotOf(t, n, id, ""), snapshotOf(t, n, id, "other")
			events := subscribe(t, n.Manager, id)
			release := block(t, n, id, s)
			defer release()
			created := make(chan error, 1)
			go func() {
				_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "copy", Snapshot: string(other.ID)})
				created <- err
			}()
			if err := testkit.Receive(t, "the creation", created); err != nil {
				t.Error(err)
			}
			release()
			if name == "a restore" {
				nextEvent(t, events, sandbox.EventWoke)
			}
		})
	}
}

// The snapshot of a stopped sandbox is measured after it has been acknowledged.
func TestSnapshotThatIsDeletedWhileItIsMeasuredStaysDeleted(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	measure := n.Disks.Block("measure")
	s := snapshotOf(t, n, id, "")
	deleted := make(chan error, 1)
	written := make(chan struct{}, 2) // the usage and the deletion
	var writing atomic.Bool
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if operation == "after_put_snapshot" {
			written <- struct{}{}
		}
		if operation == "put_snapshot" && writing.CompareAndSwap(false, true) { // the usage is about to be written
			go func() { deleted <- n.Manager.DeleteSnapshot(context.WithoutCancel(t.Context()), owner, s.ID) }()
			select {
			case err := <-deleted:
				deleted <- err
			case <-time.After(20 * time.Millisecond): // a wait cannot be observed otherwise
			}
		}
		return nil
	})
	measure()
	if err := testkit.Receive(t, "the end of the deletion", deleted); err != nil {
		t.Error(err)
	}
	for range 2 {
		testkit.Receive(t, "a write", written)
	}
	n.Crash(t, func() {}) // the store has the last write
	if got, err := n.Manager.Snapshot(owner, string(s.ID)); !errors.Is(err, sandbox.ErrSnapshotNotFound) {
		t.Errorf("it is %+v, %v", got, err)
	}
}

func TestSnapshotsAreListedInPages(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	var want []string
	for i := range 5 {
		want = append([]string{snapshotOf(t, n, id, fmt.Sprint("s", i)).Name}, want...)
	}
	var got []string
	for after := sandbox.SnapshotID(""); ; {
		list, next := n.Manager.Snapshots(owner, id, after, 2)
		for _, s := range list {
			got = append(got, s.Name)
		}
		if after = next; after == "" {
			break
		}
	}
	testkit.Diff(t, "names", got, want)
}

func TestThousandSnapshotsOfASandbox(t *testing.T) {
	const count = 1000
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	for i := range count {
		n.Engine.Write(id, "file", fmt.Sprint(i))
		snapshotOf(t, n, id, "")
	}
	all, _ := n.Manager.Snapshots(owner, id, "", 0)
	if len(all) != count {
		t.Fatalf("%d snapshots, want %d", len(all), count)
	}
	for _, i := range []int{0, count / 2, count - 1} {
		_, err := n.Manager.Restore(t.Context(), id, all[i].ID, true)
		testkit.NoError(t, "restore", err)
		if got := n.Engine.Files(id)["file"]; got != fmt.Sprint(count-1-i) { // they are newest first
			t.Errorf("snapshot %d has %q", count-1-i, got)
		}
	}
	testkit.NoError(t, "destroy", n.Manager.Destroy(t.Context(), id))
	for _, s := range all {
		testkit.NoError(t, "delete", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	}
	testkit.Eventually(t, "nothing is left of the snapshots", func() bool { return n.Engine.Snapshots() == 0 })
}

func TestSnapshotsAreDeletedByNumberAndAge(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	named := snapshotOf(t, n, id, "named")
	snapshotOf(t, n, id, "")
	second := snapshotOf(t, n, id, "")
	third, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{RetainLast: 2, MaxAge: sandbox.Duration(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	var ids []sandbox.SnapshotID
	list, _ := n.Manager.Snapshots(owner, id, "", 0)
	for _, s := range list {
		ids = append(ids, s.ID)
	}
	testkit.Diff(t, "snapshots", ids, []sandbox.SnapshotID{third.ID, second.ID, named.ID})
	// Its age has passed when the node starts again.
	third.ExpiresAt = time.Now().Add(-time.Second)
	if err := n.Store.PutSnapshot(t.Context(), third); err != nil {
		t.Fatal(err)
	}
	n.Crash(t, func() {})
	testkit.Eventually(t, "it is deleted", func() bool {
		_, err := n.Manager.Snapshot(owner, string(third.ID))
		return errors.Is(err, sandbox.ErrSnapshotNotFound)
	})
}

// The timeline of a sandbox has what happened to its disk, with sizes.
func TestEventsDescribeSnapshots(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	events := subscribe(t, n.Manager, id)
	expect := func(want sandbox.Event) {
		t.Helper()
		got := nextEvent(t, events, want.Type)
		timed := want.Type != sandbox.EventSnapshotDeleted
		if timed != (got.DurationMS > 0) {
			t.Errorf("%s took %v ms", got.Type, got.DurationMS)
		}
		want.Seq, want.Time, want.Sandbox, want.DurationMS = got.Seq, got.Time, id, got.DurationMS
		testkit.Diff(t, string(want.Type), got, want)
	}
	first := snapshotOf(t, n, id, "")
	if first.Usage.Bytes == 0 {
		t.Fatal("the snapshot has no size")
	}
	expect(sandbox.Event{Type: sandbox.EventSnapshotted, Snapshot: first.ID, Bytes: first.Usage.Bytes})
	second, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{RetainLast: 1})
	testkit.NoError(t, "snapshot", err)
	expect(sandbox.Event{Type: sandbox.EventSnapshotted, Snapshot: second.ID, Bytes: second.Usage.Bytes})
	expect(sandbox.Event{Type: sandbox.EventSnapshotDeleted, Snapshot: first.ID, Bytes: first.Usage.Bytes, Reason: sandbox.ReasonRetention})
	_, err = n.Manager.Restore(t.Context(), id, second.ID, false)
	testkit.NoError(t, "restore", err)
	expect(sandbox.Event{Type: sandbox.EventRestored, Snapshot: second.ID, Bytes: second.Usage.Bytes})
	n.Engine.Write(id, "a", "2")
	forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2})
	testkit.NoError(t, "fork", err)
	forked := nextEvent(t, events, sandbox.EventForked) // without events of the snapshot for it
	if forked.Forks != 2 || forked.Bytes == 0 || forked.DurationMS == 0 {
		t.Errorf("it was forked: %+v", forked)
	}
	testkit.NoError(t, "delete", n.Manager.DeleteSnapshot(t.Context(), owner, second.ID))
	next := nextEvent(t, events, sandbox.EventSnapshotDeleted)
	if next.Snapshot != second.ID || next.Reason != sandbox.ReasonRequested {
		t.Errorf("deleted: %+v", next)
	}
	list, err := n.Manager.Events(t.Context(), forks[0].ID, 0, 1)
	if err != nil || len(list) != 1 || list[0].Type != sandbox.EventCreated || list[0].Snapshot != forks[0].Snapshot {
		t.Errorf("the fork began with %+v, %v", list, err)
	}
}
