package stack

import (
	"errors"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"
)

// endpoints identifies a connection by its source in the sandbox and its destination.
type endpoints struct {
	from uint16 // the port; the address is the sandbox's
	to   netip.AddrPort
}

var errDecided = errors.New("the flow was accepted or refused before")

// Flow is a connection attempt of a sandbox: its SYN has arrived, and no packet was
// sent back yet.
type Flow struct {
	stack     *Stack
	endpoints endpoints
	decided   atomic.Bool
	conn      *Conn // if accepted

	syn      []byte            // the packet; guarded by stack.mu
	released bool              // the SYN was written back; guarded by stack.mu
	incoming chan *net.TCPConn // receives the established connection
}

// Destination returns the address that the sandbox dials.
func (f *Flow) Destination() netip.AddrPort { return f.endpoints.to }

// handshakeLimit bounds the handshake, which one kernel performs for both sides: it
// takes longer only if the sandbox gave up before.
const handshakeLimit = 5 * time.Second

// Accept completes the handshake. The Conn is closed when Handler.TCP returns, at the
// latest. Errors: syscall.ECONNABORTED if the sandbox gave up or the stack ended in the
// meantime; another one if the flow was accepted or refused before.
func (f *Flow) Accept() (*Conn, error) {
	if f.decided.Swap(true) {
		return nil, errDecided
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
	case tcp = <-f.incoming:
	case <-limit.C:
	case <-s.ctx.Done():
	}
	if f.conn = s.accepted(f, tcp); f.conn == nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.ECONNABORTED}
	}
	return f.conn, nil
}

// Refuse resets the connection attempt, as if no socket listened there. It does nothing
// if the flow was accepted or refused before.
func (f *Flow) Refuse() {
	if f.decided.Swap(true) {
		return
	}
	s := f.stack
	s.mu.Lock()
	delete(s.attempts, f.endpoints)
	s.reset(f.syn)
	s.mu.Unlock()
	s.release(false)
}

// end is called when the Handler has returned.
func (f *Flow) end() {
	f.Refuse()
	if f.conn != nil {
		_ = f.conn.Close()
	}
}
