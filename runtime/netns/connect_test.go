package netns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/testkit"
)

// stall listens on a port of 127.0.0.1, 0 for any, accepts no connection, and fills its
// backlog. The caller closes the sockets; the listening one is first.
func stall(port int) (sockets [2]int, err error) {
	for i := range sockets {
		if sockets[i], err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return sockets, err
		}
	}
	address := &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}
	if err := errors.Join(unix.Bind(sockets[0], address), unix.Listen(sockets[0], 0)); err != nil {
		return sockets, err
	}
	bound, err := unix.Getsockname(sockets[0])
	if err != nil {
		return sockets, err
	}
	// The kernel queues one connection more than the backlog.
	return sockets, unix.Connect(sockets[1], bound)
}

func TestContextEndsAPendingDial(t *testing.T) {
	sockets, err := stall(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range sockets {
		defer unix.Close(fd)
	}
	bound, err := unix.Getsockname(sockets[0])
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(bound.(*unix.SockaddrInet4).Port)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { // ends with ctx
		conn, err := connect(ctx, fd, netip.AddrPortFrom(loopback4, port))
		if err == nil {
			conn.Close()
		}
		ended <- err
	}()
	testkit.Eventually(t, "a connection is attempted", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("the dial ended before its context: %v", err)
		default:
		}
		return attempted(t, port)
	})
	cancel()
	if err := testkit.Receive(t, "the end of the dial", ended); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}

// attempted reports whether a connection to a port of 127.0.0.1 is being attempted.
func attempted(t *testing.T, port uint16) bool {
	t.Helper()
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	const synSent = "02"
	return strings.Contains(string(table), fmt.Sprintf(":%04X %s ", port, synSent))
}
