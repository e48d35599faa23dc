//go:build integration

package disk_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/disk/disktest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/diskstest"
	"github.com/doze-run/doze/testkit"
)

func TestDisksConform(t *testing.T) {
	diskstest.Run(t, func(t *testing.T) diskstest.System { return disktest.Open(t).System() })
}

// TestMoveDiscardsThePrefetchedCopy: a sandbox may be stopped after the first pass of its snapshot.
func TestMoveDiscardsThePrefetchedCopy(t *testing.T) {
	node := disktest.Open(t)
	engine, disks, spec := node.Engine, node.Disks, node.Spec
	ctx := testkit.Context(t)
	id, snapshot := sandbox.NewID(), sandbox.SnapshotID(sandbox.NewID())
	if err := engine.Create(ctx, spec(t, id)); err != nil {
		t.Fatal(err)
	}
	if err := disks.Prefetch(ctx, id, snapshot, nil); err != nil {
		t.Fatal(err)
	}
	if err := disks.Move(ctx, id, snapshot); err != nil {
		t.Fatal(err)
	}
	storage, err := engine.Storage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(storage.GraphRoot, "doze", "*.disks", "staging", string(snapshot)))
	if err != nil || len(left) > 0 {
		t.Errorf("%v; the copy is left: %s", err, left)
	}
	if err := engine.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := disks.Delete(ctx, snapshot); err != nil {
		t.Fatal(err)
	}
}

// TestSnapshotsSurviveRemovalsOfImages: an operator's `podman rmi` removes no snapshot.
func TestSnapshotsSurviveRemovalsOfImages(t *testing.T) {
	node := disktest.Open(t)
	engine, disks, spec := node.Engine, node.Disks, node.Spec
	ctx := testkit.Context(t)
	id, snapshot := sandbox.NewID(), sandbox.SnapshotID(sandbox.NewID())
	if err := engine.Create(ctx, spec(t, id)); err != nil {
		t.Fatal(err)
	}
	if err := disks.Move(ctx, id, snapshot); err != nil {
		t.Fatal(err)
	}
	if err := engine.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("podman", "rmi", sandbox.SnapshotRef(snapshot)).CombinedOutput(); err == nil {
		t.Errorf("podman rmi removed a snapshot: %s", out)
	}
	if out, err := exec.Command("podman", "image", "exists", sandbox.SnapshotRef(snapshot)).CombinedOutput(); err != nil {
		t.Errorf("the snapshot is gone: %v %s", err, out)
	}
	if err := disks.Delete(ctx, snapshot); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("podman", "ps", "-a", "--external", "--format", "{{.Names}}").Output(); err != nil || strings.Contains(string(out), string(snapshot)) {
		t.Errorf("%v; left: %s", err, out)
	}
}

// TestSnapshotsSurviveTheirImage: the image of a sandbox is built again under its name, and the old
// one is pruned, as images/build does it.
func TestSnapshotsSurviveTheirImage(t *testing.T) {
	node := disktest.Open(t)
	engine, disks, spec := node.Engine, node.Disks, node.Spec
	ctx := testkit.Context(t)
	run := func(script string) string {
		t.Helper()
		out, err := exec.CommandContext(ctx, "sh", "-ec", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	image := "localhost/doze/test-rebuilt:" + string(sandbox.NewID())
	build := func(version string) {
		t.Helper()
		dir := t.TempDir()
		run(fmt.Sprintf(`cd %s; mkdir -p etc tmp proc sys dev run srv; echo %s >etc/version; echo root:x:0:0::/: >etc/passwd
			tar -c . | podman import --quiet - %s`, dir, version, image))
	}
	t.Cleanup(func() { run("podman image prune --force; podman rmi " + image) })
	build("1")
	old := run("podman image inspect --format '{{.Id}}' " + image)
	first, second := sandbox.NewID(), sandbox.NewID()
	snapshots := []sandbox.SnapshotID{sandbox.SnapshotID(sandbox.NewID()), sandbox.SnapshotID(sandbox.NewID())}
	of := func(id sandbox.ID, ref string) sandbox.ContainerSpec {
		s := spec(t, id)
		s.ImageRef = ref
		return s
	}
	// The second snapshot is of a sandbox of the first one, which is deleted: only the second
	// needs the image then.
	for i, s := range []sandbox.ContainerSpec{of(first, image), of(second, sandbox.SnapshotRef(snapshots[0]))} {
		testkit.NoError(t, "create", engine.Create(ctx, s))
		disktest.Unshare(t, s.ID, `echo "$1" >"$root/srv/file"`, fmt.Sprint(i))
		testkit.NoError(t, "snapshot", disks.Move(ctx, s.ID, snapshots[i]))
		testkit.NoError(t, "remove", engine.Remove(ctx, s.ID))
	}
	build("2")
	run("podman image prune --force")
	check := func(snapshot sandbox.SnapshotID, want string) {
		t.Helper()
		id := sandbox.NewID()
		testkit.NoError(t, "create from the snapshot", engine.Create(ctx, of(id, sandbox.SnapshotRef(snapshot))))
		if got := disktest.Unshare(t, id, `cat "$root/etc/version" "$root/srv/file"`); got != want {
			t.Errorf("the snapshot has %q, want %q", got, want)
		}
		testkit.NoError(t, "remove", engine.Remove(ctx, id))
	}
	check(snapshots[0], "1\n0\n")
	testkit.NoError(t, "delete", disks.Delete(ctx, snapshots[0]))
	run("podman image prune --force")
	check(snapshots[1], "1\n1\n")
	testkit.NoError(t, "delete", disks.Delete(ctx, snapshots[1]))
	run("podman image prune --force; ! podman image exists " + old)
	if left := run("podman ps -a --external --format '{{.Names}}'"); strings.Contains(left, string(snapshots[0])) || strings.Contains(left, string(snapshots[1])) {
		t.Errorf("left: %s", left)
	}
}

// TestLongestChainOfSnapshots: the kernel mounts as many layers as a chain of snapshots has, and the next snapshot is flat.
func TestLongestChainOfSnapshots(t *testing.T) {
	f := &diskstest.Fixture{T: t, Ctx: testkit.Context(t), System: disktest.Open(t).System()}
	const longest = 64
	var last sandbox.SnapshotID
	want := map[string]string{}
	for depth := 1; depth <= longest; depth++ {
		id := f.Create(last)
		name := fmt.Sprint(depth)
		f.Write(t, id, name, name)
		want[name] = name
		last = f.Publish(id)
	}
	id := f.Create(last)
	testkit.Diff(t, "files on the longest chain", f.Files(t, id), want)
	flat := f.SnapshotID()
	_, err := f.Disks.Capture(f.Ctx, id, flat, nil)
	f.Must(err)
	f.Must(f.Disks.Publish(f.Ctx, id, flat, true))
	testkit.Diff(t, "files of the flat snapshot", f.Files(t, f.Create(flat)), want)
}
