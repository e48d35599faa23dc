// Package disktest provides real disks on Podman's storage for integration tests. The programs are in $DOZE_BIN.
package disktest

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/disk"
	"github.com/doze-run/doze/runtime/podman"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/diskstest"
	"github.com/doze-run/doze/testkit"
)

// BaseImage is built by images/build.
const BaseImage = "localhost/doze/base:latest"

// Program returns the path of a program under test.
func Program(name string) string { return filepath.Join(os.Getenv("DOZE_BIN"), name) }

// Unshare runs a shell script in Podman's user namespace, and returns its output. $root is the mounted root of the
// container, and args are the positional parameters.
func Unshare(t testing.TB, id sandbox.ID, script string, args ...string) string {
	t.Helper()
	return unshare(t, id, "", script, args...)
}

func unshare(t testing.TB, id sandbox.ID, input, script string, args ...string) string {
	t.Helper()
	name := podman.ContainerName(id)
	script = fmt.Sprintf("set -e; root=$(podman mount %s); trap 'podman umount %[1]s >/dev/null' EXIT; %s", name, script)
	cmd := exec.Command("podman", append([]string{"unshare", "sh", "-c", script, "sh"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stdin = strings.NewReader(input)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, stderr.Bytes())
	}
	return string(out)
}

// Node is a node's engine with its disks.
type Node struct {
	ID     string
	Engine *podman.Engine
	Disks  *disk.Client
	dir    string
}

// Open returns a new node. Its disks are removed at the end of the test.
func Open(t testing.TB) *Node {
	t.Helper()
	n := &Node{ID: string(sandbox.NewID()), dir: t.TempDir()}
	log := slog.New(slog.DiscardHandler)
	engine, err := podman.Open(testkit.Context(t), podman.Config{Node: n.ID, RunDir: n.dir, Helper: Program("doze-netns"), Log: log})
	testkit.NoError(t, "open Podman", err)
	n.Engine = engine
	t.Cleanup(func() {
		if err := engine.Close(); err != nil {
			t.Error(err)
		}
	})
	storage, err := engine.Storage(testkit.Context(t))
	testkit.NoError(t, "read the storage", err)
	folder := filepath.Join(storage.GraphRoot, "doze", n.ID+".disks")
	n.Disks = disk.New(disk.Config{
		Helper: Program("doze-disk"), NetnsHelper: Program("doze-netns"), Storage: storage, Folder: folder, Run: n.dir, Node: n.ID, Log: log,
	})
	t.Cleanup(func() {
		if err := n.Disks.Close(); err != nil {
			t.Error(err)
		}
		if out, err := exec.Command("podman", "unshare", "rm", "-rf", folder).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	return n
}

// Spec describes a new container of BaseImage, and creates its run folder.
func (n *Node) Spec(t testing.TB, id sandbox.ID) sandbox.ContainerSpec {
	t.Helper()
	run := filepath.Join(n.dir, string(id))
	testkit.NoError(t, "make the run folder", errors.Join(os.Mkdir(run, 0o777), os.Chmod(run, 0o777)))
	return sandbox.ContainerSpec{ID: id, ImageRef: BaseImage, GuestBinary: Program("doze-guest"), RunDir: run, New: true}
}

// Create creates a container of an image. The container is removed at the end of the test.
func (n *Node) Create(t testing.TB, image string) sandbox.ID {
	t.Helper()
	id := sandbox.NewID()
	spec := n.Spec(t, id)
	spec.ImageRef = image
	testkit.NoError(t, "create", n.Engine.Create(testkit.Context(t), spec))
	t.Cleanup(func() { n.Remove(t, id) })
	return id
}

// Remove removes a container. Idempotent.
func (n *Node) Remove(t testing.TB, id sandbox.ID) {
	t.Helper()
	testkit.NoError(t, "remove", n.Engine.Remove(testkit.Context(t), id))
}

// System returns the node for the conformance suite.
func (n *Node) System() diskstest.System {
	return diskstest.System{
		Engine: n.Engine, Disks: n.Disks, Spec: n.Spec,
		Write: func(t testing.TB, id sandbox.ID, name, content string) {
			t.Helper()
			unshare(t, id, content, `cat >"$root/srv/$1"`, name)
		},
		DeleteFile: func(t testing.TB, id sandbox.ID, name string) {
			t.Helper()
			Unshare(t, id, `rm "$root/srv/$1"`, name)
		},
		Files: func(t testing.TB, id sandbox.ID) map[string]string {
			t.Helper()
			files := map[string]string{}
			for line := range strings.Lines(Unshare(t, id, `cd "$root/srv" && for f in *; do [ ! -f "$f" ] || echo "$f=$(cat "$f")"; done`)) {
				name, content, _ := strings.Cut(strings.TrimSpace(line), "=")
				files[name] = content
			}
			return files
		},
	}
}
