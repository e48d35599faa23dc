package api

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/archive/ociimage/imagetest"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestSnapshotsThroughTheAPI(t *testing.T) {
	s := newServer(t, Limits{})
	must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "shop", "env": map[string]string{"A": "b"}})
	taken := must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before", "max_age": "1h", "quiesce": true})
	if taken.Name != "before" || taken.SandboxName != "shop" || taken.Image != "base" || taken.ExpiresAt.IsZero() {
		t.Errorf("snapshot %+v", taken)
	}
	s.refused(problem.SnapshotExists, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	s.refused(problem.NameInvalid, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "No"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/shop/snapshot", map[string]any{"keep_last": -1})
	for _, path := range []string{"/snapshots", "/sandbox/shop/snapshots"} {
		if list := must[types.SnapshotList](s, http.StatusOK, "GET", path, nil); len(list.Snapshots) != 1 || list.Snapshots[0].ID != taken.ID {
			t.Errorf("%s: %+v", path, list)
		}
	}
	if got := must[types.Snapshot](s, http.StatusOK, "GET", "/snapshots/before", nil); got.ID != taken.ID {
		t.Errorf("by name %+v", got)
	}
	copied := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "copy", "snapshot": "before"})
	if copied.Snapshot != taken.ID || copied.Env["A"] != "b" {
		t.Errorf("sandbox of the snapshot: %+v", copied)
	}
	restored := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"snapshot_id": "before"})
	if restored.State != types.StateRunning || restored.Snapshot != taken.ID {
		t.Errorf("restored %+v", restored)
	}
	forks := must[types.ForkList](s, http.StatusCreated, "POST", "/sandbox/shop/fork", map[string]any{"count": 2, "names": []string{"x", "y"}})
	if len(forks.Sandboxes) != 2 || forks.Sandboxes[1].Name != "y" {
		t.Errorf("forks %+v", forks)
	}
	s.refused(problem.SandboxConflict, "POST", "/sandbox/shop/fork", map[string]any{"count": 1, "names": []string{"x"}})
	if got := s.do("DELETE", "/snapshots/before", nil); got.status != http.StatusNoContent {
		t.Errorf("delete: %d %s", got.status, got.body)
	}
	for _, method := range []string{"GET", "DELETE"} {
		s.refused(problem.SnapshotNotFound, method, "/snapshots/before", nil)
	}
	s.refused(problem.SnapshotNotFound, "POST", "/sandbox/shop/restore", map[string]any{"snapshot_id": "before"})
	s.refused(problem.SnapshotNotFound, "POST", "/sandbox", map[string]any{"snapshot": "before"})
}

func TestSnapshotOfPathsNamesThem(t *testing.T) {
	s := newServer(t, Limits{})
	id := sandbox.ID(s.create("shop"))
	s.node.Engine.Write(id, "f", "content")
	s.node.Engine.Write(id, "g", "content")
	taken := must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "part", "paths": []string{"/srv/f"}})
	testkit.Diff(t, "the paths", taken.Paths, []string{"/srv/f"})
	if taken.Parent != "" || taken.SizeBytes == 0 || taken.Entries != 2 {
		t.Errorf("the snapshot is %+v", taken)
	}
	testkit.Diff(t, "the snapshot", must[types.Snapshot](s, http.StatusOK, "GET", "/snapshots/part", nil), taken)
	list := must[types.SnapshotList](s, http.StatusOK, "GET", "/sandbox/shop/snapshots", nil)
	testkit.Diff(t, "the list", list.Snapshots, []types.Snapshot{taken})
	s.node.Engine.Write(id, "f", "changed")
	s.node.Engine.Write(id, "g", "changed")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"snapshot_id": "part"})
	testkit.Diff(t, "the files", s.node.Engine.Files(id), map[string]string{"f": "content", "g": "changed"})
	created := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "copy", "snapshot": "part"})
	testkit.Diff(t, "the files of the new sandbox", s.node.Engine.Files(sandbox.ID(created.ID)), map[string]string{"f": "content"})
	whole := must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"paths": []string{}})
	if whole.Paths != nil {
		t.Errorf("a snapshot of the whole disk has the paths %q", whole.Paths)
	}
}

func TestBadPathsOfASnapshotAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.node.Engine.Write(sandbox.ID(s.create("shop")), "f", "content")
	for _, tc := range []struct{ body, location, says string }{
		{`{"paths":["srv"]}`, "body.paths[0]", "begin it with a slash, such as /srv/app"},
		{`{"paths":["/srv/f","/srv/none"]}`, "body.paths[1]", `"/srv/none" does not exist; name files and folders that exist`},
		{`{"paths":["/"]}`, "body.paths[0]", `"/" is the whole disk; leave paths out`},
		{`{"paths":[` + strings.Repeat(`"/a",`, 100) + `"/a"]}`, "body.paths", "100"},
		{`{"excludes":["a"]}`, "body.excludes", "the fields are keep_last, max_age, name, paths, quiesce"},
	} {
		p := s.refused(problem.RequestInvalid, "POST", "/sandbox/shop/snapshot", tc.body)
		if len(p.Errors) != 1 || p.Errors[0].Location != tc.location || !strings.Contains(p.Detail, tc.says) {
			t.Errorf("%s: %+v", tc.body, p)
		}
	}
	if list := must[types.SnapshotList](s, http.StatusOK, "GET", "/snapshots", nil); len(list.Snapshots) != 0 {
		t.Errorf("%d snapshots are left", len(list.Snapshots))
	}
}

func TestExportIsAnImage(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	got := s.do("GET", "/snapshots/before/export", nil)
	if got.status != http.StatusOK || got.header.Get("Content-Type") != ociimage.MediaType {
		t.Fatalf("%d, %v", got.status, got.header)
	}
	if image := imagetest.Read(t, bytes.NewReader(got.body)); image.Files["srv/f"].Content != "content" || image.Names[0] != "localhost/shop:before" {
		t.Errorf("image %+v", image)
	}
	if got := s.do("HEAD", "/snapshots/before/export", nil); got.status != http.StatusOK || len(got.body) > 0 {
		t.Errorf("HEAD: %d with %d bytes", got.status, len(got.body))
	}
	s.node.Disks.FailOnce("export", fmt.Errorf("%w: a file", sandbox.ErrUnexportable))
	s.refused(problem.SnapshotUnsupported, "GET", "/snapshots/before/export", nil)
	s.refused(problem.SnapshotNotFound, "GET", "/snapshots/after/export", nil)
}

// TestExportEndsWhenItsClientDisconnects: a running export counts against the limit and pins its snapshot's files.
func TestExportEndsWhenItsClientDisconnects(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", strings.Repeat("content", 4<<20)) // more than sockets buffer
	must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	var bodies []io.Closer
	for range maxOwnerExports {
		resp, err := s.http.Client().Do(s.request(t.Context(), "GET", "/snapshots/before/export", nil))
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v, %v", resp, err)
		}
		bodies = append(bodies, resp.Body)
	}
	s.refused(problem.ExportLimitExceeded, "GET", "/snapshots/before/export", nil)
	if got := s.do("DELETE", "/snapshots/before", nil); got.status != http.StatusNoContent {
		t.Errorf("deletion: %d", got.status)
	}
	for _, body := range bodies {
		body.Close()
	}
	s.eventually("the exports have ended, and the files are deleted", func() bool {
		total, _ := s.api.exports.used.Used()
		return total == 0 && s.node.Engine.Snapshots() == 0
	})
}
