package sandbox_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// snapshotPaths takes a snapshot of paths of a sandbox.
func snapshotPaths(t *testing.T, n *sandboxtest.Node, id sandbox.ID, req sandbox.SnapshotRequest) sandbox.Snapshot {
	t.Helper()
	s, err := n.Manager.CreateSnapshot(t.Context(), id, req)
	testkit.NoError(t, "CreateSnapshot", err)
	return s
}

func TestPartialSnapshotReplacesItsPathsOnly(t *testing.T) {
	for state, c := range map[sandbox.State]struct {
		enter func(*testing.T, *sandboxtest.Node, sandbox.ID)
		asIs  sandbox.State // after the snapshot
		after sandbox.State // after the restore
	}{
		sandbox.StateRunning:  {func(*testing.T, *sandboxtest.Node, sandbox.ID) {}, sandbox.StateRunning, sandbox.StateRunning},
		sandbox.StateAsleep:   {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) }, sandbox.StateAsleep, sandbox.StateStopped},
		sandbox.StateStopped:  {stopped, sandbox.StateStopped, sandbox.StateStopped},
		sandbox.StateArchived: {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { archive(t, n, id) }, sandbox.StateStopped, sandbox.StateStopped},
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			source := newDisk(t, n, "source")
			n.Engine.Write(source, "b", "2")
			n.Engine.Write(source, "not", "2")
			c.enter(t, n, source)
			paths := []string{"/srv/a", "/srv/b"}
			s := snapshotPaths(t, n, source, sandbox.SnapshotRequest{Name: "part", Paths: paths})
			if sb, _ := n.Manager.ByID(source); sb.State != c.asIs {
				t.Errorf("the snapshot left the sandbox %s", sb.State)
			}
			if s.Parent != "" || s.Depth != 1 || s.Usage.Entries != 3 || !s.Partial() {
				t.Errorf("the snapshot is %+v", s)
			}
			stored, err := n.Manager.Snapshot(owner, "part")
			testkit.NoError(t, "Snapshot", err)
			testkit.Diff(t, "the snapshot", stored, s)
			testkit.Diff(t, "the paths", s.Paths, paths)
			wantFiles(t, n, source, map[string]string{"a": "1", "b": "2", "not": "2"})

			target, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "target", Image: "other"})
			testkit.NoError(t, "Create", err)
			id := target.ID
			n.Engine.Write(id, "a", "3")
			n.Engine.Write(id, "rest", "3")
			c.enter(t, n, id)
			before, _ := n.Manager.ByID(id)
			events := subscribe(t, n.Manager, id)
			for range 2 { // the second time from the result of the first one
				sb, err := n.Manager.Restore(t.Context(), id, s.ID, false)
				testkit.NoError(t, "Restore", err)
				if sb.State != c.after || sb.Image != before.Image {
					t.Errorf("it is %s with the image %s", sb.State, sb.Image)
				}
				if ev := nextEvent(t, events, sandbox.EventRestored); ev.Snapshot != s.ID || ev.Bytes == 0 || ev.DurationMS == 0 {
					t.Errorf("event %+v", ev)
				}
			}
			wantFiles(t, n, id, map[string]string{"a": "1", "b": "2", "rest": "3"})
			if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != 1 {
				t.Errorf("temporary snapshots are listed: %v", list)
			}
			created, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "new", Snapshot: "part"})
			testkit.NoError(t, "Create", err)
			testkit.Diff(t, "files of the new sandbox", n.Engine.Files(created.ID), map[string]string{"a": "1", "b": "2"})
		})
	}
}

func TestSnapshotsOfOtherPathsAreRetained(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	n.Engine.Write(id, "b", "2")
	take := func(paths ...string) sandbox.SnapshotID {
		return snapshotPaths(t, n, id, sandbox.SnapshotRequest{RetainLast: 1, Paths: paths}).ID
	}
	whole, first, other := take(), take("/srv/a", "/srv/b"), take("/srv/a")
	want := func(ids ...sandbox.SnapshotID) {
		t.Helper()
		list, _ := n.Manager.Snapshots(owner, id, "", 0)
		got := []sandbox.SnapshotID{}
		for _, s := range list {
			got = append(got, s.ID)
		}
		testkit.Diff(t, "snapshots", got, ids)
	}
	want(other, first, whole)
	second := take("/srv/b", "/srv/a")
	want(second, other, whole)
	again := take()
	want(again, second, other)
}

func TestInvalidPathsOfASnapshotLeaveNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	long := make([]string, 40)
	for i := range long {
		long[i] = fmt.Sprintf("/srv/%d%s", i, strings.Repeat("a", 1000))
	}
	for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateStopped} {
		if state == sandbox.StateStopped {
			stopped(t, n, id)
		}
		for want, paths := range map[string][]string{
			`paths[0]: "/" is the whole disk; leave paths out for the whole disk`:                                {"/"},
			`paths[1]: "/srv/a" and "/srv" overlap; name only the outer one`:                                     {"/srv", "/srv/a"},
			`paths[0]: "/proc" is not on the disk; use a path outside of /proc, /sys, /dev, /.doze`:              {"/proc"},
			`paths: paths have 40270 bytes; at most 32768 bytes are allowed; name the folders that contain them`: long,
			`paths[1]: "/srv/none" does not exist; name files and folders that exist in the sandbox`:             {"/srv/a", "/srv/none"},
		} {
			_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Name: "part", Paths: paths})
			if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Error() != want {
				t.Errorf("%s: got  %v\nwant %s", state, err, want)
			}
		}
		wantSnapshots(t, n, 0)
	}
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

// A missing path is found before the programs stop.
func TestMissingPathStopsNoPrograms(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	n.Disks.FailOnce("capture", errors.New("captured"))
	_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{Paths: []string{"/srv/none"}})
	if _, ok := errors.AsType[*sandbox.InvalidError](err); !ok {
		t.Errorf("CreateSnapshot: %v", err)
	}
}

func TestFailedRestoreOfSnapshotPathsLeavesTheDisk(t *testing.T) {
	failed := errors.New("it failed")
	for operation, want := range map[string]string{"stage": "it failed", "overlay": "restore the paths of a snapshot: it failed", "move": "it failed"} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			s := snapshotPaths(t, n, id, sandbox.SnapshotRequest{Paths: []string{"/srv/a"}})
			n.Engine.Write(id, "a", "2")
			n.Disks.FailOnce(operation, failed)
			_, err := n.Manager.Restore(t.Context(), id, s.ID, false)
			testkit.ErrorIs(t, "Restore", err, failed)
			if err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("the error is %q", err)
			}
			if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateRunning {
				t.Errorf("the sandbox is %s", sb.State)
			}
			if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != 1 {
				t.Errorf("%d snapshots are listed", len(list))
			}
			testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "2"})
			_, err = n.Manager.Restore(t.Context(), id, s.ID, false)
			testkit.NoError(t, "Restore", err)
			testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
		})
	}
}

func TestRestoreOfPathsRefusesOtherKindsOfEntries(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotPaths(t, n, id, sandbox.SnapshotRequest{Paths: []string{"/srv/a"}})
	b := backUpPaths(t, n, id, 0, "/srv/a")
	other := fmt.Errorf(`"/srv" is %w`, sandbox.ErrNotFolder)
	n.Disks.FailOnce("overlay", other)
	_, bySnapshot := n.Manager.Restore(t.Context(), id, s.ID, false)
	n.Disks.FailOnce("overlay", other)
	_, byBackup := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
	for field, err := range map[string]error{"snapshot_id": bySnapshot, "backup_id": byBackup} {
		if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != field || !strings.Contains(invalid.Reason, `"/srv" is not a folder`) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// restoring begins to restore a partial snapshot, and returns when its files are copied. The copy ends with release.
func restoring(t *testing.T, n *sandboxtest.Node, id sandbox.ID, snapshot sandbox.SnapshotID) (release func(), done <-chan error) {
	t.Helper()
	release = n.Disks.Block("stage")
	ended := make(chan error, 1)
	go func() {
		_, err := n.Manager.Restore(t.Context(), id, snapshot, false)
		ended <- err
	}()
	n.Disks.AwaitBlocked(t, "stage")
	return release, ended
}

// The snapshot stays while its files are copied.
func TestRestoredSnapshotIsDeletedAfterItsCopy(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	older := snapshotPaths(t, n, id, sandbox.SnapshotRequest{})
	s := snapshotPaths(t, n, id, sandbox.SnapshotRequest{Paths: []string{"/srv/a"}})
	n.Engine.Write(id, "a", "2")
	release, done := restoring(t, n, id, s.ID)
	defer release()
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, older.ID))
	testkit.Eventually(t, "the older snapshot is removed", func() bool { return n.Engine.Snapshots() <= 1 }) // newer ones are removed before
	release()
	testkit.NoError(t, "Restore", testkit.Receive(t, "the end of the restore", done))
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
}

// Publishing reads the layers below the disk, although the sandbox is gone and its base was deleted.
func TestBaseOfACapturedDiskStaysUntilItIsPublished(t *testing.T) {
	for name, paths := range map[string][]string{"whole": nil, "paths": {"/srv/a"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			older := snapshotPaths(t, n, id, sandbox.SnapshotRequest{})
			base := snapshotPaths(t, n, id, sandbox.SnapshotRequest{})
			forked, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "based", Snapshot: string(base.ID)})
			testkit.NoError(t, "Create", err)
			release := n.Disks.Block("publish")
			defer release()
			done := make(chan error, 1)
			go func() {
				_, err := n.Manager.CreateSnapshot(t.Context(), forked.ID, sandbox.SnapshotRequest{Name: "part", Paths: paths})
				done <- err
			}()
			n.Disks.AwaitBlocked(t, "publish")
			testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, base.ID))
			testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), forked.ID))
			testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, older.ID))
			// Newer ones are removed before older ones.
			testkit.Eventually(t, "the older snapshot is removed", func() bool { return n.Engine.Snapshots() <= 2 })
			if count := n.Engine.Snapshots(); count != 2 {
				t.Errorf("%d snapshots exist, want the base and the captured one", count)
			}
			release()
			testkit.NoError(t, "CreateSnapshot", testkit.Receive(t, "the end of the snapshot", done))
			testkit.Eventually(t, "the base is removed", func() bool { return n.Engine.Snapshots() == 1 })
		})
	}
}

func TestSnapshotThatDoesNotFitIsNotRestored(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotPaths(t, n, id, sandbox.SnapshotRequest{Paths: []string{"/srv/a"}})
	setFree(n, reserve+1000)
	_, err := n.Manager.Restore(t.Context(), id, s.ID, false)
	testkit.ErrorIs(t, "Restore", err, sandbox.ErrStoreFull)
	if err != nil && !strings.Contains(err.Error(), "the snapshot needs 12 KiB; /disks had 2.0 GiB free") {
		t.Errorf("the error is %q", err)
	}
}

func TestShortageOfSpaceEndsTheCopyOfASnapshot(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	s := snapshotPaths(t, n, id, sandbox.SnapshotRequest{Paths: []string{"/srv/a"}})
	n.Engine.Write(id, "a", "2")
	release, done := restoring(t, n, id, s.ID)
	defer release()
	setFree(n, reserve-1)
	n.Manager.WatchDisks()
	testkit.ErrorIs(t, "Restore", testkit.Receive(t, "the end of the restore", done), sandbox.ErrStoreFull)
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "2"})
}
