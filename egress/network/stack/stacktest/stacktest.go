// Package stacktest provides a sandbox's network without a sandbox: a network namespace
// with a sandbox's device. Clients in a test send through it as if they ran in a sandbox.
// Tests that use it run under tuntest.Main.
package stacktest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/netns/tun"
)

// Network is a sandbox's view of the network: an address, a route and a name server.
type Network struct {
	namespace *os.File

	mu    sync.Mutex
	conns []net.Conn
}

// New creates a network namespace with only a loopback. It is closed when the test ends.
func New(t testing.TB) *Network {
	t.Helper()
	n := new(Network)
	err := onThread(func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			n.namespace, err = os.Open("/proc/thread-self/ns/net")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// Device creates a sandbox's device and its listener. The caller owns both.
func (n *Network) Device(t testing.TB) (device *os.File, listener *net.TCPListener) {
	t.Helper()
	err := n.In(func() error {
		fd, err := tun.Make()
		if err != nil {
			return err
		}
		device = os.NewFile(uintptr(fd), "tun")
		if fd, err = tun.Listen(); err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), "listener")
		defer file.Close()
		l, err := net.FileListener(file)
		if err == nil {
			listener = l.(*net.TCPListener)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return device, listener
}

// Attached reports whether the device exists: it is removed when its other end is closed.
func (n *Network) Attached() bool {
	return n.In(func() error {
		_, err := net.InterfaceByName(link.Device)
		return err
	}) == nil
}

// In runs f in the namespace, on one thread. A socket that f creates belongs to the
// namespace permanently; a goroutine that it starts does not run there.
func (n *Network) In(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(n.namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// onThread runs f on a thread of its own, which ends with it.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// Close closes the namespace and all connections dialed in it. Idempotent.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		_ = c.Close()
	}
	n.conns = nil
	_ = n.namespace.Close()
}

// DialContext connects to a host and port as a program in the sandbox does: it resolves
// the host with the sandbox's name server.
func (n *Network) DialContext(ctx context.Context, network, address string) (conn net.Conn, err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if _, err := netip.ParseAddr(host); err != nil {
		found, err := n.Resolver().LookupNetIP(ctx, "ip4", host+".")
		if err != nil {
			return nil, err
		}
		host = found[0].Unmap().String()
	}
	err = n.In(func() (err error) {
		// The namespace is the thread's that creates the socket: no other goroutine may do so.
		conn, err = (&net.Dialer{FallbackDelay: -1}).DialContext(ctx, network, net.JoinHostPort(host, port))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("from the namespace: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conns = append(n.conns, conn)
	return conn, nil
}

// Resolver returns a resolver that queries the sandbox's name server.
func (n *Network) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return n.DialContext(ctx, network, netip.AddrPortFrom(link.Gateway, 53).String())
	}}
}
