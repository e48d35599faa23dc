//go:build integration

package e2e

import (
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
)

func (n *node) diskUsage(t *testing.T) types.NodeDiskUsage {
	t.Helper()
	usage, err := n.API.DiskUsage(testkit.Context(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	return usage
}

// TestDiskUsageFollowsTheFileOfASandbox: a file counts for its sandbox, then also for a snapshot, and then for
// the base of another sandbox.
func TestDiskUsageFollowsTheFileOfASandbox(t *testing.T) {
	const fileBytes = 50 << 20
	holds := func(bytes int64) bool { return bytes >= fileBytes && bytes < fileBytes+14<<20 }
	n := limitedNode(t)
	b := n.newBox(t, small)
	if got := n.diskUsage(t); got.Sandboxes.Count != 1 || got.Sandboxes.Bytes >= fileBytes || got.Snapshots.Count+got.Bases.Count != 0 || got.StoreBytes == 0 || got.BackupCacheBytes != 0 {
		t.Errorf("at the beginning: %+v", got)
	}
	b.exec("dd if=/dev/zero of=/srv/file bs=1M count=50 conv=fsync 2>&1")
	testkit.Eventually(t, "the sandbox is measured", func() bool {
		b.exec("dd if=/dev/zero of=/srv/other bs=1M count=8 conv=fsync 2>&1; rm /srv/other") // until it may exceed its limit
		return holds(n.diskUsage(t).Sandboxes.Bytes)
	})
	got := n.diskUsage(t)
	if d := got.LargestSandboxes[0]; d.ID != b.id || d.State != types.StateRunning || !holds(d.DiskBytes) || d.FreedBytes != d.DiskBytes || d.LimitBytes != 64<<20 || d.MeasuredAt.IsZero() {
		t.Errorf("the sandbox: %+v", d)
	}
	if f := got.FileSystems[0]; f.TotalBytes == 0 || f.UsedBytes < fileBytes || f.UsedBytes+f.FreeBytes > f.TotalBytes || f.OtherBytes >= f.UsedBytes || f.ReserveBytes == 0 {
		t.Errorf("the file system: %+v", f)
	}

	s := b.snapshot(types.CreateSnapshotRequest{})
	if got := n.diskUsage(t); got.Snapshots != (types.DiskTotal{Count: 1, Bytes: s.SizeBytes}) || !holds(s.SizeBytes) || got.UnusedSnapshots != got.Snapshots {
		t.Errorf("with a snapshot of %d bytes: %+v", s.SizeBytes, got)
	}
	copied := n.newBoxOf(t, s.ID)
	if got := n.diskUsage(t); got.UnusedSnapshots != (types.DiskTotal{}) || got.Snapshots.Count != 1 || got.Sandboxes.Count != 2 {
		t.Errorf("with a sandbox of the snapshot: %+v", got)
	}
	b.must(n.API.DeleteSnapshot(testkit.Context(t), s.ID))
	b.must(n.API.Delete(testkit.Context(t), b.id))
	got = n.diskUsage(t)
	if d := got.LargestSandboxes[0]; got.Snapshots != (types.DiskTotal{}) || got.Bases != (types.DiskTotal{Count: 1, Bytes: s.SizeBytes}) || d.ID != copied.id || d.FreedBytes != d.DiskBytes+s.SizeBytes {
		t.Errorf("after the deletion of both: %+v", got)
	}
	b.must(n.API.Delete(testkit.Context(t), copied.id))
	testkit.Eventually(t, "the base is removed", func() bool { got := n.diskUsage(t); return got.Bases.Count == 0 && got.Sandboxes.Count == 0 })
}
