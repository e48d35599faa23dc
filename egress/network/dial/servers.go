package dial

import (
	"context"
	"net"
	"net/netip"
	"sync/atomic"
)

// newResolver returns Go's resolver, asking these servers instead of the
// system's. The first is asked until it does not answer, then the next.
func newResolver(servers []netip.AddrPort) *net.Resolver {
	var current atomic.Uint32
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		asked := current.Load()
		failed := func() { current.CompareAndSwap(asked, asked+1) }
		server := servers[int(asked)%len(servers)]
		conn, err := new(net.Dialer).DialContext(ctx, network, server.String())
		if err != nil {
			failed()
			return nil, err
		}
		if udp, ok := conn.(*net.UDPConn); ok {
			return &watched{udp, failed}, nil
		}
		return conn, nil
	}}
}

// watched tells when a server does not answer. It is a net.PacketConn, by which
// the resolver knows that it is UDP.
type watched struct {
	*net.UDPConn
	failed func()
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.UDPConn.Read(b)
	if err != nil {
		w.failed()
	}
	return n, err
}
