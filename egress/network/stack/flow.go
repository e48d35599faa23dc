package stack

import (
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/netns/link"
)

// endpoints name a connection: where in the sandbox it comes from, and where it goes.
type endpoints struct {
	from uint16 // the port; the address is the sandbox's
	to   netip.AddrPort
}

// Flow is a connection that a sandbox asks for: its SYN has come, and nothing was
// answered yet.
type Flow struct {
	stack     *Stack
	endpoints endpoints
	decided   atomic.Bool
	conn      *Conn // if it was accepted

	syn      []byte            // the packet; of stack.mu
	released bool              // the SYN went on; of stack.mu
	opened   chan *net.TCPConn // what became of it
}

// Destination is what the sandbox dials.
func (f *Flow) Destination() netip.AddrPort { return f.endpoints.to }

// Source is where in the sandbox it comes from.
func (f *Flow) Source() netip.AddrPort { return netip.AddrPortFrom(link.Sandbox, f.endpoints.from) }

// handshakeLimit bounds the handshake, which both sides leave to the one kernel: it
// takes longer only when the sandbox gave up before.
const handshakeLimit = 5 * time.Second

// Accept completes the handshake. The Conn is closed at the latest when Handler.TCP
// returns. Errors: ErrDecided; syscall.ECONNABORTED if the sandbox gave up or the
// stack ended meanwhile.
func (f *Flow) Accept() (*Conn, error) {
	if f.decided.Swap(true) {
		return nil, ErrDecided
	}
	s := f.stack
	s.mu.Lock()
	f.released = true
	_ = s.device.send(f.syn)
	s.mu.Unlock()
	limit := time.NewTimer(handshakeLimit)
	defer limit.Stop()
	var tcp *net.TCPConn
	select {
	case tcp = <-f.opened:
	case <-limit.C:
	case <-s.ctx.Done():
	}
	if f.conn = s.accepted(f, tcp); f.conn == nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.ECONNABORTED}
	}
	return f.conn, nil
}

// Refuse answers with a reset, as if nothing listened there. It does nothing to a flow
// that was decided.
func (f *Flow) Refuse() {
	if f.decided.Swap(true) {
		return
	}
	f.stack.refuse(f)
}

// end is called when the Handler has returned.
func (f *Flow) end() {
	f.Refuse()
	if f.conn != nil {
		_ = f.conn.Close()
	}
}
