// Package stack is the other end of a sandbox's network device. A connection that the
// sandbox dials becomes a Flow, which a Handler accepts or refuses; its name queries go to
// the Handler too. Pings get a reply; all other packets are refused or dropped.
//
// Of TCP only the first packet of a connection leaves the device. The Handler may take
// its time: no packet was sent back yet, so a connection that is refused later, or whose
// upstream does not exist, never looks established to the sandbox. To accept it, the stack
// writes the packet back to the device. The kernel then completes the connection with the
// node's listening socket in the sandbox's network namespace, and carries it on the
// namespace's loopback (package link). Name queries, pings and all other UDP are handled
// packet by packet, without state. A sandbox that sends nothing costs one waiting goroutine.
//
// The other side is hostile. Its traffic is bounded by Limits for each sandbox, and by the
// pools Connections and Wide of Config for all of them.
package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/redact"
)

// Handler decides about the connections and name queries of a sandbox.
type Handler interface {
	// TCP is called for each connection attempt, in a goroutine of its own that
	// Close waits for. It accepts or refuses the flow. When it returns, an undecided
	// flow is refused and an accepted connection is closed. When the stack ends, ctx
	// is canceled and connections are reset.
	TCP(ctx context.Context, f *Flow)
	// DNS returns the response to one UDP datagram to port 53 of a name server, which
	// is link.Gateway or link.SecondServer; nil sends none. It may retain query but must
	// not modify it. ctx ends with the stack.
	DNS(ctx context.Context, server netip.Addr, query []byte) []byte
}

// Config configures a Stack.
type Config struct {
	// Device is a device of package tun, or another file whose reads and writes are
	// one IP packet each, such as one end of a packet socket pair. It must be
	// non-blocking. The Stack owns it, even if New fails.
	Device *os.File
	// Listener accepts the connections whose first packet was written back to the
	// device. The Stack owns it, even if New fails.
	Listener *net.TCPListener
	Handler  Handler
	Limits   Limits
	// Connections and Wide are shared by all stacks and bound their total, as the Limits
	// of the same names bound one stack; nil means that only Limits apply. A wide
	// connection takes at most 3 MiB of memory, any other at most 256 KiB.
	Connections, Wide *quota.Pool
	// Exceeded is called when a connection is refused or a name query dropped because a
	// limit was reached, at most once per exceededEvery and limit. No packet is read until it
	// returns.
	Exceeded func(what Exceeded)
	// Refused is called with the destination of a refused datagram, but not for each
	// datagram, see refusals. No packet is read until it returns.
	Refused func(to netip.AddrPort)
	// Sent is called when a connection receives bytes from the sandbox. It must not
	// block.
	Sent func()
	// Arriving is called before bytes are written to the sandbox, which may be frozen,
	// and for the end of a connection. If it fails, the write fails with its error. ctx ends
	// with the stack.
	Arriving func(ctx context.Context) error
	// Log receives all other events; the caller adds the sandbox attribute.
	Log *slog.Logger
}

// Stack serves one device. Create one with New.
type Stack struct {
	cfg    Config
	device *device
	ctx    context.Context // ends with the stack
	cancel context.CancelFunc

	refused  refusals               // for the reader only
	exceeded map[Exceeded]time.Time // when each was last reported; for the reader only
	queries  chan struct{}          // one element for each name query in flight
	running  sync.WaitGroup         // handlers, and connections that linger after them
	accepts  sync.WaitGroup         // the listener's goroutine, while the reader is awake
	done     chan struct{}          // closed when the reader has ended and released everything
	flows    *quota.Pool            // connections, from the attempt until the socket is closed
	wide     *quota.Pool            // connections with buffers that grow

	mu        sync.Mutex
	closing   bool
	active    bool                // a packet came since the reader was last idle; only the reader sets it
	attempts  map[endpoints]*Flow // attempts whose connection is not established yet
	conns     map[*Conn]struct{}
	idleSince time.Time // when flows became 0, or the reader woke
}

// New returns a Stack that serves cfg.Device until Close.
func New(cfg Config) (*Stack, error) {
	cfg.Limits = cfg.Limits.withDefaults()
	device, err := openDevice(cfg.Device)
	if err != nil {
		cfg.Listener.Close()
		return nil, fmt.Errorf("open a sandbox's network device: %w", err)
	}
	s := &Stack{
		cfg:      cfg,
		device:   device,
		queries:  make(chan struct{}, maxQueries),
		done:     make(chan struct{}),
		attempts: make(map[endpoints]*Flow),
		conns:    make(map[*Conn]struct{}),
		exceeded: make(map[Exceeded]time.Time),
		flows:    cfg.Connections.Child(int64(cfg.Limits.Connections)),
		wide:     cfg.Wide.Child(int64(cfg.Limits.Wide)),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	go s.read() // ends on Close, or with the device
	return s, nil
}

// Close resets all connections, waits for the handlers, and closes the device.
// Idempotent.
func (s *Stack) Close() error {
	s.mu.Lock()
	s.closing = true
	s.device.wake(time.Unix(1, 0))
	s.mu.Unlock()
	s.cancel()
	<-s.done
	return s.device.close()
}

// read handles packets from the device until the device ends or Close is called.
func (s *Stack) read() {
	defer close(s.done)
	for {
		err := s.device.read(s.packet)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			if s.ctx.Err() == nil {
				s.cfg.Log.Info("a sandbox's network device ended", "error", err)
			}
			break
		}
		if !s.deactivate() {
			break
		}
	}
	s.end()
}

// activate starts the listener's goroutine and schedules the next idle check, even if no
// connection follows the packet that woke the reader. Only the reader calls it.
func (s *Stack) activate() {
	_ = s.cfg.Listener.SetDeadline(time.Time{})
	s.accepts.Go(s.accept)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = true
	s.idleSince = time.Now()
	s.wakeWhenIdle()
}

// deactivate stops the listener's goroutine once the sandbox has had no connection for
// Limits.Idle. It returns false if the Stack is closing.
func (s *Stack) deactivate() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.device.wake(time.Time{})
	switch {
	case !s.active || s.flows.Used() > 0:
	case time.Since(s.idleSince) < s.cfg.Limits.Idle:
		s.wakeWhenIdle()
	default:
		_ = s.cfg.Listener.SetDeadline(time.Unix(1, 0))
		s.mu.Unlock() // for connections that were accepted
		s.accepts.Wait()
		s.mu.Lock()
		s.active = false
	}
	return true
}

// wakeWhenIdle wakes the reader for its next idle check. s.mu is held.
func (s *Stack) wakeWhenIdle() {
	if !s.closing {
		s.device.wake(s.idleSince.Add(s.cfg.Limits.Idle))
	}
}

// accept accepts connections until the listener is closed or its deadline passes.
func (s *Stack) accept() {
	for failed := false; ; {
		tcp, err := s.cfg.Listener.AcceptTCP()
		switch {
		case err == nil:
			failed = false
			s.open(tcp)
		case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed):
			return
		default: // such as no more descriptors: the sandbox's attempts time out
			if !failed { // log once per series of failures
				s.cfg.Log.Warn("failed to accept a connection of a sandbox", "error", err)
			}
			failed = true
			select {
			case <-time.After(acceptAgain):
			case <-s.ctx.Done():
			}
		}
	}
}

// acceptAgain is the delay after a failed accept.
const acceptAgain = 100 * time.Millisecond

// open passes a connection to its Flow, or resets it if the Flow no longer waits for it.
func (s *Stack) open(tcp *net.TCPConn) {
	from, _ := tcp.RemoteAddr().(*net.TCPAddr)
	local, _ := tcp.LocalAddr().(*net.TCPAddr)
	to := local.AddrPort() // invalid if there is no address
	e := endpoints{from.AddrPort().Port(), netip.AddrPortFrom(to.Addr().Unmap(), to.Port())}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.attempts[e]; f != nil && f.released {
		delete(s.attempts, e)
		f.incoming <- tcp
		return
	}
	_ = tcp.SetLinger(0)
	_ = tcp.Close()
}

// end resets all connections and waits for the handlers.
func (s *Stack) end() {
	s.cancel()
	_ = s.cfg.Listener.Close()
	s.accepts.Wait()
	s.mu.Lock()
	s.closing = true
	conns := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range conns {
		c.Abort()
	}
	s.running.Wait()
}

// admit returns a Flow for a new connection attempt. It returns nil if the attempt is
// not new, and resets an attempt that exceeds a limit. Only the reader calls it.
func (s *Stack) admit(e endpoints, syn header.IPv4) *Flow {
	f, exceeded := s.tryAdmit(e, syn)
	if exceeded != "" {
		s.reset(syn)
		s.reportExceeded(exceeded)
	}
	return f
}

// tryAdmit is admit without the reset: it returns the exceeded limit, if any.
func (s *Stack) tryAdmit(e endpoints, syn header.IPv4) (*Flow, Exceeded) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.attempts[e]; f != nil { // a retransmission, or a new attempt from the same port
		f.syn = append(f.syn[:0], syn...)
		if f.released {
			_ = s.device.send(f.syn)
		}
		return nil, ""
	}
	switch {
	case s.closing:
		return nil, ""
	case len(s.attempts) >= s.cfg.Limits.Attempts:
		return nil, Attempts
	}
	switch s.flows.TryAcquire(1) {
	case quota.ErrExceeded:
		return nil, Connections
	case quota.ErrTotalExceeded:
		return nil, AllConnections
	}
	f := &Flow{stack: s, endpoints: e, syn: slices.Clone(syn), incoming: make(chan *net.TCPConn, 1)}
	s.attempts[e] = f
	s.running.Add(1)
	return f, ""
}

// serve passes one connection attempt to the Handler.
func (s *Stack) serve(f *Flow) {
	defer s.running.Done()
	defer f.end()
	defer s.recover()
	s.cfg.Handler.TCP(s.ctx, f)
}

// accepted returns the Conn of a Flow. tcp is nil if the Flow stopped waiting; then
// accepted uses a connection that arrived in the meantime. It returns nil if none did,
// or if the stack is closing, which resets the connection.
func (s *Stack) accepted(f *Flow, tcp *net.TCPConn) *Conn {
	s.mu.Lock()
	delete(s.attempts, f.endpoints)
	s.mu.Unlock()
	if tcp == nil {
		select {
		case tcp = <-f.incoming:
		default:
			s.release(false)
			return nil
		}
	}
	c := newConn(s, tcp)
	s.mu.Lock()
	closing := s.closing
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	if closing {
		c.Abort()
		return nil
	}
	return c
}

// background runs f in a goroutine that Close waits for. It returns false, without
// running f, if the stack is closing.
func (s *Stack) background(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		s.running.Go(f)
	}
	return !s.closing
}

// remove deletes a connection and releases its slot.
func (s *Stack) remove(c *Conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.release(c.wide)
}

// recover logs a panic of the Handler instead of ending the node: a sandbox controls
// the Handler's input.
func (s *Stack) recover() {
	if p := recover(); p != nil {
		s.cfg.Log.Error("network handler panicked", "panic", redact.Panic(p), "stack", string(debug.Stack()))
	}
}

// release releases the slot of one connection, and its wide slot if wide is set.
func (s *Stack) release(wide bool) {
	if wide {
		s.wide.Release(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flows.Release(1)
	if s.flows.Used() == 0 {
		s.idleSince = time.Now()
		s.wakeWhenIdle()
	}
}
