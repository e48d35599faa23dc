//go:build integration

package podman

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/enginetest"
	"github.com/doze-run/doze/testkit"
)

// baseImage is built by images/build.
const baseImage = "localhost/doze/base:latest"

// grace is how long first processes may take to end before they are killed.
const grace = time.Second

// commandTimeout bounds commands in sandboxes. It ends before testkit.Context.
const commandTimeout = testkit.Patience / 2

// limits of the tests' sandboxes.
var limits = sandbox.Limits{PIDs: 64}

// node is an engine with its own folders.
type node struct {
	*Engine
	dir string
}

// open starts an engine of a new node. It fails the test if containers are left.
func open(t testing.TB) *node {
	t.Helper()
	return openIn(t, t.TempDir(), string(sandbox.NewID()))
}

func openIn(t testing.TB, dir, id string) *node {
	t.Helper()
	return openWith(t, Config{Node: id, RunDir: dir})
}

func openWith(t testing.TB, cfg Config) *node {
	t.Helper()
	cfg.Socket = filepath.Join(cfg.RunDir, "none.sock") // the test does not use the user's own service
	cfg.Helper = helperProgram()
	cfg.Log = testkit.NewLog(t).Logger()
	e, err := Open(testkit.Context(t), cfg)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	n := &node{Engine: e, dir: cfg.RunDir}
	t.Cleanup(func() {
		select {
		case <-e.service.done: // the test has closed it
			return
		default:
		}
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		left, err := e.List(ctx)
		if err != nil || len(left) > 0 {
			t.Errorf("containers are left: %v, %v", left, err)
		}
		for _, c := range left {
			if err := e.Remove(ctx, c.ID); err != nil {
				t.Error(err)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// helperProgram is doze-netns.
func helperProgram() string { return filepath.Join(os.Getenv("DOZE_BIN"), "doze-netns") }

// spec returns the specification of a container with the test binary as its first process.
// Its cgroup is removed after the test.
func (n *node) spec(t testing.TB, id sandbox.ID) sandbox.ContainerSpec {
	t.Helper()
	spec := n.specIn(t, id, cgroup(t, id))
	t.Cleanup(func() { removeCgroup(t, spec.CgroupParent) })
	return spec
}

func (n *node) specIn(t testing.TB, id sandbox.ID, cgroupParent string) sandbox.ContainerSpec {
	t.Helper()
	run := filepath.Join(n.dir, string(id))
	if err := os.MkdirAll(run, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(run, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return sandbox.ContainerSpec{
		ID:           id,
		Name:         "engine-test",
		ImageRef:     baseImage,
		Env:          map[string]string{"DOZE_TEST_PROBE": "wait"},
		CgroupParent: cgroupParent,
		GuestBinary:  binary,
		RunDir:       run,
		New:          true,
	}
}

// cgroup creates the cgroup parent of a sandbox, as the Freezer does.
func cgroup(t testing.TB, id sandbox.ID) string {
	t.Helper()
	root := os.Getenv("DOZE_CGROUP")
	if root == "" {
		t.Fatal("DOZE_CGROUP is not set: run the test by packaging/host/enter")
	}
	dir := filepath.Join(root, "sandboxes", string(id))
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	return strings.TrimPrefix(dir, freezer.MountPoint)
}

// removeCgroup removes the cgroup parent of a sandbox that has ended.
func removeCgroup(t testing.TB, parent string) {
	t.Helper()
	testkit.Eventually(t, "the cgroup is empty", func() bool { return removeTree(freezer.MountPoint + parent) })
}

// removeTree removes a cgroup with those below it; false while one is in use.
func removeTree(dir string) bool {
	below, _ := filepath.Glob(dir + "/*/cgroup.procs")
	for _, procs := range below {
		removeTree(filepath.Dir(procs))
	}
	err := os.Remove(dir)
	return err == nil || errors.Is(err, os.ErrNotExist)
}

func TestEngineConformance(t *testing.T) {
	enginetest.Run(t, func(t *testing.T) enginetest.System {
		n := open(t)
		return enginetest.System{
			Engine:       n,
			Other:        open(t),
			Image:        baseImage,
			MissingImage: "localhost/doze/no-such-image:latest",
			Spec:         n.spec,
			Crash: func(t testing.TB, c sandbox.Container) {
				t.Helper()
				n.kill(t, c.PID)
			},
			MakeFile: func(t testing.TB, c sandbox.Container, dir string) {
				t.Helper()
				// Its root is user 1 of Podman's user namespace.
				err := unshared(t, "sh", "-c", `mkdir "$1/d" && touch "$1/d/f" && chown -R 1:1 "$1/d"`, "-", dir)
				if err != nil {
					t.Fatal(err)
				}
			},
			ProcessLimit: func(t testing.TB, c sandbox.Container) int64 {
				t.Helper()
				var own unix.Rlimit
				if err := unix.Prlimit(c.PID, unix.RLIMIT_NPROC, nil, &own); err != nil {
					t.Fatal(err)
				}
				return int64(own.Max)
			},
		}
	})
}

// kill ends a process of a sandbox, which belongs to a sub-id of the user.
func (n *node) kill(t testing.TB, pid int) {
	t.Helper()
	if err := unshared(t, "kill", "-KILL", itoa(pid)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the process is gone", func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}
