//go:build integration

package podman

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// ownStorage is a Podman with its own folders, so that a test may change them like a reboot.
type ownStorage struct {
	command  string // path of a script that runs podman
	volatile string // folder in place of a tmpfs, which a reboot empties
}

func newStorage(t *testing.T) ownStorage {
	t.Helper()
	dir, err := os.MkdirTemp("", "doze") // Podman wants paths under 50 bytes here
	if err != nil {
		t.Fatal(err)
	}
	s := ownStorage{command: filepath.Join(dir, "podman"), volatile: filepath.Join(dir, "v")}
	// In shared memory, it would use the locks of the user's own containers.
	if err := os.WriteFile(filepath.Join(dir, "containers.conf"), []byte("[engine]\nlock_type = \"file\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nCONTAINERS_CONF=%s/containers.conf exec podman --root %s/root --runroot %s/run --tmpdir %s/tmp \"$@\"\n",
		dir, dir, s.volatile, s.volatile)
	if err := os.WriteFile(s.command, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the files belong to sub-ids
		// conmon starts a podman that cleans up after each container, with a delay.
		testkit.Eventually(t, "no process uses the storage", func() bool { return !inUse(t, dir) })
		if err := unshared(t, "sh", "-c", fmt.Sprintf("umount -l %s/root/overlay; rm -rf %s", dir, dir)); err != nil {
			t.Error(err)
		}
	})
	return s
}

// inUse reports whether a process has the folder in its arguments.
func inUse(t testing.TB, folder string) bool {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		if arguments, err := os.ReadFile(path); err == nil && strings.Contains(string(arguments), folder+"/") {
			return true
		}
	}
	return false
}

// copyImage copies an image from the user's storage.
func (s ownStorage) copyImage(t *testing.T, image string) {
	t.Helper()
	save := exec.Command("podman", "save", "--quiet", image)
	load := exec.Command(s.command, "load", "--quiet")
	var err error
	if load.Stdin, err = save.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := save.Start(); err != nil {
		t.Fatal(err)
	}
	if out, err := load.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := save.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestContainerStartsAfterAReboot(t *testing.T) {
	const image = "localhost/doze/test-musl:latest"
	s := newStorage(t)
	s.copyImage(t, image)
	n := openWith(t, Config{Node: string(sandbox.NewID()), RunDir: t.TempDir(), Command: s.command})
	b := n.boot(t, image)
	b.must("echo kept >/file")
	data, err := n.inspect(testkit.Context(t), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(data.State.ConmonPid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.kill(t, b.PID)
	reboot := fmt.Sprintf("umount -l %s; rm -rf %s", data.GraphDriver.Data["MergedDir"], s.volatile)
	if err := unshared(t, "sh", "-c", reboot); err != nil {
		t.Fatal(err)
	}
	n.killService(t)
	c, err := n.Inspect(testkit.Context(t), b.ID)
	if err != nil || c.State != sandbox.ContainerExited && c.State != sandbox.ContainerCreated || c.PID != 0 {
		t.Errorf("Inspect: %+v, %v", c, err)
	}
	b.start()
	if out := b.must("cat /file"); out != "kept" {
		t.Errorf("its file has %q", out)
	}
}

func TestCreateLeavesAnotherNodesContainerAlone(t *testing.T) {
	n, other := open(t), open(t)
	b := n.boot(t, baseImage)
	if err := other.Create(testkit.Context(t), b.spec); err == nil || !strings.Contains(err.Error(), "another node") {
		t.Errorf("Create: %v", err)
	}
	if c, err := n.Inspect(testkit.Context(t), b.ID); err != nil || c != b.Container {
		t.Errorf("Inspect: %+v, %v", c, err)
	}
}

func TestContainerThatNeverStartedHasNoLog(t *testing.T) {
	n := open(t)
	spec := n.spec(t, sandbox.NewID())
	ctx := testkit.Context(t)
	if err := n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	defer n.Remove(ctx, spec.ID)
	if line, err := n.LastLog(ctx, spec.ID); err != nil || line != "" {
		t.Errorf("LastLog: %q, %v", line, err)
	}
	if _, err := n.LastLog(ctx, sandbox.NewID()); !errors.Is(err, sandbox.ErrNoContainer) {
		t.Errorf("LastLog of an unknown one: %v", err)
	}
}
