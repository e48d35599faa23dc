package sandbox_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/doze-run/doze/archive/ociimage/imagetest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestExportIsOfTheOwnersSnapshotAndWakesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "shop")
	stopped(t, n, id)
	named, unnamed := snapshotOf(t, n, id, "before"), snapshotOf(t, n, id, "")
	for nameOrID, want := range map[string]string{
		"before": "localhost/shop:before", string(named.ID): "localhost/shop:before", string(unnamed.ID): "localhost/shop:" + string(unnamed.ID),
	} {
		archive, err := n.Manager.ExportSnapshot(t.Context(), owner, nameOrID)
		if err != nil {
			t.Fatal(err)
		}
		image := imagetest.Read(t, archive)
		testkit.NoError(t, "close", archive.Close())
		if image.Names[0] != want || image.Files["srv/a"].Content != "1" {
			t.Errorf("%s: got %v with %q, want %s", nameOrID, image.Names, image.Files["srv/a"].Content, want)
		}
		if _, err := n.Manager.ExportSnapshot(t.Context(), "other", nameOrID); !errors.Is(err, sandbox.ErrSnapshotNotFound) {
			t.Errorf("%s of another owner: %v", nameOrID, err)
		}
	}
	if sb, _ := n.Manager.ByID(id); sb.State != sandbox.StateStopped {
		t.Errorf("the exports left the sandbox %s", sb.State)
	}
}

func TestDeletedSnapshotStaysUntilItsExportsEnd(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "shop")
	n.Engine.Write(id, "large", strings.Repeat("x", 1<<20))
	s := snapshotOf(t, n, id, "before")
	var archives []io.ReadCloser
	for range 2 {
		archive, err := n.Manager.ExportSnapshot(t.Context(), owner, "before")
		if err != nil {
			t.Fatal(err)
		}
		archives = append(archives, archive)
	}
	testkit.NoError(t, "delete", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	testkit.NoError(t, "close", archives[0].Close())
	if _, err := n.Manager.ExportSnapshot(t.Context(), owner, "before"); !errors.Is(err, sandbox.ErrSnapshotNotFound) {
		t.Errorf("export of a deleted snapshot: %v", err)
	}
	// Collects what is deleted, before it returns.
	other := snapshotOf(t, n, id, "other")
	n.Disks.Fail("publish", errors.New("it failed"))
	if _, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{}); err == nil {
		t.Fatal("the snapshot did not fail")
	}
	if got := n.Engine.Snapshots(); got != 2 {
		t.Errorf("%d snapshots have files, want the exported one and %s", got, other.ID)
	}
	if image := imagetest.Read(t, archives[1]); image.Files["srv/a"].Content != "1" {
		t.Errorf("the export has %q", image.Files["srv/a"].Content)
	}
	for range 2 {
		testkit.NoError(t, "close", archives[1].Close())
	}
	testkit.Eventually(t, "the files are deleted", func() bool { return n.Engine.Snapshots() == 1 })
}

func TestFailedExportReleasesTheSnapshot(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	s := snapshotOf(t, n, newDisk(t, n, "shop"), "before")
	failed := errors.New("it failed")
	n.Disks.Fail("export", failed)
	if _, err := n.Manager.ExportSnapshot(t.Context(), owner, "before"); !errors.Is(err, failed) {
		t.Errorf("got %v", err)
	}
	testkit.NoError(t, "delete", n.Manager.DeleteSnapshot(t.Context(), owner, s.ID))
	testkit.Eventually(t, "the files are deleted", func() bool { return n.Engine.Snapshots() == 0 })
}
