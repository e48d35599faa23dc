//go:build integration

package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/wire"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/networktest"
	"github.com/doze-run/doze/testkit"
)

// nodeVariable makes this test binary a node that only holds a Client.
const nodeVariable = "DOZE_TEST_NODE"

func TestMain(m *testing.M) {
	if id := os.Getenv(boxVariable); id != "" {
		boxMain(id)
	}
	if os.Getenv(nodeVariable) != "" {
		nodeMain()
	}
	// Podman's pause process must not be started in the cgroup of a sandbox.
	if out, err := exec.Command("podman", "unshare", "true").CombinedOutput(); err != nil {
		fmt.Printf("podman unshare: %v: %s\n", err, out)
		os.Exit(1)
	}
	testkit.Main(m)
}

func config() Config {
	return Config{
		Helper: filepath.Join(os.Getenv("DOZE_BIN"), "doze-netns"),
		Cgroup: strings.TrimPrefix(os.Getenv("DOZE_CGROUP"), "/sys/fs/cgroup") + "/sandboxes",
		Log:    slog.Default(),
	}
}

func open(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func (c *Client) helperPID(t testing.TB) int {
	t.Helper()
	h, err := c.helper(testkit.Context(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	return h.cmd.Process.Pid
}

func dial(t testing.TB, c *Client, id sandbox.ID, b *netBox, port uint16) net.Conn {
	t.Helper()
	conn, err := c.Dial(testkit.Context(t), id, b.PID(), port)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// greeted reads the server's first line.
func greeted(t testing.TB, conn net.Conn, want string) *bufio.Reader {
	t.Helper()
	in := bufio.NewReader(conn)
	if got, err := in.ReadString('\n'); err != nil || got != want {
		t.Fatalf("the greeting is %q, %v; want %q", got, err, want)
	}
	return in
}

// waitGone waits until the process has ended.
func waitGone(t testing.TB, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// Readable when it has ended, pidfd_open(2).
	if n, err := testkit.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, testkit.Patience); n != 1 || err != nil {
		t.Fatalf("process %d still runs: %v", pid, err)
	}
}

func TestConformance(t *testing.T) {
	networktest.Run(t, func(t *testing.T) networktest.System {
		return networktest.System{
			Network: open(t, config()),
			Start: func(t testing.TB, id sandbox.ID) networktest.Box {
				return startBox(t, id, namespaces...)
			},
		}
	})
}

// Dial refuses network namespaces that are not a sandbox's.
func TestOnlySandboxesAreReached(t *testing.T) {
	cfg := config()
	cfg.Cgroup = "" // which alone would refuse them all
	c := open(t, cfg)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	port := uint16(listener.Addr().(*net.TCPAddr).Port)
	privileged := startBox(t, "nsprivileged", "--net")
	privileged.Serve(t, "127.0.0.1", port)

	for _, test := range []struct {
		name   string
		pid    int
		status wire.Status
	}{
		{"the node", os.Getpid(), wire.StatusFailed}, // the helper may not read its files in /proc
		{"init", 1, wire.StatusFailed},
		{"Podman's user namespace", hostNetwork(t), wire.StatusRefused},
		{"Podman's user namespace with a network of its own", privileged.PID(), wire.StatusForeign},
		{"a helper", open(t, cfg).helperPID(t), wire.StatusForeign},
	} {
		t.Run(test.name, func(t *testing.T) {
			conn, err := c.Dial(testkit.Context(t), "sandbox00000", test.pid, port)
			if err == nil {
				conn.Close()
				t.Fatal("the dial succeeded")
			}
			var refused wire.Response
			if !errors.As(err, &refused) || refused.Status != test.status {
				t.Fatalf("%v is not a refusal of status %d", err, test.status)
			}
		})
	}
}

// hostNetwork starts a process that has Podman's user namespace and the host's
// network.
func hostNetwork(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("podman", "unshare", "sh", "-c", "echo $$; read end")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, readErr := bufio.NewReader(out).ReadString('\n')
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("it printed %q, %v", line, readErr)
	}
	return pid
}

// A reused pid, which now belongs to another sandbox, is refused.
func TestDialRefusesAProcessOfAnotherSandbox(t *testing.T) {
	c := open(t, config())
	other := startBox(t, "nsother00000", namespaces...)
	other.Serve(t, "127.0.0.1", 3000)
	conn, err := c.Dial(testkit.Context(t), "nsmine000000", other.PID(), 3000)
	if err == nil {
		conn.Close()
		t.Fatal("the dial reached the other sandbox")
	}
	var refused wire.Response
	if !errors.As(err, &refused) || refused.Status != wire.StatusRefused {
		t.Fatalf("%v is not a refusal", err)
	}
}

func TestConnectionsOutliveTheHelperAndItIsStartedAgain(t *testing.T) {
	const id = "nskilled0000"
	c := open(t, config())
	b := startBox(t, id, namespaces...)
	b.Serve(t, "127.0.0.1", 3000)
	for range 3 {
		conn := dial(t, c, id, b, 3000)
		in := greeted(t, conn, networktest.Greeting(id, "127.0.0.1", 3000))
		pid := c.helperPID(t)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		again := dial(t, c, id, b, 3000) // immediately, before the node may have noticed
		greeted(t, again, networktest.Greeting(id, "127.0.0.1", 3000))
		if _, err := fmt.Fprintln(conn, "still here"); err != nil {
			t.Fatal(err)
		}
		if line, err := in.ReadString('\n'); err != nil || line != "still here\n" {
			t.Fatalf("the earlier connection returned %q, %v", line, err)
		}
		waitGone(t, pid)
	}
}

func TestAHelperThatHangsIsReplaced(t *testing.T) {
	limit := responseLimit
	responseLimit = 100 * time.Millisecond
	defer func() { responseLimit = limit }()

	const id = "nsstopped000"
	c := open(t, config())
	defer c.Close() // before responseLimit is written again
	b := startBox(t, id, namespaces...)
	b.Serve(t, "127.0.0.1", 3000)
	ctx := testkit.Context(t)
	reached := func() { // the new helper, too, may take longer than responseLimit
		t.Helper()
		for {
			conn, err := c.Dial(ctx, id, b.PID(), 3000)
			if err == nil {
				defer conn.Close()
				greeted(t, conn, networktest.Greeting(id, "127.0.0.1", 3000))
				return
			}
			if ctx.Err() != nil {
				t.Fatal(err)
			}
		}
	}
	pid := c.helperPID(t)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	reached()
	waitGone(t, pid)

	// Also if no caller waits as long as that.
	pid = c.helperPID(t)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for syscall.Kill(pid, 0) == nil {
		short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		conn, err := c.Dial(short, id, b.PID(), 3000)
		cancel()
		if err == nil {
			conn.Close()
		}
		if ctx.Err() != nil {
			t.Fatalf("the helper that hangs still runs: %v", err)
		}
	}
	reached()
}

func TestHelperEndsWithClose(t *testing.T) {
	c := open(t, config())
	pid := c.helperPID(t)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	waitGone(t, pid)
	if _, err := c.Dial(testkit.Context(t), "sandbox00000", os.Getpid(), 80); !errors.Is(err, ErrClosed) {
		t.Fatalf("Dial after Close: %v", err)
	}
	c.Forget("sandbox00000")
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestHelperEndsWithAKilledNode(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	node := exec.Command(self)
	node.Env = append(os.Environ(), nodeVariable+"=yes", noRaceDelay)
	out, err := node.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	line, readErr := bufio.NewReader(out).ReadString('\n')
	if err := node.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = node.Wait()
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the node printed %q, %v", line, readErr)
	}
	waitGone(t, pid)
}

func nodeMain() {
	c, err := Open(config())
	if err != nil {
		panic(err)
	}
	h, err := c.helper(context.Background(), nil)
	if err != nil {
		panic(err)
	}
	fmt.Println(h.cmd.Process.Pid)
	select {} // until it is killed
}

func TestHelperUsesLittleMemory(t *testing.T) {
	const id = "nssmall00000"
	c := open(t, config())
	b := startBox(t, id, namespaces...)
	b.Serve(t, "127.0.0.1", 3000)
	for range 500 {
		conn, err := c.Dial(testkit.Context(t), id, b.PID(), 3000)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	pid := c.helperPID(t)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		value, ok := strings.CutPrefix(line, "VmRSS:")
		if !ok {
			continue
		}
		kB, err := strconv.Atoi(strings.Fields(value)[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("VmRSS %d kB", kB)
		if kB > 8<<10 {
			t.Errorf("the helper has %d kB in memory", kB)
		}
	}
}

func TestFailedStartOfTheHelperNamesItsCause(t *testing.T) {
	cfg := config()
	cfg.Helper = filepath.Join(t.TempDir(), "no-such-helper")
	c := open(t, cfg)
	_, err := c.Dial(testkit.Context(t), "sandbox00000", os.Getpid(), 80)
	if err == nil || !strings.Contains(err.Error(), "no-such-helper") {
		t.Fatalf("got %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	c = open(t, cfg)
	_, err = c.Dial(testkit.Context(t), "sandbox00000", os.Getpid(), 80)
	if err == nil || !strings.Contains(err.Error(), `"podman": executable file not found`) {
		t.Fatalf("got %v", err)
	}
}

func BenchmarkDial(b *testing.B) {
	const id = "nsbench00000"
	c := open(b, config())
	box := startBox(b, id, namespaces...)
	box.Serve(b, "127.0.0.1", 3000)
	box.Serve(b, "::1", 3001)
	for name, port := range map[string]uint16{"IPv4": 3000, "IPv6": 3001} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				conn, err := c.Dial(context.Background(), id, box.PID(), port)
				if err != nil {
					b.Fatal(err)
				}
				conn.Close()
			}
		})
	}
}
