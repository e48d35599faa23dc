package stack

import (
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// Flow is a connection that a sandbox asks for: its SYN has come, and nothing was
// answered yet.
type Flow struct {
	stack   *Stack
	attempt attempt
	request *tcp.ForwarderRequest
	decided atomic.Bool
	conn    *Conn // if it was accepted
}

// Destination is what the sandbox dials.
func (f *Flow) Destination() netip.AddrPort {
	return addrPort(f.attempt.LocalAddress, f.attempt.LocalPort)
}

// Source is where in the sandbox it comes from.
func (f *Flow) Source() netip.AddrPort {
	return addrPort(f.attempt.RemoteAddress, f.attempt.RemotePort)
}

// Accept completes the handshake. The Conn is closed at the latest when Handler.TCP
// returns. Errors: ErrDecided; syscall.ECONNABORTED if the sandbox gave up or the
// stack ended meanwhile.
func (f *Flow) Accept() (*Conn, error) {
	if f.decided.Swap(true) {
		return nil, ErrDecided
	}
	queue := new(waiter.Queue)
	endpoint, failed := f.request.CreateEndpoint(queue)
	f.request.Complete(failed != nil)
	f.stack.decided(f.attempt)
	if failed != nil {
		f.stack.release(false)
		return nil, connError("accept", failed)
	}
	f.conn = newConn(f, endpoint, queue)
	return f.conn, nil
}

// Refuse answers with a reset, as if nobody listened. It does nothing to a flow that
// was decided.
func (f *Flow) Refuse() {
	if f.decided.Swap(true) {
		return
	}
	f.request.Complete(true)
	f.stack.decided(f.attempt)
	f.stack.release(false)
}

// end is called when the Handler has returned.
func (f *Flow) end() {
	f.Refuse()
	if f.conn != nil {
		_ = f.conn.Close()
	}
}

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4(a.As4()), port)
}
