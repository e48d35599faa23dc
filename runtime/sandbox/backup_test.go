package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func backUp(t *testing.T, n *sandboxtest.Node, id sandbox.ID) sandbox.Backup {
	t.Helper()
	b, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
	testkit.NoError(t, "Backup", err)
	return b
}

// restoreBackup restores a backup, which no lease and no image prevents.
func restoreBackup(t *testing.T, n *sandboxtest.Node, id sandbox.ID, b sandbox.Backup) sandbox.Sandbox {
	t.Helper()
	sb, err := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
	testkit.NoError(t, "RestoreBackup", err)
	return sb
}

// wantBackups fails unless these are the backups of a sandbox, newest first.
func wantBackups(t *testing.T, n *sandboxtest.Node, of sandbox.ID, want ...sandbox.Backup) {
	t.Helper()
	list, err := n.Manager.Backups(t.Context(), owner, of)
	testkit.NoError(t, "Backups", err)
	if len(list) != 0 || len(want) != 0 {
		testkit.Diff(t, "backups", list, want)
	}
}

// wantSnapshots waits until that many snapshots have files. None is listed.
func wantSnapshots(t *testing.T, n *sandboxtest.Node, count int) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%d snapshots are left", count), func() bool { return n.Engine.Snapshots() == count })
	if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != 0 {
		t.Errorf("temporary snapshots are listed: %v", list)
	}
}

func TestBackupLeavesSandboxesAsTheyAre(t *testing.T) {
	for state, c := range map[sandbox.State]struct {
		enter     func(*testing.T, *sandboxtest.Node, sandbox.ID)
		snapshots int // that have files afterwards
	}{
		sandbox.StateRunning: {func(*testing.T, *sandboxtest.Node, sandbox.ID) {}, 0},
		sandbox.StateAsleep:  {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) }, 0},
		// Its disk is not copied, but goes on as the base of a new one.
		sandbox.StateStopped: {stopped, 1},
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id, other := newDisk(t, n, "box"), newDisk(t, n, "other")
			n.Engine.Write(other, "a", "2")
			c.enter(t, n, id)
			before, _ := n.Manager.ByID(id)
			b := backUp(t, n, id)
			after, _ := n.Manager.ByID(id)
			if after.State != state || after.StateSince != before.StateSince || after.StartedAt != before.StartedAt {
				t.Errorf("it was %s since %s, and is %s since %s", before.State, before.StateSince, after.State, after.StateSince)
			}
			if b.Sandbox != id || b.Owner != owner || b.Usage.Bytes != 1 || b.Duration <= 0 || b.Frozen > 0 != (state == sandbox.StateRunning) ||
				b.Origin.Name != "box" || b.Origin.Image != before.Image || b.Origin.Size != before.Size {
				t.Errorf("the backup is %+v", b)
			}
			again := backUp(t, n, id)
			wantSnapshots(t, n, c.snapshots)
			wantBackups(t, n, id, again, b)
			wantBackups(t, n, other)
			restoreBackup(t, n, other, b)
			wantFiles(t, n, other, map[string]string{"a": "1"})
			wantFiles(t, n, id, map[string]string{"a": "1"})
		})
	}
}

func TestFailedBackupLeavesNothing(t *testing.T) {
	failed := errors.New("it failed")
	for operation, fail := range map[string]func(n *sandboxtest.Node) error{
		"create": func(n *sandboxtest.Node) error { n.Backups.FailOnce("create", failed); return failed },
		"capture": func(n *sandboxtest.Node) error {
			n.Backups.FailOnce("capture", sandbox.ErrStoreFull)
			return sandbox.ErrStoreFull
		},
	} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			events := subscribe(t, n.Manager, id)
			want := fail(n)
			_, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
			testkit.ErrorIs(t, "Backup", err, want)
			if ev := nextEvent(t, events, sandbox.EventBackupFailed); ev.Error != err.Error() {
				t.Errorf("the event %+v lacks %q", ev, err)
			}
			wantSnapshots(t, n, 0)
			wantBackups(t, n, "")
			if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateRunning {
				t.Errorf("the sandbox is %s", sb.State)
			}
			wantBackups(t, n, "", backUp(t, n, id))
		})
	}
}

func TestBackupGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	events := subscribe(t, n.Manager, id)
	release := n.Backups.Block("create")
	defer release()
	ctx, leave := context.WithCancel(t.Context())
	var returned atomic.Bool
	phases := make(chan sandbox.BackupPhase, 10)
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Backup(ctx, id, sandbox.BackupRequest{}, func(p sandbox.BackupProgress) {
			if returned.Load() {
				t.Error("the progress was reported after Backup returned")
			}
			phases <- p.Phase
		})
		returned.Store(true)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "create")
	if got := testkit.Receive(t, "progress", phases); got != sandbox.BackupUpload {
		t.Errorf("phase %s, want %s", got, sandbox.BackupUpload)
	}
	leave()
	testkit.ErrorIs(t, "Backup", testkit.Receive(t, "the end of the call", done), context.Canceled)
	release()
	ev := nextEvent(t, events, sandbox.EventBackedUp)
	list, err := n.Manager.Backups(t.Context(), owner, id)
	if err != nil || len(list) != 1 || list[0].ID != ev.Backup {
		t.Errorf("backups %v, %v; event %+v", list, err, ev)
	}
	wantSnapshots(t, n, 0)
}

func TestBackupOfASandboxThatStopsGoesOnFromASnapshot(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	var phases []sandbox.BackupPhase
	b, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, func(p sandbox.BackupProgress) {
		if len(phases) == 0 { // the disk is read, but not captured yet
			n.Engine.Write(id, "b", "2")
			stopped(t, n, id)
		}
		phases = append(phases, p.Phase)
	})
	testkit.NoError(t, "Backup", err)
	if phases = slices.Compact(phases); !slices.Equal(phases, []sandbox.BackupPhase{sandbox.BackupUpload, sandbox.BackupSnapshot, sandbox.BackupUpload}) || b.Frozen != 0 {
		t.Errorf("phases %v; the backup is %+v", phases, b)
	}
	wantBackups(t, n, id, b)
	n.Engine.Write(id, "c", "3")
	restoreBackup(t, n, id, b)
	wantFiles(t, n, id, map[string]string{"a": "1", "b": "2"})
}

func TestCrashDuringABackupLeavesNothing(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	release := n.Backups.Block("create")
	defer release()
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Backup(context.WithoutCancel(t.Context()), id, sandbox.BackupRequest{}, nil)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "create")
	crash(t, n)
	if err := testkit.Receive(t, "the end of the call", done); err == nil {
		t.Error("the backup succeeded")
	}
	release()
	wantSnapshots(t, n, 0)
	wantBackups(t, n, "")
	wantFiles(t, n, id, map[string]string{"a": "1"})
	wantBackups(t, n, "", backUp(t, n, id))
}

// crash ends the node before it can change records of snapshots or delete their files, and starts it
// again.
func crash(t *testing.T, n *sandboxtest.Node) {
	t.Helper()
	dead := errors.New("the node is dead")
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if operation == "put_snapshot" {
			return dead
		}
		return nil
	})
	n.Disks.Fail("delete", dead)
	n.Crash(t, func() {
		n.Store.Hook(nil)
		n.Disks.Fail("delete", nil)
	})
}

func TestOneBackupOfASandboxAtATime(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	release := n.Backups.Block("create")
	defer release()
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "create")
	_, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
	testkit.ErrorIs(t, "Backup during another one", err, sandbox.ErrBusy)
	release()
	testkit.NoError(t, "Backup", testkit.Receive(t, "the backup", done))
	backUp(t, n, id)
	list, err := n.Manager.Events(t.Context(), id, 0, 100)
	testkit.NoError(t, "Events", err)
	for _, ev := range list {
		if ev.Type == sandbox.EventBackupFailed {
			t.Errorf("refusing a second backup is reported as %+v", ev)
		}
	}
}

func TestOldBackupsAreDeleted(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id, other := newDisk(t, n, "box"), newDisk(t, n, "other")
	ofOther := backUp(t, n, other)
	first, second := backUp(t, n, id), backUp(t, n, id)
	n.Engine.Write(id, "b", "23")
	retain := func(keep int) sandbox.Backup {
		t.Helper()
		b, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{RetainLast: keep}, nil)
		testkit.NoError(t, "Backup", err)
		return b
	}
	n.Backups.FailOnce("delete", errors.New("it failed"))
	third := retain(2)
	wantBackups(t, n, id, third, second, first)
	n.Log.Await("failed to delete old backups")

	events := subscribe(t, n.Manager, id)
	expect := func(want sandbox.Event) {
		t.Helper()
		got := nextEvent(t, events, want.Type)
		if (got.DurationMS > 0) != (want.Type == sandbox.EventBackedUp) {
			t.Errorf("%s took %v ms", got.Type, got.DurationMS)
		}
		want.Seq, want.Time, want.Sandbox, want.DurationMS = got.Seq, got.Time, id, got.DurationMS
		testkit.Diff(t, string(want.Type), got, want)
	}
	n.Engine.Write(id, "c", "456")
	fourth := retain(2)
	wantBackups(t, n, id, fourth, third)
	expect(sandbox.Event{Type: sandbox.EventBackedUp, Backup: fourth.ID, Bytes: 6, Stored: 3})
	expect(sandbox.Event{Type: sandbox.EventBackupDeleted, Backup: second.ID, Bytes: 1, Reason: sandbox.ReasonRetention})
	expect(sandbox.Event{Type: sandbox.EventBackupDeleted, Backup: first.ID, Bytes: 1, Reason: sandbox.ReasonRetention})
	testkit.NoError(t, "DeleteBackup", n.Manager.DeleteBackup(t.Context(), owner, third.ID))
	expect(sandbox.Event{Type: sandbox.EventBackupDeleted, Backup: third.ID, Bytes: 3, Reason: sandbox.ReasonRequested})
	testkit.ErrorIs(t, "DeleteBackup again", n.Manager.DeleteBackup(t.Context(), owner, third.ID), sandbox.ErrBackupNotFound)
	wantBackups(t, n, "", fourth, ofOther)

	// Backups outlive their sandbox.
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
	wantBackups(t, n, id, fourth)
	restoreBackup(t, n, other, fourth)
	wantFiles(t, n, other, map[string]string{"a": "1", "b": "23", "c": "456"})
	testkit.NoError(t, "DeleteBackup", n.Manager.DeleteBackup(t.Context(), owner, fourth.ID))
	wantBackups(t, n, id)

	_, err := n.Manager.Backup(t.Context(), other, sandbox.BackupRequest{RetainLast: -1}, nil)
	if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Field != "keep_last" {
		t.Errorf("keep_last -1: %v", err)
	}
}

func TestBackupsOfOtherOwnersAreUnknown(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "mine")
	b := backUp(t, n, id)
	theirs, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: "other", Name: "theirs"})
	testkit.NoError(t, "Create", err)
	for _, of := range []sandbox.ID{"", id} {
		list, err := n.Manager.Backups(t.Context(), "other", of)
		if err != nil || len(list) != 0 {
			t.Errorf("another owner sees %v, %v", list, err)
		}
	}
	_, err = n.Manager.RestoreBackup(t.Context(), theirs.ID, sandbox.RestoreBackupRequest{Backup: b.ID, Force: true}, nil)
	testkit.ErrorIs(t, "RestoreBackup", err, sandbox.ErrBackupNotFound)
	testkit.ErrorIs(t, "DeleteBackup", n.Manager.DeleteBackup(t.Context(), "other", b.ID), sandbox.ErrBackupNotFound)
	if sb, _ := n.Manager.ByID(theirs.ID); sb.State != sandbox.StateRunning || sb.StartedAt != theirs.StartedAt {
		t.Errorf("the refused restore left the sandbox %s", sb.State)
	}
	wantBackups(t, n, "", b)
}

func TestRestoredBackupReplacesTheDisk(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	port, err := n.Manager.Expose(t.Context(), id, sandbox.Port{Port: 3000})
	testkit.NoError(t, "Expose", err)
	b := backUp(t, n, id)
	n.Engine.Write(id, "a", "2")
	n.Engine.Write(id, "b", "2")
	events := subscribe(t, n.Manager, id)
	sb := restoreBackup(t, n, id, b)
	if sb.State != sandbox.StateRunning || len(sb.Ports) != 1 || sb.Ports[0].Token != port.Token {
		t.Errorf("restored to %+v", sb)
	}
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
	if ev := nextEvent(t, events, sandbox.EventRestored); ev.Backup != b.ID || ev.Snapshot != "" || ev.Bytes == 0 || ev.DurationMS == 0 {
		t.Errorf("event %+v", ev)
	}
	n.Engine.Write(id, "a", "3")
	stopped(t, n, id)
	if sb := restoreBackup(t, n, id, b); sb.State != sandbox.StateStopped {
		t.Errorf("the restore left a stopped sandbox %s", sb.State)
	}
	wantSnapshots(t, n, 2) // its container is based on the first one until it starts
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestBackupIsRestoredIntoASandboxWithAnotherImage(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	source, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "source", Image: "other", Env: map[string]string{"A": "b"}})
	testkit.NoError(t, "Create", err)
	n.Engine.Write(source.ID, "a", "2")
	b := backUp(t, n, source.ID)

	n.Backups.RebuildImage()
	before, _ := n.Manager.ByID(id)
	_, err = n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID, Force: true}, nil)
	if mismatch, ok := errors.AsType[*sandbox.ImageMismatchError](err); !ok || mismatch.Image != "other" {
		t.Errorf("another image: %v", err)
	}
	if sb, _ := n.Manager.ByID(id); sb.StartedAt != before.StartedAt || sb.Image != before.Image {
		t.Errorf("the refused restore left %+v", sb)
	}
	wantSnapshots(t, n, 0)

	sb, err := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID, AnyImage: true}, nil)
	testkit.NoError(t, "RestoreBackup", err)
	if sb.Image != "other" || sb.ImageRef != source.ImageRef || sb.Name != "box" || sb.Env["A"] != "" {
		t.Errorf("restored to %+v", sb)
	}
	wantFiles(t, n, id, map[string]string{"a": "2"})
}

func TestRefusedRestoreOfABackupChangesNothing(t *testing.T) {
	failed := errors.New("it failed")
	for name, c := range map[string]struct {
		prepare func(*testing.T, *sandboxtest.Node, sandbox.ID)
		want    error
	}{
		"busy": {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			t.Cleanup(acquire(t, n.Manager, id).Release)
		}, sandbox.ErrBusy},
		"failed list":     {func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Backups.FailOnce("list", failed) }, failed},
		"failed download": {func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Backups.FailOnce("restore", failed) }, failed},
		"full disk": {func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) { n.Backups.FailOnce("restore", syscall.ENOSPC) },
			sandbox.ErrStoreFull},
		"failed write of the record": {func(_ *testing.T, n *sandboxtest.Node, _ sandbox.ID) {
			n.Store.Hook(func(operation string, _ []sandbox.Event) error {
				if operation == "put" {
					return failed
				}
				return nil
			})
		}, failed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			b := backUp(t, n, id)
			n.Engine.Write(id, "a", "2")
			before, _ := n.Manager.ByID(id)
			c.prepare(t, n, id)
			_, err := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
			testkit.ErrorIs(t, "RestoreBackup", err, c.want)
			n.Store.Hook(nil)
			left := 0
			if name == "failed write of the record" {
				left = 1 // the stored record may name it
			}
			wantSnapshots(t, n, left)
			sb, _ := n.Manager.ByID(id)
			if name != "failed write of the record" && (sb.State != sandbox.StateRunning || sb.StartedAt != before.StartedAt) {
				t.Errorf("it runs since %s and is now %s, since %s", before.StartedAt, sb.State, sb.StartedAt)
			}
			if sb.Snapshot != before.Snapshot || sb.Rebase {
				t.Errorf("its disk is now based on %q, to be replaced: %t", sb.Snapshot, sb.Rebase)
			}
			wantFiles(t, n, id, map[string]string{"a": "2"})
			_, err = n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID, Force: true}, nil)
			testkit.NoError(t, "RestoreBackup with force", err)
			wantFiles(t, n, id, map[string]string{"a": "1"})
		})
	}
}

func TestRestoreOfABackupGoesOnWithoutItsCaller(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUp(t, n, id)
	n.Engine.Write(id, "a", "2")
	release := n.Backups.Block("restore")
	defer release()
	ctx, leave := context.WithCancel(t.Context())
	var returned atomic.Bool
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.RestoreBackup(ctx, id, sandbox.RestoreBackupRequest{Backup: b.ID}, func(p sandbox.BackupProgress) {
			if returned.Load() || p.Phase != sandbox.BackupDownload {
				t.Errorf("progress %+v", p)
			}
		})
		returned.Store(true)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "restore")
	if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateRunning {
		t.Errorf("during the download it is %s", sb.State)
	}
	leave()
	testkit.ErrorIs(t, "RestoreBackup", testkit.Receive(t, "the end of the call", done), context.Canceled)
	events := subscribe(t, n.Manager, id)
	release()
	nextEvent(t, events, sandbox.EventRestored)
	nextEvent(t, events, sandbox.EventWoke)
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
}

func TestCrashDuringTheRestoreOfABackupLeavesNothing(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUp(t, n, id)
	n.Engine.Write(id, "a", "2")
	release := n.Backups.Block("restore")
	defer release()
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.RestoreBackup(context.WithoutCancel(t.Context()), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "restore")
	crash(t, n)
	if err := testkit.Receive(t, "the end of the call", done); err == nil {
		t.Error("the restore succeeded")
	}
	release()
	wantSnapshots(t, n, 0)
	wantFiles(t, n, id, map[string]string{"a": "2"})
	restoreBackup(t, n, id, b)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

// The node ends between the download and the restore.
func TestCrashAfterTheDownloadOfABackupLeavesNothing(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUp(t, n, id)
	wantSnapshots(t, n, 0)
	n.Engine.Write(id, "a", "2")
	puts := 0
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if operation != "put_snapshot" {
			return nil
		}
		switch puts++; puts {
		case 1: // the beginning of the download
			return nil
		case 2: // its end
			lease := acquire(t, n.Manager, id)
			t.Cleanup(lease.Release)
			return nil
		}
		return errors.New("the node is dead")
	})
	_, err := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
	testkit.ErrorIs(t, "RestoreBackup", err, sandbox.ErrBusy)
	wantSnapshots(t, n, 1)
	n.Crash(t, func() { n.Store.Hook(nil) })
	wantSnapshots(t, n, 0)
	wantFiles(t, n, id, map[string]string{"a": "2"})
}

func TestRestoredDiskOutlivesItsTemporarySnapshot(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUp(t, n, id)
	n.Engine.Write(id, "a", "2")
	stopped(t, n, id)
	restoreBackup(t, n, id, b)
	n.Crash(t, func() {}) // before the disk is used
	wantFiles(t, n, id, map[string]string{"a": "1"})
	n.Engine.Write(id, "b", "3")
	n.Crash(t, func() {})
	want := map[string]string{"a": "1", "b": "3"}
	wantFiles(t, n, id, want)
	wantSnapshots(t, n, 1)

	forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 1})
	testkit.NoError(t, "Fork", err)
	s := snapshotOf(t, n, id, "")
	if s.Depth != 2 {
		t.Errorf("its snapshot has the depth %d", s.Depth)
	}
	copied := createFrom(t, n, "copy", string(s.ID)).ID
	restoreBackup(t, n, copied, backUp(t, n, id))
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	for _, id := range []sandbox.ID{id, forks[0].ID, copied} {
		wantFiles(t, n, id, want)
		testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
	}
	wantSnapshots(t, n, 0)
}

func TestBackupThatDoesNotFitIsNotDownloaded(t *testing.T) {
	for unit, c := range map[string]struct {
		missing sandbox.DiskUsage // one more than what is free
		want    string
	}{
		"bytes":  {sandbox.DiskUsage{Bytes: 1}, "the backup needs 110 KiB; /disks had 2.0 GiB free; the reserve is 2.0 GiB"},
		"inodes": {sandbox.DiskUsage{Entries: 1}, "the backup needs 3 files; /disks had 100002 free inodes; the reserve is 100000"},
	} {
		t.Run(unit, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			n.Engine.Write(id, "large", strings.Repeat("x", 100_000))
			b := backUp(t, n, id)
			spaces, err := n.Disks.Space()
			testkit.NoError(t, "Space", err)
			free := spaces[0].Free
			// Exactly the reserve and the backup, of one of the two.
			switch unit {
			case "bytes":
				n.Disks.Use(sandbox.DiskUsage{Bytes: free.Bytes - reserve - b.Usage.Bytes - 4096*b.Usage.Entries})
			case "inodes":
				n.Disks.Use(sandbox.DiskUsage{Entries: free.Entries - 100_000 - b.Usage.Entries})
			}
			n.Disks.Use(c.missing)
			_, err = n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, func(p sandbox.BackupProgress) {
				t.Errorf("progress %+v", p)
			})
			if !errors.Is(err, sandbox.ErrStoreFull) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %s", err, c.want)
			}
			n.Disks.Use(sandbox.DiskUsage{Bytes: -c.missing.Bytes, Entries: -c.missing.Entries})
			restoreBackup(t, n, id, b)
		})
	}
	t.Run("no limit of inodes", func(t *testing.T) {
		t.Parallel()
		n := sandboxtest.Open(t, nil)
		n.Disks.UnlimitInodes()
		id := newDisk(t, n, "box")
		restoreBackup(t, n, id, backUp(t, n, id))
	})
	t.Run("disk of the node's data", func(t *testing.T) {
		t.Parallel()
		n := sandboxtest.Open(t, nil)
		n.Disks.SetApart()
		setFree(n, reserve)
		id := newDisk(t, n, "box")
		restoreBackup(t, n, id, backUp(t, n, id))
	})
}

func TestNodeWithoutObjectStoreHasNoBackups(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	n.Backups = nil
	n.Crash(t, func() {})
	_, backedUp := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
	_, listed := n.Manager.Backups(t.Context(), owner, "")
	_, restored := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: "x"}, nil)
	deleted := n.Manager.DeleteBackup(t.Context(), owner, "x")
	for call, err := range map[string]error{"Backup": backedUp, "Backups": listed, "RestoreBackup": restored, "DeleteBackup": deleted} {
		testkit.ErrorIs(t, call, err, sandbox.ErrNoObjectStore)
	}
}
