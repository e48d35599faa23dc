package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// dieWhen makes the node die when a call of the store, as for its Hook, meets a condition: that call and all later operations fail.
// died reports whether it has, revive ends the failures.
func dieWhen(n *sandboxtest.Node, now func(operation string) bool) (died func() bool, revive func()) {
	failAll := func(err error) {
		for _, f := range []*sandboxtest.Faults{&n.Engine.Faults, &n.Disks.Faults, &n.Backups.Faults, &n.Freezer.Faults, &n.Uplink.Faults} {
			f.FailAll(err)
		}
	}
	dead := errors.New("the node is dead")
	var isDead atomic.Bool
	n.Store.Hook(func(operation string, _ []sandbox.Event) error {
		if now(operation) && isDead.CompareAndSwap(false, true) {
			failAll(dead)
		}
		if isDead.Load() {
			return dead
		}
		return nil
	})
	return isDead.Load, func() { n.Store.Hook(nil); failAll(nil) }
}

// dieAt is dieWhen for a write to the store, counted from 1.
func dieAt(n *sandboxtest.Node, write int64) (died func() bool, revive func()) {
	var writes atomic.Int64
	return dieWhen(n, func(operation string) bool {
		return operation != "append" && operation != "last" && writes.Add(1) >= write
	})
}

// nodeCounts are what sandboxes and operations on their disks leave on a node and in its object store.
type nodeCounts struct {
	Containers, Snapshots, Backups, Records, Pending, Quarantined int
	Layers                                                        int // records of snapshots without files
	Files                                                         int // run folders and notes
}

func countAll(t *testing.T, n *sandboxtest.Node) (c nodeCounts) {
	t.Helper()
	c.Containers, c.Snapshots = n.Engine.Count(), n.Engine.Snapshots()
	backups, err := n.Backups.List(t.Context(), owner)
	if err == nil { // else the node is dead
		c.Backups = len(backups)
	}
	testkit.NoError(t, "Sandboxes", n.Store.Sandboxes(t.Context(), func(sandbox.Sandbox) error { c.Records++; return nil }))
	testkit.NoError(t, "Snapshots", n.Store.Snapshots(t.Context(), func(s sandbox.Snapshot) error {
		if s.Progress == "layer" {
			c.Layers++
		} else {
			c.Records++
		}
		return nil
	}))
	for _, dir := range []string{n.Creations, n.Origins, filepath.Dir(n.RunDir("any"))} {
		files, err := os.ReadDir(dir)
		testkit.NoError(t, "ReadDir", err)
		c.Files += len(files)
	}
	info := n.Manager.Info(t.Context())
	c.Pending, c.Quarantined = len(info.Pending), len(info.Quarantined)
	return c
}

// awaitCounts waits until all sandboxes have a disk and a folder, each snapshot is listed or the base of a disk, and
// nothing else is left. It stops when died returns true.
func awaitCounts(t *testing.T, n *sandboxtest.Node, died func() bool) {
	t.Helper()
	var got, want nodeCounts
	testkit.Eventually(t, "nothing is left of the operation", func() bool {
		sandboxes, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0)
		snapshots, _ := n.Manager.Snapshots(owner, "", "", 0)
		used := map[sandbox.SnapshotID]bool{}
		for _, s := range snapshots {
			used[s.ID] = true
		}
		want = nodeCounts{}
		for _, sb := range sandboxes {
			want.Records++
			switch {
			case sb.State == sandbox.StateArchived:
				want.Backups++
			case !sb.Rebase || n.Engine.Files(sb.ID) != nil: // its next start replaces the container
				want.Containers++
			}
			if sb.Snapshot != "" {
				used[sb.Snapshot] = true
			}
		}
		want.Snapshots = len(used)
		want.Records += len(used)
		got = countAll(t, n)
		want.Layers, want.Files = got.Layers, got.Files
		return got == want || died()
	}, func() string { return fmt.Sprintf("%+v, want %+v", got, want) })
}

// TestCrashAtEachWrite ends the node at each write to the store during an operation, and once after it.
func TestCrashAtEachWrite(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	nothing := func(*testing.T, *sandboxtest.Node, sandbox.ID) {}
	withSnapshot := func(paths ...string) func(*testing.T, *sandboxtest.Node, sandbox.ID) {
		return func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			_, err := n.Manager.CreateSnapshot(ctx, id, sandbox.SnapshotRequest{Name: "snapshot", Paths: paths})
			testkit.NoError(t, "CreateSnapshot", err)
			n.Engine.Write(id, "a", "2")
		}
	}
	restore := func(n *sandboxtest.Node, id sandbox.ID) error {
		_, err := n.Manager.Restore(ctx, id, "snapshot", true)
		return err
	}
	for name, c := range map[string]crashedOperation{
		"snapshot": {nothing, func(n *sandboxtest.Node, id sandbox.ID) error {
			_, err := n.Manager.CreateSnapshot(ctx, id, sandbox.SnapshotRequest{})
			return err
		}, 1, 0},
		"restore":          {withSnapshot(), restore, 1, 0},
		"restore of paths": {withSnapshot("/srv/a"), restore, 1, 0},
		"fork": {nothing, func(n *sandboxtest.Node, id sandbox.ID) error {
			_, err := n.Manager.Fork(ctx, id, sandbox.ForkRequest{Count: 2})
			return err
		}, 0, 2},
		"archive": {nothing, func(n *sandboxtest.Node, id sandbox.ID) error {
			_, err := n.Manager.Archive(ctx, id, true, nil)
			return err
		}, 0, 0},
		"retrieval": {func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { archive(t, n, id) },
			func(n *sandboxtest.Node, id sandbox.ID) error {
				_, err := n.Manager.Wake(ctx, id)
				return err
			}, 0, 0},
	} {
		for state, enter := range map[sandbox.State]func(*testing.T, *sandboxtest.Node, sandbox.ID){sandbox.StateRunning: nothing, sandbox.StateStopped: stopped} {
			if name == "retrieval" && state == sandbox.StateRunning {
				enter, state = nothing, sandbox.StateArchived
			} else if name == "retrieval" {
				continue
			}
			t.Run(fmt.Sprintf("%s of a sandbox that is %s", name, state), func(t *testing.T) {
				t.Parallel()
				write := int64(1)
				for crashed := true; crashed; write++ {
					t.Run(fmt.Sprint("write ", write), func(t *testing.T) {
						n := sandboxtest.Open(t, nil)
						id := newDisk(t, n, "box")
						n.Engine.Write(id, "b", "2")
						c.prepare(t, n, id)
						enter(t, n, id)
						awaitCounts(t, n, func() bool { return false })
						_, err := n.Manager.Events(ctx, id, 0, 1) // earlier changes are written earlier
						testkit.NoError(t, "Events", err)
						died, revive := dieAt(n, write)
						err = c.operate(n, id)
						if crashed = died(); !crashed {
							testkit.NoError(t, name, err)
							awaitCounts(t, n, died)
							crashed = died()
						}
						n.Crash(t, revive)
						c.checkAfterCrash(t, n, id, err == nil)
					})
				}
				t.Logf("the node died at %d writes", write-2)
			})
		}
	}
}

// crashedOperation is an operation on a sandbox with the files a and b, which leaves snapshots and forks. The file a is
// 1 after it, and 2 before a restore.
type crashedOperation struct {
	prepare          func(*testing.T, *sandboxtest.Node, sandbox.ID)
	operate          func(*sandboxtest.Node, sandbox.ID) error
	snapshots, forks int
}

// checkAfterCrash checks a node that has died during the operation, and then removes all that is left.
func (c crashedOperation) checkAfterCrash(t *testing.T, n *sandboxtest.Node, id sandbox.ID, acknowledged bool) {
	t.Helper()
	never := func() bool { return false }
	awaitCounts(t, n, never)
	snapshots, _ := n.Manager.Snapshots(owner, "", "", 0)
	sandboxes, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0)
	if len(snapshots) > c.snapshots || len(sandboxes) != 1 && len(sandboxes) != 1+c.forks || acknowledged && len(snapshots)+len(sandboxes) != c.snapshots+1+c.forks {
		t.Errorf("%d snapshots and %d sandboxes are left; acknowledged: %t", len(snapshots), len(sandboxes), acknowledged)
	}
	for i, s := range snapshots {
		if !s.Partial() {
			sandboxes = append(sandboxes, createFrom(t, n, fmt.Sprint("copy-", i), string(s.ID)))
		}
	}
	for _, sb := range sandboxes {
		_, err := n.Manager.Wake(t.Context(), sb.ID)
		testkit.NoError(t, "Wake", err)
		want := map[string]string{"a": "1", "b": "2"}
		got := n.Engine.Files(sb.ID)
		if sb.ID == id && !acknowledged && len(snapshots) > 0 && got["a"] == "2" { // the restore has not begun
			want["a"] = "2"
		}
		testkit.Diff(t, "files of "+sb.Name, got, want)
	}
	awaitCounts(t, n, never)
	for _, s := range snapshots {
		testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	}
	for _, sb := range sandboxes {
		testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), sb.ID))
	}
	var left nodeCounts
	testkit.Eventually(t, "nothing is left", func() bool { left = countAll(t, n); return left == nodeCounts{} }, func() string { return fmt.Sprintf("%+v", left) })
}
