package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// backUpPaths backs up paths of a sandbox.
func backUpPaths(t *testing.T, n *sandboxtest.Node, id sandbox.ID, keep int, paths ...string) sandbox.Backup {
	t.Helper()
	b, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{BackupSelection: sandbox.BackupSelection{Paths: paths}, RetainLast: keep}, nil)
	testkit.NoError(t, "Backup", err)
	return b
}

func TestPartialBackupReplacesItsPathsOnly(t *testing.T) {
	for state, c := range map[sandbox.State]struct {
		enter func(*testing.T, *sandboxtest.Node, sandbox.ID)
		after sandbox.State
	}{
		sandbox.StateRunning:  {func(*testing.T, *sandboxtest.Node, sandbox.ID) {}, sandbox.StateRunning},
		sandbox.StateAsleep:   {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) }, sandbox.StateStopped},
		sandbox.StateStopped:  {stopped, sandbox.StateStopped},
		sandbox.StateArchived: {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { archive(t, n, id) }, sandbox.StateStopped},
	} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			source, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "source", Image: "other"})
			testkit.NoError(t, "Create", err)
			for name, content := range map[string]string{"a": "2", "b": "2", "not": "2"} {
				n.Engine.Write(source.ID, name, content)
			}
			b := backUpPaths(t, n, source.ID, 0, "/srv/a", "/srv/b")
			if !b.Partial() || b.Usage.Bytes != 2 {
				t.Errorf("the backup is %+v", b)
			}
			n.Backups.RebuildImage() // the paths do not need the image
			if state == sandbox.StateArchived {
				b.Layers = nil
			}
			n.Engine.Write(id, "rest", "1")
			c.enter(t, n, id)
			before, _ := n.Manager.ByID(id)
			events := subscribe(t, n.Manager, id)
			for range 2 { // the second time from the snapshot of the first one
				sb := restoreBackup(t, n, id, b)
				if sb.State != c.after || sb.Image != before.Image {
					t.Errorf("it is %s with the image %s", sb.State, sb.Image)
				}
				if ev := nextEvent(t, events, sandbox.EventRestored); ev.Backup != b.ID || ev.Bytes == 0 || ev.DurationMS == 0 {
					t.Errorf("event %+v", ev)
				}
			}
			wantFiles(t, n, id, map[string]string{"a": "2", "b": "2", "rest": "1"})
			n.Engine.Write(id, "new", "3")
			stopped(t, n, id)
			restoreBackup(t, n, id, b)
			wantFiles(t, n, id, map[string]string{"a": "2", "b": "2", "rest": "1", "new": "3"})
			if list, _ := n.Manager.Snapshots(owner, "", "", 0); len(list) != 0 {
				t.Errorf("temporary snapshots are listed: %v", list)
			}
		})
	}
}

func TestFailedRestoreOfPathsLeavesTheDisk(t *testing.T) {
	failed := errors.New("it failed")
	for operation, fail := range map[string]func(n *sandboxtest.Node) error{
		"download": func(n *sandboxtest.Node) error { n.Backups.FailOnce("restore", failed); return failed },
		"overlay":  func(n *sandboxtest.Node) error { n.Disks.FailOnce("overlay", failed); return failed },
		"move":     func(n *sandboxtest.Node) error { n.Disks.FailOnce("move", failed); return failed },
		"record": func(n *sandboxtest.Node) error {
			var writes atomic.Int64 // the hook is called concurrently
			n.Store.Hook(func(operation string, _ []sandbox.Event) error {
				if operation != "put_snapshot" || writes.Add(1) != 5 { // the fifth one completes the new disk
					return nil
				}
				n.Store.Hook(nil)
				return failed
			})
			return failed
		},
	} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			b := backUpPaths(t, n, id, 0, "/srv/a")
			n.Engine.Write(id, "a", "2")
			want := fail(n)
			_, err := n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
			testkit.ErrorIs(t, "RestoreBackup", err, want)
			if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateRunning {
				t.Errorf("the sandbox is %s", sb.State)
			}
			testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "2"})
			restoreBackup(t, n, id, b)
			testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
		})
	}
}

func TestCrashDuringARestoreOfPathsLeavesTheDisk(t *testing.T) {
	for _, operation := range []string{"restore", "overlay"} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := newDisk(t, n, "box")
			b := backUpPaths(t, n, id, 0, "/srv/a")
			n.Engine.Write(id, "a", "2")
			faults := map[string]*sandboxtest.Faults{"restore": &n.Backups.Faults, "overlay": &n.Disks.Faults}[operation]
			release := faults.Block(operation)
			defer release()
			done := make(chan error, 1)
			go func() {
				_, err := n.Manager.RestoreBackup(context.WithoutCancel(t.Context()), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
				done <- err
			}()
			faults.AwaitBlocked(t, operation)
			crash(t, n)
			if err := testkit.Receive(t, "the end of the call", done); err == nil {
				t.Error("the restore succeeded")
			}
			release()
			wantFiles(t, n, id, map[string]string{"a": "2"})
			restoreBackup(t, n, id, b)
			wantFiles(t, n, id, map[string]string{"a": "1"})
		})
	}
}

func TestRestoreOfPathsRespectsLeases(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUpPaths(t, n, id, 0, "/srv/a")
	n.Engine.Write(id, "a", "2")
	lease, err := n.Manager.Acquire(t.Context(), id, sandbox.CauseExec)
	testkit.NoError(t, "Acquire", err)
	defer lease.Release()
	_, err = n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID}, nil)
	testkit.ErrorIs(t, "RestoreBackup", err, sandbox.ErrBusy)
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "2"})
	_, err = n.Manager.RestoreBackup(t.Context(), id, sandbox.RestoreBackupRequest{Backup: b.ID, Force: true}, nil)
	testkit.NoError(t, "RestoreBackup", err)
	testkit.Diff(t, "files", n.Engine.Files(id), map[string]string{"a": "1"})
}

func TestBackupsOfOtherPathsAreRetained(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	n.Engine.Write(id, "b", "2")
	whole := backUp(t, n, id)
	first := backUpPaths(t, n, id, 1, "/srv/a", "/srv/b")
	other := backUpPaths(t, n, id, 1, "/srv/a")
	wantBackups(t, n, id, other, first, whole)
	second := backUpPaths(t, n, id, 1, "/srv/b", "/srv/a")
	wantBackups(t, n, id, second, other, whole)
	again, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{RetainLast: 1}, nil)
	testkit.NoError(t, "Backup", err)
	wantBackups(t, n, id, again, second, other)
}

func TestInvalidSelectionsChangeNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	many := make([]string, 101)
	long := make([]string, 40)
	for i := range many {
		many[i] = fmt.Sprintf("/srv/%d", i)
	}
	for i := range long {
		long[i] = fmt.Sprintf("/srv/%d%s", i, strings.Repeat("a", 1000))
	}
	for want, part := range map[string]sandbox.BackupSelection{
		`paths[0]: "srv" is not absolute; begin it with a slash, such as /srv/app`:                                                {Paths: []string{"srv"}},
		`paths[0]: "" is not absolute; begin it with a slash, such as /srv/app`:                                                   {Paths: []string{""}},
		`paths[0]: "/" is the whole disk; leave paths out for the whole disk`:                                                     {Paths: []string{"/"}},
		`paths[0]: "/srv/" is not a clean path; use "/srv"`:                                                                       {Paths: []string{"/srv/"}},
		`paths[1]: "/srv/../etc" is not a clean path; use "/etc"`:                                                                 {Paths: []string{"/srv", "/srv/../etc"}},
		`paths[0]: "/proc/1" is not on the disk; use a path outside of /proc, /sys, /dev, /.doze`:                                 {Paths: []string{"/proc/1"}},
		`paths[0]: "/.doze" is not on the disk; use a path outside of /proc, /sys, /dev, /.doze`:                                  {Paths: []string{"/.doze"}},
		`paths[1]: "/srv/a" and "/srv" overlap; name only the outer one`:                                                          {Paths: []string{"/srv", "/srv/a"}},
		`paths[2]: "/srv" and "/srv/a" overlap; name only the outer one`:                                                          {Paths: []string{"/srv/a", "/srv2", "/srv"}},
		`paths[1]: "/srv" and "/srv" overlap; name only the outer one`:                                                            {Paths: []string{"/srv", "/srv"}},
		`paths[0]: "/\xff" is not text; use UTF-8 without NUL, or name a folder that contains it`:                                 {Paths: []string{"/\xff"}},
		`paths: has 101 paths; at most 100 are allowed; name the folders that contain them`:                                       {Paths: many},
		`paths[0]: "/` + strings.Repeat("a", 79) + `…" has 4097 bytes; use at most 4096`:                                          {Paths: []string{"/" + strings.Repeat("a", 4096)}},
		`paths: paths and excludes have 40270 bytes; at most 32768 bytes are allowed; name the folders that contain them`:         {Paths: long},
		`paths: "/srv/none" does not exist; name files and folders that exist in the sandbox`:                                     {Paths: []string{"/srv/none"}},
		`excludes: has 101 patterns; at most 100 are allowed`:                                                                     {Excludes: many},
		`excludes[1]: "[a" has a bracket that is not closed; use the syntax of .gitignore, such as node_modules/ or /var/cache/*`: {Excludes: []string{"*", "[a"}},
		`excludes[0]: "" is empty; use the syntax of .gitignore, such as node_modules/ or /var/cache/*`:                           {Excludes: []string{""}},
		`excludes[0]: "a\nb" is not a line of text; use the syntax of .gitignore, such as node_modules/ or /var/cache/*`:          {Excludes: []string{"a\nb"}},
		`excludes[0]: "` + strings.Repeat("a", 80) + `…" has 1025 bytes; use at most 1024`:                                        {Excludes: []string{strings.Repeat("a", 1025)}},
	} {
		_, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{BackupSelection: part}, nil)
		if invalid, ok := errors.AsType[*sandbox.InvalidError](err); !ok || invalid.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	wantBackups(t, n, "")
	wantSnapshots(t, n, 0)
	wantFiles(t, n, id, map[string]string{"a": "1"})
}

func TestExcludedFilesAreAbsentAfterARestore(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	maps.All(map[string]string{"a.log": "1", "b": "1"})(func(name, content string) bool {
		n.Engine.Write(id, name, content)
		return true
	})
	part := sandbox.BackupSelection{Excludes: []string{"*.log"}, Gitignore: true}
	b, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{BackupSelection: part}, nil)
	testkit.NoError(t, "Backup", err)
	testkit.Diff(t, "the selection", b.BackupSelection, part)
	restoreBackup(t, n, id, b)
	wantFiles(t, n, id, map[string]string{"a": "1", "b": "1"})
	archive(t, n, id) // has the whole disk
	list, err := n.Manager.Backups(t.Context(), owner, id)
	testkit.NoError(t, "Backups", err)
	testkit.Diff(t, "the selection of the archive", list[0].BackupSelection, sandbox.BackupSelection{})
}

func TestRestoresOfPathsHaveNoLimit(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	b := backUpPaths(t, n, id, 0, "/srv/a")
	stopped(t, n, id)
	want := map[string]string{"a": "1"}
	for i := range 100 {
		if i%3 == 0 { // between, the disk has no changes
			acquire(t, n.Manager, id).Release()
			name := fmt.Sprint(i)
			n.Engine.Write(id, name, name)
			n.Engine.Write(id, "a", name)
			want[name] = name
			stopped(t, n, id)
		}
		restoreBackup(t, n, id, b)
	}
	wantFiles(t, n, id, want)
	if s := snapshotOf(t, n, id, ""); s.Depth > 64 {
		t.Errorf("the disk has %d layers", s.Depth)
	}
}
