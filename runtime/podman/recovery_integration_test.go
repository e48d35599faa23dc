//go:build integration

package podman

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/runtime/store/storetest"
	"github.com/doze-run/doze/testkit"
)

// servicePID returns the pid of the engine's service.
func (n *node) servicePID(t testing.TB) int {
	t.Helper()
	p, err := listener(n.service.own)
	if err != nil {
		t.Fatal(err)
	}
	return p.Pid
}

// killService kills the service like a crash, and does not wait for its end.
func (n *node) killService(t testing.TB) {
	t.Helper()
	if err := syscall.Kill(n.servicePID(t), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestKilledServiceIsRestartedWithoutHarmToContainers(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	b.must("echo kept >/root/file")
	for range 3 {
		n.killService(t)
		// The call that finds no service waits for the next one.
		c, err := n.Inspect(testkit.Context(t), b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if c != b.Container {
			t.Fatalf("the container was %+v and is %+v", b.Container, c)
		}
		if out := b.must("cat /root/file"); out != "kept" {
			t.Fatalf("its file has %q", out)
		}
	}
}

func TestServiceKilledDuringCallsLosesNothing(t *testing.T) {
	n := open(t)
	for range 4 {
		spec := n.spec(t, sandbox.NewID())
		done := make(chan error, 1)
		go func() { // ends with the calls
			err := n.Create(t.Context(), spec)
			if err == nil {
				_, err = n.Start(t.Context(), spec.ID, limits)
			}
			done <- err
		}()
		n.killService(t)
		if err := <-done; err != nil && !errors.Is(err, sandbox.ErrEngineDown) {
			t.Errorf("during the kill: %v", err)
		}
		// The next attempt succeeds, even after an incomplete creation.
		ctx := testkit.Context(t)
		if err := n.Create(ctx, spec); err != nil {
			t.Fatal(err)
		}
		if c, err := n.Start(ctx, spec.ID, limits); err != nil || c.State != sandbox.ContainerRunning {
			t.Fatalf("%+v, %v", c, err)
		}
		if err := n.Remove(ctx, spec.ID); err != nil {
			t.Fatal(err)
		}
	}
}

func TestServiceThatCannotBeRestartedIsReported(t *testing.T) {
	command, err := exec.LookPath("podman")
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "podman")
	if err := os.Symlink(command, link); err != nil {
		t.Fatal(err)
	}
	n := openWith(t, Config{Node: string(sandbox.NewID()), RunDir: t.TempDir(), Command: link})
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	n.killService(t)
	if err := n.Ping(testkit.Context(t)); !errors.Is(err, sandbox.ErrEngineDown) {
		t.Errorf("Ping: %v, want ErrEngineDown", err)
	} else if !strings.Contains(err.Error(), link) {
		t.Errorf("the error does not name its cause: %v", err)
	}
	if err := os.Symlink(command, link); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the service is back", func() bool { return n.Ping(testkit.Context(t)) == nil })
}

func TestServiceOfAKilledNodeIsUsedByTheNext(t *testing.T) {
	dir := t.TempDir()
	victim := exec.Command(os.Args[0])
	victim.Env = append(os.Environ(), "DOZE_TEST_NODE="+dir)
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "podman.sock")
	var before int
	testkit.Eventually(t, "the first node's service listens", func() (ok bool) {
		p, err := listener(socket)
		if err == nil {
			before = p.Pid
		}
		return err == nil
	})
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = victim.Wait()
	n := openIn(t, dir, string(sandbox.NewID()))
	if now := n.servicePID(t); now != before {
		t.Errorf("the service was process %d and is %d", before, now)
	}
	// It survives writing to its log, and ends with the node.
	spec := n.spec(t, sandbox.NewID())
	spec.ImageRef = "localhost/doze/no-such-image:latest"
	if err := n.Create(testkit.Context(t), spec); !errors.Is(err, sandbox.ErrImageMissing) {
		t.Errorf("Create: %v, want ErrImageMissing", err)
	}
	if now := n.servicePID(t); now != before {
		t.Errorf("the service was process %d and is %d", before, now)
	}
}

func TestServiceEndsWithTheEngine(t *testing.T) {
	n := open(t)
	pid := n.servicePID(t)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the service still runs: %v", err)
	}
	if err := n.Ping(testkit.Context(t)); !errors.Is(err, sandbox.ErrEngineDown) {
		t.Errorf("Ping after Close: %v", err)
	}
}

func TestContainerWhoseConmonWasKilled(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	data, err := n.inspect(testkit.Context(t), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(data.State.ConmonPid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if out := b.must("echo alive"); out != "alive" {
		t.Errorf("after its conmon: %q", out)
	}
	n.kill(t, b.PID) // without conmon, Podman does not notice
	c, err := n.Inspect(testkit.Context(t), b.ID)
	if err != nil || c.State != sandbox.ContainerExited || c.PID != 0 {
		t.Errorf("Inspect: %+v, %v", c, err)
	}
	b.start()
	if c, err := n.Inspect(testkit.Context(t), b.ID); err != nil || c.PID != b.PID {
		t.Errorf("Inspect: %+v, %v; Start returned %+v", c, err, b.Container)
	}
}

// A service that was killed during a start leaves such a container, whose processes the node kills.
func TestStartOfAnInitializedContainerWhoseProcessesWereKilled(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	ctx := testkit.Context(t)
	testkit.NoError(t, "stop", n.Engine.Stop(ctx, b.ID, 0))
	if out, err := exec.Command("podman", "init", ContainerName(b.ID)).CombinedOutput(); err != nil {
		t.Fatalf("podman init: %v: %s", err, out)
	}
	data, err := n.inspect(ctx, b.ID)
	testkit.NoError(t, "inspect", err)
	testkit.NoError(t, "kill conmon", syscall.Kill(data.State.ConmonPid, syscall.SIGKILL))
	n.kill(t, data.State.Pid)
	b.start()
	if out := b.must("echo alive"); out != "alive" {
		t.Errorf("after the start: %q", out)
	}
}

// A service that was killed after the OCI runtime had started the first process, and before it recorded that, leaves such a container.
func TestInitializedContainerThatRunsIsStartedAgain(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	ctx := testkit.Context(t)
	startUnrecorded := func() int {
		t.Helper()
		testkit.NoError(t, "stop", n.Engine.Stop(ctx, b.ID, 0))
		if out, err := exec.Command("podman", "init", ContainerName(b.ID)).CombinedOutput(); err != nil {
			t.Fatalf("podman init: %v: %s", err, out)
		}
		data, err := n.inspect(ctx, b.ID)
		testkit.NoError(t, "inspect", err)
		testkit.NoError(t, "start by the OCI runtime", unshared(t, data.OCIRuntime, "start", data.ID))
		data, err = n.inspect(ctx, b.ID)
		testkit.NoError(t, "inspect", err)
		testkit.Diff(t, "the recorded state", data.State.Status, initialized)
		return data.State.Pid
	}
	first := startUnrecorded()
	b.start()
	if out := b.must("echo alive"); out != "alive" {
		t.Errorf("after the start: %q", out)
	}
	testkit.Diff(t, "the unrecorded process is alive", testkit.Alive(first), false)

	first = startUnrecorded()
	testkit.NoError(t, "stop", n.Engine.Stop(ctx, b.ID, 0))
	testkit.Eventually(t, "the unrecorded process is gone", func() bool { return !testkit.Alive(first) })

	first = startUnrecorded()
	testkit.NoError(t, "remove", n.Remove(ctx, b.ID))
	testkit.Eventually(t, "the unrecorded process is gone", func() bool { return !testkit.Alive(first) })
}

func TestRemoveWorksWithoutConmon(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	data, err := n.inspect(testkit.Context(t), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(data.State.ConmonPid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(testkit.Context(t), b.ID); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the process is gone", func() bool {
		first, err := isFirstProcess(b.PID, data.ID)
		return err == nil && !first
	})
}

func TestRemoveWorksOnAFrozenSandbox(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	freeze := filepath.Join(freezer.MountPoint, b.spec.CgroupParent, "cgroup.freeze")
	if err := os.WriteFile(freeze, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	events := filepath.Join(filepath.Dir(freeze), "cgroup.events")
	testkit.Eventually(t, "the sandbox is frozen", func() bool {
		data, err := os.ReadFile(events)
		return err == nil && strings.Contains(string(data), "frozen 1")
	})
	if c, err := n.Inspect(testkit.Context(t), b.ID); err != nil || c != b.Container {
		t.Errorf("Inspect: %+v, %v", c, err)
	}
	if err := n.Remove(testkit.Context(t), b.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Inspect(testkit.Context(t), b.ID); !errors.Is(err, sandbox.ErrNoContainer) {
		t.Errorf("Inspect after Remove: %v", err)
	}
}

func TestDiskOutlivesStopCrashAndStart(t *testing.T) {
	n := open(t)
	b := n.boot(t, baseImage)
	b.must("echo one >/root/a && chown 1000:1000 /root/a")
	if err := n.Stop(testkit.Context(t), b.ID, grace); err != nil {
		t.Fatal(err)
	}
	b.start()
	b.must("echo two >/root/b")
	n.kill(t, b.PID)
	b.start()
	if out := b.must("cat /root/a /root/b; stat -c %u /root/a"); out != "one\ntwo\n1000" {
		t.Errorf("its files have %q", out)
	}
}

func TestFailedFirstProcessIsReportedWithItsLastOutput(t *testing.T) {
	n := open(t)
	spec := n.spec(t, sandbox.NewID())
	spec.Env = map[string]string{"DOZE_TEST_PROBE": "fail"}
	if err := n.Create(testkit.Context(t), spec); err != nil {
		t.Fatal(err)
	}
	defer n.Remove(testkit.Context(t), spec.ID)
	_, err := n.Start(testkit.Context(t), spec.ID, limits)
	if err != nil && !strings.Contains(err.Error(), "last words") {
		t.Errorf("Start: %v", err)
	}
	testkit.Eventually(t, "the exit is seen", func() bool {
		c, err := n.Inspect(testkit.Context(t), spec.ID)
		return err == nil && c.State == sandbox.ContainerExited && c.ExitCode == 7
	})
	if line, err := n.LastLog(testkit.Context(t), spec.ID); err != nil || line != "last words" {
		t.Errorf("LastLog: %q, %v", line, err)
	}
}

func TestStartReportsAMissingCgroupSubtree(t *testing.T) {
	n := open(t)
	spec := n.specIn(t, sandbox.NewID(), "/another-node-of-this-host/sandboxes/x")
	ctx := testkit.Context(t)
	if err := n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := n.Remove(testkit.Context(t), spec.ID); err != nil {
			t.Error(err)
		}
	}()
	_, err := n.Start(ctx, spec.ID, limits)
	if err == nil || !strings.Contains(err.Error(), "it was created for the cgroup /sys/fs/cgroup/another-node-of-this-host/sandboxes/x") {
		t.Fatalf("Start: %v", err)
	}
	t.Log(err)
}

// The node's user may not enter a folder that the sandbox's root created, and os.RemoveAll
// needs a descriptor for each level.
func TestDestroyRemovesFilesThatTheSandboxCreatedInItsRunFolder(t *testing.T) {
	n := open(t)
	cfg := sandbox.DefaultConfig()
	cfg.RunDir, cfg.GuestBinary = n.dir, guestBinary(t)
	cfg.Images.Names = map[string]string{"base": baseImage}
	m, err := sandbox.New(cfg, sandbox.Deps{Engine: n, Disks: sandboxtest.NewEngine(t).Disks(), Freezer: NewPauser(n.Engine),
		Network: sandboxtest.NewNetwork(), Store: storetest.New(t), Creations: t.TempDir(), Origins: t.TempDir(), Log: n.log})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close(testkit.Context(t))
	if err := m.Start(testkit.Context(t), sandboxtest.NewUplink(t)); err != nil {
		t.Fatal(err)
	}
	sb, _, err := m.Create(testkit.Context(t), sandbox.CreateRequest{Owner: "o", Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	run := filepath.Join(n.dir, string(sb.ID))
	b := &box{t: t, n: n, guest: guest.NewClient(filepath.Join(run, guest.SocketName))}
	defer b.guest.Close()
	b.must("mkdir -m 0700 /.doze/run/d && touch /.doze/run/d/f")
	b.must(`cd /.doze/run && python3 -c 'import os
for level in range(5000):
    os.mkdir("deep")
    os.chdir("deep")
'`)
	if err := m.Destroy(testkit.Context(t), sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(run); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its run folder still exists: %v", err)
	}
}

func TestStopKillsAProcessThatIgnoresSignals(t *testing.T) {
	n := open(t)
	spec := n.spec(t, sandbox.NewID())
	spec.Env = map[string]string{"DOZE_TEST_PROBE": "deaf"}
	ctx := testkit.Context(t)
	if err := n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	defer n.Remove(ctx, spec.ID)
	if _, err := n.Start(ctx, spec.ID, limits); err != nil {
		t.Fatal(err)
	}
	if err := n.Stop(ctx, spec.ID, 0); err != nil {
		t.Fatal(err)
	}
	if c, err := n.Inspect(ctx, spec.ID); err != nil || c.State != sandbox.ContainerExited {
		t.Errorf("Inspect: %+v, %v", c, err)
	}
}

func TestManySandboxesStartConcurrently(t *testing.T) {
	n := open(t)
	var group sync.WaitGroup
	for range 10 {
		b := n.spec(t, sandbox.NewID())
		t.Cleanup(func() { n.Remove(testkit.Context(t), b.ID) })
		group.Go(func() {
			if err := n.Create(t.Context(), b); err != nil {
				t.Error(err)
			} else if _, err := n.Start(t.Context(), b.ID, limits); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}
