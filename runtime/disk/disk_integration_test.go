//go:build integration

package disk_test

import (
	"errors"
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

// TestPartialSnapshotsIncludeTheImage: a partial snapshot has what the image has at its paths, with the ids of containers, and
// nothing of what the sandbox deleted there.
func TestPartialSnapshotsIncludeTheImage(t *testing.T) {
	f := &diskstest.Fixture{T: t, Ctx: testkit.Context(t), System: disktest.Open(t).System()}
	// list describes the entries at paths, without the times of folders: Podman's copy of an image for the ids of containers
	// changes these.
	const list = `cd "$root"; export LC_ALL=C; for p in "$@"; do find ".$p" -printf '%p %y %m %U:%G %s %l\n' | sort; find ".$p" ! -type d -printf '%p %T@\n' | sort; find ".$p" -type f -exec sha256sum {} + | sort; done`
	first := f.Create("")
	disktest.Unshare(t, first, `cd "$root"
		rm etc/passwd; mkdir etc/passwd; echo 1 >etc/passwd/file; echo 1 >etc/passwd/other # a folder where the image has a file
		rm -r var/lib/dpkg/info; mkdir -p srv/app/sub opt/deep; chown 1001:1002 srv/app; chmod 2750 srv/app
		echo 1 >srv/app/a; ln srv/app/a srv/app/sub/b; ln -s a srv/app/link; chown -h 1003:1004 srv/app/link; mkfifo srv/app/fifo
		truncate -s 1M srv/app/sparse; echo 1 >srv/rest; echo 1 >opt/deep/file; chmod 4755 srv/app/a`)
	id := f.Create(f.Publish(first))
	disktest.Unshare(t, id, `cd "$root"; rm etc/group var/lib/dpkg/status; echo new >etc/new; echo 2 >srv/app/more; rm srv/app/sparse; chown 1005:1006 opt; chmod 711 opt`)
	paths := []string{"/etc/passwd/file", "/srv/app", "/usr/bin", "/var/lib/dpkg", "/opt/deep/file"}
	want := disktest.Unshare(t, id, list, paths...)
	above := disktest.Unshare(t, id, `cd "$root"; stat -c '%n %a %u:%g %Y' opt opt/deep etc/passwd`)
	part := f.Publish(id, paths...)
	f.Remove(first)

	created := f.Create(part)
	testkit.Diff(t, "the paths on the image", disktest.Unshare(t, created, list, paths...), want)
	testkit.Diff(t, "the folders that contain paths", disktest.Unshare(t, created, `cd "$root"; stat -c '%n %a %u:%g %Y' opt opt/deep etc/passwd`), above)
	if got := disktest.Unshare(t, created, `cd "$root"; ls -d etc/group etc/new srv/rest etc/passwd/* var/lib/dpkg/info var/lib/dpkg/status 2>/dev/null || true; stat -c %h srv/app/a`); got != "etc/group\netc/passwd/file\n2\n" {
		t.Errorf("the rest of the image's disk: %q", got)
	}

	other := f.Create("")
	disktest.Unshare(t, other, `cd "$root"; mkdir -p srv/app/more opt/deep var/lib/dpkg/own; chmod 700 opt; echo 3 >srv/app/more/x; echo 3 >opt/deep/rest; echo 3 >srv/rest; rm usr/bin/env; rm etc/passwd; mkdir etc/passwd; echo 3 >etc/passwd/rest`)
	below := f.Publish(other)
	snapshot := f.SnapshotID()
	_, err := f.Disks.Stage(f.Ctx, part, snapshot)
	f.Must(err)
	f.Must(f.Disks.Overlay(f.Ctx, snapshot, below, paths))
	restored := f.Create(snapshot)
	testkit.Diff(t, "the paths on another disk", disktest.Unshare(t, restored, list, paths...), want)
	if got := disktest.Unshare(t, restored, `cd "$root"; cat srv/rest opt/deep/rest etc/passwd/rest; stat -c '%a %u:%g' opt; ls etc/group`); got != "3\n3\n3\n700 1:1\netc/group\n" {
		t.Errorf("the rest of the other disk: %q", got)
	}

	// The image has a file where the paths need a folder.
	plain := f.Publish(f.Create(""))
	snapshot = f.SnapshotID()
	_, err = f.Disks.Stage(f.Ctx, part, snapshot)
	f.Must(err)
	if err := f.Disks.Overlay(f.Ctx, snapshot, plain, paths); !errors.Is(err, sandbox.ErrNotFolder) || !strings.Contains(err.Error(), `"/etc/passwd"`) {
		t.Errorf("a folder in place of a file: %v", err)
	}
}

// TestFilesOfPartialSnapshotsAreDeletedWithThem, also of failed ones.
func TestFilesOfPartialSnapshotsAreDeletedWithThem(t *testing.T) {
	node := disktest.Open(t)
	f := &diskstest.Fixture{T: t, Ctx: testkit.Context(t), System: node.System()}
	id := f.Create("")
	f.Write(t, id, "a", "1")
	for _, path := range []string{"/srv/a", "/srv/none"} {
		snapshot, staged := f.SnapshotID(), f.SnapshotID()
		_, err := f.Disks.Capture(f.Ctx, id, snapshot, []string{path})
		f.Must(err)
		if err := f.Disks.Publish(f.Ctx, id, snapshot, false); (err == nil) != (path == "/srv/a") {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := f.Disks.Stage(f.Ctx, snapshot, staged); (err == nil) != (path == "/srv/a") {
			t.Errorf("copy of %s: %v", path, err)
		}
		for _, s := range []sandbox.SnapshotID{snapshot, staged} {
			f.Must(f.Disks.Delete(f.Ctx, s))
			if out, err := exec.Command("podman", "image", "exists", sandbox.SnapshotRef(s)).CombinedOutput(); err == nil {
				t.Errorf("the image of %s is left: %s", path, out)
			}
		}
	}
	storage, err := node.Engine.Storage(f.Ctx)
	f.Must(err)
	left, err := filepath.Glob(filepath.Join(storage.GraphRoot, "doze", node.ID+".disks", "staging", "*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v; left: %s", err, left)
	}
}
