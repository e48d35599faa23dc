package dial

import (
	"context"
	"net"
	"net/netip"
	"sync/atomic"
)

// newResolver returns Go's resolver with these servers instead of the system's. The
// first is queried until it does not respond, then the next; after the last comes
// the first again.
func newResolver(servers []netip.AddrPort) *net.Resolver {
	var current atomic.Uint32
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		index := current.Load()
		failed := func() { current.CompareAndSwap(index, index+1) }
		server := servers[int(index)%len(servers)]
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

// watched calls failed when a server does not respond. It is a net.PacketConn, by
// which the resolver recognizes UDP.
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
