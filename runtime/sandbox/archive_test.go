package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// wantNoBackups waits until an owner has no backups.
func wantNoBackups(t *testing.T, n *sandboxtest.Node) {
	t.Helper()
	testkit.Eventually(t, "the archive is deleted", func() bool {
		list, err := n.Manager.Backups(t.Context(), owner, "")
		return err == nil && len(list) == 0
	})
}

func archive(t *testing.T, n *sandboxtest.Node, id sandbox.ID) sandbox.Sandbox {
	t.Helper()
	sb, err := n.Manager.Archive(t.Context(), id, false, nil)
	testkit.NoError(t, "Archive", err)
	if sb.State != sandbox.StateArchived || sb.Archived == nil {
		t.Fatalf("it is %s, its archive is %v", sb.State, sb.Archived)
	}
	return sb
}

// wantNothingOnTheNode waits until a sandbox has neither a container nor a snapshot.
func wantNothingOnTheNode(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	wantSnapshots(t, n, 0)
	testkit.Eventually(t, "its container is gone", func() bool { return n.Engine.Files(id) == nil })
}

func TestArchivedSandboxHasNothingOnTheNode(t *testing.T) {
	for state, enter := range map[sandbox.State]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		sandbox.StateRunning: func(*testing.T, *sandboxtest.Node, sandbox.ID) {},
		sandbox.StateAsleep:  func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) },
		sandbox.StateStopped: stopped,
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			enter(t, n, id)
			archived := archive(t, n, id)
			wantNothingOnTheNode(t, n, id)
			list, err := n.Manager.Backups(t.Context(), owner, id)
			if err != nil || len(list) != 1 || list[0].ID != archived.Archived.ID || list[0].Origin.Name != "box" {
				t.Errorf("backups: %+v, %v", list, err)
			}
			again := archive(t, n, id)
			if again.Archived.ID != archived.Archived.ID {
				t.Error("the second call archived it again")
			}
			testkit.NoError(t, "Close", n.Manager.Close(t.Context()))
			n.Restart(t)
			if sb, ok := n.Manager.ByID(id); !ok || sb.State != sandbox.StateArchived {
				t.Errorf("after a restart of the node it is %s", sb.State)
			}
			wantFiles(t, n, id, map[string]string{"a": "1"})
			sb, _ := n.Manager.ByID(id)
			if sb.State != sandbox.StateRunning || sb.Archived != nil || sb.Condition.Code != "" {
				t.Errorf("after the wake it is %s, its archive is %v, its condition %v", sb.State, sb.Archived, sb.Condition)
			}
			wantNoBackups(t, n)
		})
	}
}

// The disk of a stopped sandbox is moved, not copied: archiving is a way out of a shortage.
func TestShortDiskPermitsArchives(t *testing.T) {
	t.Parallel()
	n := openUnlimited(t)
	id := newDisk(t, n, "box")
	setFree(n, reserve-4096)
	n.Manager.WatchDisks()
	mustStop(t, n.Manager, id)
	if _, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 1}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("Fork: %v", err)
	}
	if sb, _ := n.Manager.ByID(id); sb.Snapshot != "" {
		t.Error("the refused fork moved the disk")
	}
	archived := archive(t, n, id)
	wantNothingOnTheNode(t, n, id)
	_, err := n.Manager.Wake(t.Context(), id)
	if sb, _ := n.Manager.ByID(id); !errors.Is(err, sandbox.ErrStoreFull) || sb.State != sandbox.StateArchived || sb.Archived.ID != archived.Archived.ID {
		t.Errorf("it woke on a short disk: %v; it is %s", err, sb.State)
	}
	setFree(n, 2*reserve)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestWakesOfAnArchivedSandboxShareOneDownload(t *testing.T) {
	t.Parallel()
	var patient sandbox.Config
	n := sandboxtest.Open(t, func(cfg *sandbox.Config) { patient = *cfg })
	id := newDisk(t, n, "box")
	archive(t, n, id)
	impatient := patient
	impatient.WakeTimeout = 50 * time.Millisecond
	testkit.NoError(t, "Configure", n.Manager.Configure(impatient))
	release := n.Backups.Block("restore")
	defer release()
	_, err := n.Manager.Wake(t.Context(), id)
	testkit.ErrorIs(t, "Wake while the disk is downloaded", err, context.DeadlineExceeded)
	if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateArchived {
		t.Errorf("it is %s", sb.State)
	}
	n.Backups.AwaitBlocked(t, "restore")
	testkit.NoError(t, "Configure", n.Manager.Configure(patient))
	release()
	testkit.Eventually(t, "the download ends", func() bool { sb, _ := n.Manager.ByID(id); return sb.State != sandbox.StateArchived })
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

// An object store that fails at the beginning stops no programs.
func TestFailedArchiveKeepsTheDisk(t *testing.T) {
	for call, want := range map[string]sandbox.State{"list": sandbox.StateRunning, "create": sandbox.StateStopped} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			failed := errors.New("it failed")
			n.Backups.FailOnce(call, failed)
			_, err := n.Manager.Archive(t.Context(), id, true, nil)
			testkit.ErrorIs(t, "Archive", err, failed)
			if sb, _ := n.Manager.ByID(id); sb.State != want {
				t.Errorf("it is %s", sb.State)
			}
			wantFiles(t, n, id, map[string]string{"a": "1"})
		})
	}
}

func TestFailedRetrievalKeepsTheArchive(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	archive(t, n, id)
	failed := errors.New("it failed")
	n.Backups.FailOnce("restore", failed)
	_, err := n.Manager.Wake(t.Context(), id)
	testkit.ErrorIs(t, "Wake", err, failed)
	if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateArchived || sb.Archived == nil {
		t.Errorf("it is %s", sb.State)
	}
	wantSnapshots(t, n, 0)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

// A sandbox that is woken during the upload goes on, and its archive is deleted.
func TestSandboxThatIsUsedDuringTheUploadIsNotArchived(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	release := n.Backups.Block("create")
	defer release()
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Archive(context.WithoutCancel(t.Context()), id, false, nil)
		done <- err
	}()
	n.Backups.AwaitBlocked(t, "create")
	wantFiles(t, n, id, map[string]string{"a": "1"})
	n.Engine.Write(id, "a", "2")
	stopped(t, n, id)
	release()
	testkit.ErrorIs(t, "Archive", testkit.Receive(t, "the end of the call", done), sandbox.ErrBusy)
	wantNoBackups(t, n)
	wantFiles(t, n, id, map[string]string{"a": "2"})
}

func TestArchiveAfterArchivesStoppedSandboxes(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, func(cfg *sandbox.Config) { cfg.ArchiveAfter = time.Second })
	id := newDisk(t, n, "box")
	stopped(t, n, id)
	testkit.Eventually(t, "it is archived", func() bool { sb, _ := n.Manager.ByID(id); return sb.State == sandbox.StateArchived })
	if sb, _ := n.Manager.ByID(id); sb.StateReason != sandbox.ReasonArchiveAfter {
		t.Errorf("the reason is %s", sb.StateReason)
	}
	wantNothingOnTheNode(t, n, id)
}

func TestBackupOfAnArchivedSandboxCannotBeDeleted(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	sb := archive(t, n, id)
	testkit.ErrorIs(t, "DeleteBackup", n.Manager.DeleteBackup(t.Context(), owner, sb.Archived.ID), sandbox.ErrBackupInUse)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestDestroyedArchiveLeavesNothing(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	archive(t, n, id)
	release := n.Backups.Block("restore")
	defer release()
	woken := make(chan error, 1)
	go func() {
		_, err := n.Manager.Wake(context.WithoutCancel(t.Context()), id)
		woken <- err
	}()
	n.Backups.AwaitBlocked(t, "restore")
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id)) // does not wait for the download
	testkit.ErrorIs(t, "Wake", testkit.Receive(t, "the end of the wake", woken), sandbox.ErrDestroyed)
	wantNothingOnTheNode(t, n, id)
	wantNoBackups(t, n)
}

// A destruction does not wait for the object store, and leaves nothing there, whatever happens.
func TestArchiveOfADestroyedSandboxIsDeletedLater(t *testing.T) {
	for name, meanwhile := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"after a failure": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			n.Backups.Fail("delete", errors.New("no response"))
			testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
			testkit.Eventually(t, "the failure is reported", func() bool {
				pending := n.Manager.Info(t.Context()).Pending
				return len(pending) == 1 && pending[0].Operation == sandbox.OperationDeleteArchive && pending[0].ID == id
			})
			create(t, n.Manager, "box") // the name is free
			n.Backups.Fail("delete", nil)
		},
		"after a crash": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			release := n.Backups.Block("delete")
			defer release()
			testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
			n.Backups.AwaitBlocked(t, "delete")
			n.Crash(t, release)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			archive(t, n, id)
			meanwhile(t, n, id)
			if _, known := n.Manager.ByID(id); known {
				t.Error("the destroyed sandbox is known")
			}
			wantNoBackups(t, n)
			testkit.Eventually(t, "its record is removed", func() bool {
				return n.Store.Record(t, id).ID == "" && len(n.Manager.Info(t.Context()).Pending) == 0
			})
		})
	}
}

// Snapshots, forks and backups of an archived sandbox have its disk; a restored snapshot replaces it.
func TestOperationsOnAnArchivedSandbox(t *testing.T) {
	for name, operate := range map[string]func(*sandboxtest.Node, sandbox.ID, sandbox.Snapshot) error{
		"snapshot": func(n *sandboxtest.Node, id sandbox.ID, _ sandbox.Snapshot) error {
			_, err := n.Manager.CreateSnapshot(context.Background(), id, sandbox.SnapshotRequest{})
			return err
		},
		"fork": func(n *sandboxtest.Node, id sandbox.ID, _ sandbox.Snapshot) error {
			_, err := n.Manager.Fork(context.Background(), id, sandbox.ForkRequest{Count: 1})
			return err
		},
		"backup": func(n *sandboxtest.Node, id sandbox.ID, _ sandbox.Snapshot) error {
			_, err := n.Manager.Backup(context.Background(), id, sandbox.BackupRequest{}, nil)
			return err
		},
		"restore": func(n *sandboxtest.Node, id sandbox.ID, s sandbox.Snapshot) error {
			_, err := n.Manager.Restore(context.Background(), id, s.ID, false)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			s := snapshotOf(t, n, id, "before")
			n.Engine.Write(id, "a", "2")
			archive(t, n, id)
			testkit.NoError(t, name, operate(n, id, s))
			want := map[string]string{"a": "2"}
			if name == "restore" {
				want["a"] = "1"
			}
			sb, _ := n.Manager.ByID(id)
			if sb.State != sandbox.StateStopped || sb.Archived != nil {
				t.Errorf("it is %s, its archive is %v", sb.State, sb.Archived)
			}
			wantFiles(t, n, id, want)
		})
	}
}

func TestArchiveNeedsAnObjectStoreAndAnIdleSandbox(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	lease := acquire(t, n.Manager, id)
	_, err := n.Manager.Archive(t.Context(), id, false, nil)
	testkit.ErrorIs(t, "Archive of a sandbox in use", err, sandbox.ErrBusy)
	if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateRunning {
		t.Errorf("it is %s", sb.State)
	}
	if _, err := n.Manager.Archive(t.Context(), id, true, nil); err != nil {
		t.Errorf("forced: %v", err)
	}
	lease.Release()
	n.Backups = nil
	testkit.NoError(t, "Close", n.Manager.Close(t.Context()))
	n.Restart(t)
	_, err = n.Manager.Archive(t.Context(), id, false, nil)
	testkit.ErrorIs(t, "Archive without an object store", err, sandbox.ErrNoObjectStore)
	_, err = n.Manager.Wake(t.Context(), id)
	testkit.ErrorIs(t, "Wake without an object store", err, sandbox.ErrNoObjectStore)
}

func TestEventsDescribeArchives(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	sb := archive(t, n, id)
	wantFiles(t, n, id, map[string]string{"a": "1"})
	events, err := n.Manager.Events(t.Context(), id, 0, 100)
	testkit.NoError(t, "Events", err)
	for _, kind := range []sandbox.EventType{sandbox.EventArchived, sandbox.EventRetrieved} {
		i := slices.IndexFunc(events, func(e sandbox.Event) bool { return e.Type == kind })
		if i < 0 || events[i].Backup != sb.Archived.ID || events[i].Bytes != 1 || events[i].DurationMS <= 0 {
			t.Errorf("the event %s is missing or incomplete in %+v", kind, events)
		}
	}
}

// The node's data is restored from a copy that is older than the wake of an archived sandbox.
func TestOlderDataOfTheNodeKeepsTheDiskOfARetrievedSandbox(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"running": func(*testing.T, *sandboxtest.Node, sandbox.ID) {}, "stopped": stopped,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			archive(t, n, id)
			older := n.Store.Record(t, id)
			wantFiles(t, n, id, map[string]string{"a": "1"})
			n.Engine.Write(id, "a", "2")
			end(t, n, id)
			n.Restored = true
			n.Crash(t, func() { testkit.NoError(t, "PutSandbox", n.Store.PutSandbox(t.Context(), older)) })
			wantFiles(t, n, id, map[string]string{"a": "2"})
			if sb, _ := n.Manager.ByID(id); sb.Archived != nil || sb.Rebase {
				t.Errorf("it is %s, its archive is %v", sb.State, sb.Archived)
			}
		})
	}
}
