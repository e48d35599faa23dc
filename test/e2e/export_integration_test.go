//go:build integration

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

const (
	// changeImage hides files of the image in each way.
	changeImage = `rm /etc/adduser.conf && rm -r /usr/share/base-files && rm -r /usr/share/man && mkdir /usr/share/man && echo new >/usr/share/man/new
useradd --uid 4321 tester && su tester -c 'echo mine >/tmp/mine'`
	// describeExported prints what an image preserves of makeKinds and changeImage, and Podman on
	// import: no holes, and no times of folders with hard links. It leaves out the files that a start changes.
	describeExported = `cd /srv/kinds && find . -type d -printf '%P %y %m %U:%G\n' -o -printf '%P %y %m %U:%G %n %T@ %l\n' | sort
sha256sum $(find . -type f | sort)
python3 -c 'import os; print(os.getxattr("a/first", "user.note"))'
ls -d /etc/adduser.conf /usr/share/base-files /usr/share/doc 2>&1 || true
ls /usr/share/man; id tester; stat -c '%n %a %U:%G' / /tmp /tmp/mine /usr/bin/passwd
list() { find / -xdev -mindepth 1 "$@" \( -path /tmp -o -path /run -o -path /var/log -o -path /.doze -o -path /root -o -path /etc/ssl -o -path /etc/doze -o -path /usr/local/share/ca-certificates \) -prune -o -printf '%P %y %m %U:%G %l\n' | sort; }
list -maxdepth 3; list | sha256sum`
)

// changedSnapshot returns a snapshot of a changed snapshot of the base image, and what describeExported
// prints about it. Its sandbox is stopped.
func (n *node) changedSnapshot(t *testing.T) (s types.Snapshot, want string) {
	t.Helper()
	b := n.newBox(t)
	b.exec(makeKinds)
	base := b.snapshot(types.CreateSnapshotRequest{})
	b = n.newBoxOf(t, base.ID)
	b.exec(changeImage)
	want = b.exec(describeExported)
	s = b.snapshot(types.CreateSnapshotRequest{})
	b.stop()
	return s, want
}

// TestExportedSnapshotIsAnImageForAnotherNode: a sandbox of another node, created from the exported
// snapshot of a snapshot, has the same files.
func TestExportedSnapshotIsAnImageForAnotherNode(t *testing.T) {
	n := commonNode(t)
	s, want := n.changedSnapshot(t)

	push := func(to string) {
		t.Helper()
		if out, err := n.Command("snapshot", "push", s.ID, to).CombinedOutput(); err != nil {
			t.Fatalf("push %s: %v: %s", to, err, out)
		}
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	folder := filepath.Join(n.Home, "exported-"+s.ID) // Podman wants lower case
	t.Cleanup(func() { os.RemoveAll(folder) })
	push("oci-archive:" + archive)
	push("oci:" + folder)
	podman := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(n.podman(t, args...))
	}
	loaded := strings.TrimPrefix(podman("load", "--quiet", "--input", archive), "Loaded image: ")
	name := "localhost/test-imported:" + s.ID
	podman("tag", loaded, name)
	id := podman("image", "inspect", "--format", "{{.Id}}", name)
	t.Cleanup(func() { _ = exec.Command("podman", "rmi", "--force", id).Run() }) // its other names
	for _, same := range []string{"docker-archive:" + archive, "oci:" + folder} {
		if got := podman("pull", "--quiet", same); got != id {
			t.Errorf("%s has the image %s, want %s", same, got, id)
		}
	}
	n.expectLayersOfSnapshots(t, name)

	other := testnode.Start(t, testnode.Config{Caddyfile: caddyfile(t, "allow_images localhost/**")})
	sb, _, err := other.API.Create(testkit.Context(t), types.CreateSandboxRequest{Image: name})
	if err != nil {
		t.Fatal(err)
	}
	imported := (&node{Node: other}).boxOf(t, sb.ID)
	testkit.Diff(t, "imported", imported.exec(describeExported), want)
}

// expectLayersOfSnapshots checks that an image has the layers of the base image and of two snapshots.
func (n *node) expectLayersOfSnapshots(t *testing.T, name string) {
	t.Helper()
	list := func(name string) []string {
		return strings.Fields(n.podman(t, "image", "inspect", "--format", "{{range .RootFS.Layers}}{{.}} {{end}}", name))
	}
	layers, below := list(name), list("localhost/doze/base:latest")
	if len(layers) != len(below)+2 || layers[0] != below[0] {
		t.Errorf("layers %v, want %v and two snapshots'", layers, below)
	}
}

// exports counts the processes of exports.
func (n *node) exports() int {
	count := 0
	for _, pid := range n.children() {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.HasSuffix(command, []byte("doze-disk\x00export\x00")) {
			count++
		}
	}
	return count
}

// TestExportEndsWithItsClient: no files remain on the node or in the client's folder.
func TestExportEndsWithItsClient(t *testing.T) {
	n := ownNode(t)
	b := n.newBox(t)
	s := b.snapshot(types.CreateSnapshotRequest{})
	slow, file := n.Command("snapshot", "push", s.ID, "oci-archive:-"), n.Command("snapshot", "push", s.ID, "oci-archive:image.tar")
	out, err := slow.StdoutPipe() // unread
	b.must(err)
	defer out.Close()
	file.Dir = t.TempDir()
	for _, push := range []*exec.Cmd{slow, file} {
		b.must(push.Start())
	}
	testkit.Eventually(t, "both exports run", func() bool { return n.exports() == 2 })
	b.must(slow.Process.Kill())
	b.must(file.Process.Signal(syscall.SIGTERM))
	for _, push := range []*exec.Cmd{slow, file} {
		if err := push.Wait(); err == nil {
			t.Error("an interrupted push succeeded")
		}
	}
	testkit.Eventually(t, "the exports have ended", func() bool { return n.exports() == 0 })
	if left, err := os.ReadDir(file.Dir); err != nil || len(left) > 0 {
		t.Errorf("the client has left %v, %v", left, err)
	}
	id := strings.TrimSpace(n.podman(t, "inspect", "--format", `{{index .Config.Labels "doze.node"}}`, "doze-"+b.id))
	graph := strings.TrimSpace(n.podman(t, "info", "--format", "{{.Store.GraphRoot}}"))
	if left := n.podman(t, "unshare", "find", filepath.Join(graph, "doze", id+".disks"), "-mindepth", "2"); left != "" {
		t.Errorf("the node has left %s", left)
	}
}
