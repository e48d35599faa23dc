package stack

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
	"github.com/doze-run/doze/runtime/netns/tun/tuntest"
)

func TestMain(m *testing.M) { tuntest.Main(m) }

// kernel is the network namespace of a sandbox: a thread that does what it is told.
type kernel struct {
	do chan func()
}

// newKernel makes a network namespace with the device of a sandbox, and returns the
// device's other end.
func newKernel(t testing.TB) (*kernel, *os.File) {
	t.Helper()
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
