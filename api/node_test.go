package api

import (
	"net/http"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestDiskUsageOfTheNode(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.create("blog")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	got := must[types.NodeDiskUsage](s, http.StatusOK, "GET", "/node/df?max_sandboxes=1", nil)
	one := types.DiskTotal{Count: 1, Bytes: 4096}
	if got.Sandboxes.Count != 2 || got.Snapshots != one || got.UnusedSnapshots != one || got.Bases != (types.DiskTotal{}) {
		t.Errorf("sums %+v", got)
	}
	if fs := got.FileSystems; len(fs) != 1 || fs[0].Path != "/disks" || fs[0].TotalBytes != 1<<40 || fs[0].ReserveBytes != 2<<30 {
		t.Errorf("file systems %+v", fs)
	}
	if list := got.LargestSandboxes; len(list) != 1 || list[0].Name != "blog" || list[0].State != types.StateRunning || list[0].LimitBytes == 0 || list[0].MeasuredAt.IsZero() {
		t.Errorf("sandboxes %+v", list)
	}
	must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "copy", "snapshot": "before"})
	if got := must[types.NodeDiskUsage](s, http.StatusOK, "GET", "/node/df", nil); got.UnusedSnapshots != (types.DiskTotal{}) || len(got.LargestSandboxes) != 3 {
		t.Errorf("with a sandbox of the snapshot %+v", got)
	}
	for _, query := range []string{"max_sandboxes=0", "max_sandboxes=1001", "limit=1"} {
		s.refused(problem.RequestInvalid, "GET", "/node/df?"+query, nil)
	}
}
