package sandboxtest

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Network is a sandbox.Network. Its sandboxes, whose guests run in the test's process, have
// the test's loopback.
type Network struct {
	resolve func(id sandbox.ID, pid int, port uint16) (netip.AddrPort, error)
}

// NewNetwork returns a Network for all sandboxes.
func NewNetwork() *Network {
	return &Network{resolve: func(_ sandbox.ID, _ int, port uint16) (netip.AddrPort, error) {
		return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port), nil
	}}
}

// Dial implements sandbox.Network.
func (n *Network) Dial(ctx context.Context, id sandbox.ID, pid int, port uint16) (net.Conn, error) {
	to, err := n.resolve(id, pid, port)
	if err != nil {
		return nil, err
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
