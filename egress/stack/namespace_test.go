package stack

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
)

// insideVariable is set in a test that runs again as root of namespaces of its own,
// as which it may make network devices without any privilege outside.
const insideVariable = "DOZE_TEST_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(insideVariable) == "" {
		if inside := enterNamespaces(); inside != nil {
			os.Exit(inside.ExitCode())
		}
	}
	if os.Getenv(insideVariable) != "" {
		if err := loopbackUp(); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

// enterNamespaces runs the test in namespaces of its own; nil: the host allows none,
// and what needs a network device is skipped.
func enterNamespaces() *os.ProcessState {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=yes")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if cmd.Start() != nil {
		return nil
	}
	_ = cmd.Wait()
	return cmd.ProcessState
}

// kernel is the network namespace of a sandbox: a thread that does what it is told.
type kernel struct {
	do chan func()
}

// newKernel makes a network namespace with the device of a sandbox, and returns the
// device's other end.
func newKernel(t testing.TB) (*kernel, *os.File) {
	t.Helper()
	if os.Getenv(insideVariable) == "" {
		t.Fatal("this host allows no user namespaces, which doze needs: see `doze doctor`")
	}
	k := &kernel{do: make(chan func())}
	made := make(chan error)
	var fd int
	ended := make(chan struct{})
	go func() { // ends with the test, and its thread with it
		defer close(ended)
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			fd, err = tun.Make()
		}
		made <- err
		for f := range k.do {
			f()
		}
	}()
	t.Cleanup(func() { close(k.do); <-ended })
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	return k, os.NewFile(uintptr(fd), "tun")
}

// in runs f in the namespace. Sockets that it makes belong there for ever.
func (k *kernel) in(f func()) {
	done := make(chan struct{})
	k.do <- func() { defer close(done); f() }
	<-done
}

// dial dials from the namespace.
func (k *kernel) dial(network, address string) (conn net.Conn, err error) {
	k.in(func() {
		// The thread that makes the socket counts: no other goroutine may.
		d := net.Dialer{Timeout: patience, FallbackDelay: -1}
		conn, err = d.Dial(network, address)
	})
	if err != nil {
		return nil, fmt.Errorf("from the namespace: %w", err)
	}
	return conn, nil
}

// loopbackUp makes 127.0.0.1 usable in the namespace of the tests.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
