package sandboxtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Network is a sandbox.Network. A sandbox whose guest runs in the test's process
// has the test's loopback; a sandbox with a Loopback has only its addresses.
type Network struct {
	mu    sync.Mutex
	boxes map[sandbox.ID]*Loopback
}

// NewNetwork returns a Network without sandboxes.
func NewNetwork() *Network { return &Network{boxes: map[sandbox.ID]*Loopback{}} }

// Loopback is the loopback of one sandbox: it maps addresses of the sandbox to addresses
// of the test.
type Loopback struct {
	pid int

	mu        sync.Mutex
	addresses map[netip.AddrPort]netip.AddrPort
	closed    bool
}

// Add gives a sandbox a Loopback; pid is its first process.
func (n *Network) Add(id sandbox.ID, pid int) *Loopback {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &Loopback{pid: pid, addresses: map[netip.AddrPort]netip.AddrPort{}}
	n.boxes[id] = l
	return l
}

// Map maps an address of the sandbox to one of the test.
func (l *Loopback) Map(from, to netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addresses[from] = to
}

// Close ends the sandbox's processes.
func (l *Loopback) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// find returns the test's address of a port, IPv4 first.
func (l *Loopback) find(pid int, port uint16) (netip.AddrPort, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || pid != l.pid {
		return netip.AddrPort{}, fmt.Errorf("there is no process %d", pid)
	}
	for _, ip := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		if to, ok := l.addresses[netip.AddrPortFrom(netip.MustParseAddr(ip), port)]; ok {
			return to, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("port %d: %w", port, syscall.ECONNREFUSED)
}

// Dial implements sandbox.Network.
func (n *Network) Dial(ctx context.Context, id sandbox.ID, pid int, port uint16) (net.Conn, error) {
	n.mu.Lock()
	box := n.boxes[id]
	n.mu.Unlock()
	to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	if box != nil {
		var err error
		if to, err = box.find(pid, port); err != nil {
			return nil, err
		}
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
	var timeout net.Error
	if err != nil && (ctx.Err() != nil || errors.As(err, &timeout) && timeout.Timeout()) {
		<-ctx.Done() // the poller's clock may be a moment ahead of the context's
		return nil, ctx.Err()
	}
	return conn, err
}

// Forget implements sandbox.Network; there is nothing to forget.
func (n *Network) Forget(sandbox.ID) {}
