//go:build integration

package netns

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/networktest"
	"github.com/doze-run/doze/testkit"
)

// The test binary also runs in the sandboxes of the tests: it reads commands from its
// standard input until end of file.
//
//	serve IP PORT   networktest's server
//	stall PORT      a listener with a full backlog
//	device          checks the device against package link
//	dial IP:PORT    begins to dial
const boxVariable = "DOZE_TEST_BOX"

// The race detector delays the end of a process by a second.
const noRaceDelay = "GORACE=atexit_sleep_ms=0"

func boxMain(id string) {
	if err := tun.LoopbackUp(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(os.Getpid())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var err error
		switch words := strings.Fields(in.Text()); words[0] {
		case "serve":
			err = boxServe(sandbox.ID(id), words[1], words[2])
		case "stall":
			err = boxStall(words[1])
		case "device":
			err = boxDevice()
		case "dial":
			go func() { // ends with the process
				if conn, err := net.Dial("tcp", words[1]); err == nil {
					conn.Close()
				}
			}()
		default:
			err = fmt.Errorf("unknown command %q", words[0])
		}
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println("ok")
	}
	os.Exit(0)
}

func boxServe(id sandbox.ID, ip, port string) error {
	l, err := net.Listen("tcp", net.JoinHostPort(ip, port))
	if err != nil {
		return err
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	go func() { // ends with the process
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.WriteString(conn, networktest.Greeting(id, ip, uint16(number)))
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return nil
}

func boxStall(port string) error {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	_, err = stall(int(number)) // until the process ends
	return err
}

// netBox is a process in a network namespace that belongs to a user namespace below
// Podman's, in the cgroup of its sandbox, like the process of a container.
type netBox struct {
	t      testing.TB
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	pid    int
	cgroup string
	stop   sync.Once
}

// namespaces are the arguments of unshare(1) that make a sandbox of it.
var namespaces = []string{"--user", "--map-root-user", "--net"}

func startBox(t testing.TB, id sandbox.ID, namespaces ...string) *netBox {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &netBox{t: t, cgroup: filepath.Join(os.Getenv("DOZE_CGROUP"), "sandboxes", string(id))}
	if err := os.Mkdir(b.cgroup, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatalf("%v (run it by make test-integration)", err)
	}
	dir, err := os.Open(b.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	b.cmd = exec.Command("podman", append(append([]string{"unshare", "--", "unshare"}, namespaces...), "--", self)...)
	b.cmd.Env = append(os.Environ(), boxVariable+"="+string(id), noRaceDelay)
	b.cmd.Stderr = os.Stderr
	b.cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if b.in, err = b.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	b.out = bufio.NewReader(out)
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Stop)
	line := b.line(t)
	if b.pid, err = strconv.Atoi(line); err != nil {
		t.Fatalf("the sandbox did not start: %s", line)
	}
	return b
}

func (b *netBox) line(t testing.TB) string {
	t.Helper()
	line, err := b.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the sandbox ended: %v", err)
	}
	return strings.TrimSpace(line)
}

func (b *netBox) do(t testing.TB, command string) {
	t.Helper()
	if _, err := fmt.Fprintln(b.in, command); err != nil {
		t.Fatal(err)
	}
	if response := b.line(t); response != "ok" {
		t.Fatalf("%s: %s", command, response)
	}
}

func (b *netBox) PID() int { return b.pid }

func (b *netBox) Serve(t testing.TB, ip string, port uint16) {
	t.Helper()
	b.do(t, fmt.Sprintf("serve %s %d", ip, port))
}

func (b *netBox) Stall(t testing.TB, port uint16) {
	t.Helper()
	b.do(t, fmt.Sprintf("stall %d", port))
}

func (b *netBox) Stop() {
	b.stop.Do(func() {
		_ = b.in.Close()
		_ = b.cmd.Wait()
		// All its processes have ended, but the kernel may not have reaped them yet.
		var err error
		testkit.Eventually(b.t, "the cgroup is not busy", func() bool {
			err = unix.Rmdir(b.cgroup)
			return !errors.Is(err, unix.EBUSY)
		})
		if err != nil {
			b.t.Errorf("its cgroup remains: %v", err)
		}
	})
}
