// Package stack is the other end of a sandbox's network device. What the sandbox
// dials becomes a Flow, which a Handler accepts or refuses; its name queries go to the
// Handler too; everything else that leaves the device is answered with a refusal or not
// at all.
//
// Of TCP only the first packet of a connection leaves the device. The Handler may take
// its time: nothing was answered yet, so what is refused or not there does not look
// connected to the sandbox. To accept it, the packet goes back through the device; the
// kernel then completes the connection with a socket of the node's that listens in the
// sandbox's network namespace, and carries it on its loopback (package link). Name
// queries, pings and the refusal of all other UDP are answered packet by packet,
// without a state. A sandbox that sends nothing costs one goroutine that waits.
//
// The other side is hostile. Whatever it sends is bounded by Limits, per sandbox, and
// by a Budget over all of them.
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

// ErrDecided is returned by Flow.Accept for a flow that was accepted or refused before.
var ErrDecided = errors.New("the flow was decided before")

// Handler decides what becomes of that which a sandbox sends.
type Handler interface {
	// TCP is called for each connection attempt, in a goroutine of its own that
	// Close waits for. It accepts or refuses the flow; one that it leaves undecided
	// is refused when it returns, and a connection that it accepted is closed. ctx
	// ends with the stack, and connections are reset then.
	TCP(ctx context.Context, f *Flow)
	// DNS answers one UDP datagram to port 53 of a name server, which is
	// link.Gateway or link.SecondServer. With nil there is no answer. It may keep
	// query and must not change it. ctx ends with the stack.
	DNS(ctx context.Context, server netip.Addr, query []byte) []byte
}

// Config of a Stack.
type Config struct {
	// Device is what package tun makes, or anything else whose reads and writes are
	// of one IP packet each, such as one end of a packet socket pair. It has to be
	// non-blocking. The Stack owns it, also when New fails.
	Device *os.File
	// Listener takes the connections whose first packet goes back through the device.
	// The Stack owns it, also when New fails.
	Listener *net.TCPListener
	Handler  Handler
	Limits   Limits
	// Connections and Wide are shared by all stacks, whose Limits of the same names they
	// bound in total; nil: only Limits bound. A wide connection takes 3 MiB of memory at
	// most, another one 256 KiB.
	Connections, Wide *quota.Pool
	// Exceeded is told, at most once per exceededEvery and kind, that something was
	// refused because a limit was reached. No packet is read meanwhile. May be nil.
	Exceeded func(what Exceeded)
	// Refused is told of datagrams that were refused, by where they were to go: not of
	// each one, see refusals. No packet is read meanwhile. May be nil.
	Refused func(to netip.AddrPort)
	// Sent is told when bytes of a connection came from the sandbox. It must not
	// wait. May be nil.
	Sent func()
	// Arriving is called for bytes to the sandbox, which may be frozen, before they are
	// written, and for the end of a connection; an error is that of the write. ctx ends
	// with the stack. May be nil.
	Arriving func(ctx context.Context) error
	// Log gets what has no other receiver; the caller adds the sandbox.
	Log *slog.Logger
}

// Stack serves one device. Make one with New.
type Stack struct {
	cfg    Config
	device *device
	ctx    context.Context // ends with the stack
	cancel context.CancelFunc

	awake    bool                   // since the last rest there was a packet; the reader's alone
	refused  refusals               // the reader's alone
	exceeded map[Exceeded]time.Time // when it was told last; the reader's alone
	queries  chan struct{}          // one for each name query in flight
	running  sync.WaitGroup         // handlers, and what goes on after them
	accepts  sync.WaitGroup         // the goroutine of the listener, while the reader is awake
	done     chan struct{}          // closed when the reader has ended and released everything
	flows    *quota.Pool            // connections, from the attempt until the last trace of them is gone
	wide     *quota.Pool            // connections with buffers that grow

	mu        sync.Mutex
	closing   bool
	attempts  map[endpoints]*Flow // those that are not open yet
	conns     map[*Conn]struct{}
	idleSince time.Time // when flows became 0, or the reader awoke
}

// New returns a Stack that serves cfg.Device until Close.
func New(cfg Config) (*Stack, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Limits = cfg.Limits.withDefaults()
	device, err := openDevice(cfg.Device)
	if err != nil {
		cfg.Listener.Close()
		return nil, fmt.Errorf("open a sandbox's network device: %w", err)
	}
	s := &Stack{
		cfg:      cfg,
		device:   device,
		queries:  make(chan struct{}, cfg.Limits.Queries),
		done:     make(chan struct{}),
		attempts: make(map[endpoints]*Flow),
		conns:    make(map[*Conn]struct{}),
		exceeded: make(map[Exceeded]time.Time),
		flows:    cfg.Connections.Child(int64(cfg.Limits.Connections)),
		wide:     cfg.Wide.Child(int64(cfg.Limits.Wide)),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	go s.read() // ends by Close, or with the device
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

// read takes packets from the device until that ends or Close is called.
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
		if !s.rest() {
			break
		}
	}
	s.end()
}

// arise makes the reader rest again after a while, also if no connection follows
// the packet that awoke it. Only the reader calls it.
func (s *Stack) arise() {
	s.awake = true
	_ = s.cfg.Listener.SetDeadline(time.Time{})
	s.accepts.Go(s.accept)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idleSince = time.Now()
	s.wakeWhenIdle()
}

// rest ends what a sandbox without connections has no use for. It returns false when
// the Stack is to end.
func (s *Stack) rest() bool {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return false
	}
	s.device.wake(time.Time{})
	idle := s.flows.Used() == 0 && s.awake
	wait := time.Until(s.idleSince.Add(s.cfg.Limits.Idle))
	if idle && wait > 0 {
		s.wakeWhenIdle()
	}
	s.mu.Unlock()
	if idle && wait <= 0 {
		s.awake = false
		_ = s.cfg.Listener.SetDeadline(time.Unix(1, 0))
		s.accepts.Wait()
	}
	return true
}

// wakeWhenIdle makes the reader look whether it can rest. s.mu is held.
func (s *Stack) wakeWhenIdle() {
	if !s.closing {
		s.device.wake(s.idleSince.Add(s.cfg.Limits.Idle))
	}
}

// accept takes connections from the listener until that is closed or its deadline
// passes.
func (s *Stack) accept() {
	for failed := false; ; {
		tcp, err := s.cfg.Listener.AcceptTCP()
		switch {
		case err == nil:
			failed = false
			s.open(tcp)
		case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed):
			return
		default: // the node is out of descriptors: the sandbox's attempts end by themselves
			if !failed { // once in a row
				s.cfg.Log.Warn("connection of a sandbox cannot be accepted", "error", err)
			}
			failed = true
			select {
			case <-time.After(acceptAgain):
			case <-s.ctx.Done():
			}
		}
	}
}

// acceptAgain is the pause after the listener failed.
const acceptAgain = 100 * time.Millisecond

// open hands a connection to its Flow. One whose Flow has given up is reset.
func (s *Stack) open(tcp *net.TCPConn) {
	from, _ := tcp.RemoteAddr().(*net.TCPAddr)
	to, _ := tcp.LocalAddr().(*net.TCPAddr)
	if from != nil && to != nil {
		local := to.AddrPort()
		e := endpoints{uint16(from.Port), netip.AddrPortFrom(local.Addr().Unmap(), local.Port())}
		s.mu.Lock()
		f := s.attempts[e]
		if f != nil && f.released {
			delete(s.attempts, e)
			f.opened <- tcp
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
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

// admit returns the Flow of a connection attempt if it is a new one and there is room
// for it. Only the reader calls it. What there is no room for is reset.
func (s *Stack) admit(e endpoints, syn header.IPv4) *Flow {
	f, full := s.takeRoom(e, syn)
	if full != "" {
		s.reset(syn)
		s.tell(full)
	}
	return f
}

// takeRoom is admit without a word about what there is no room for.
func (s *Stack) takeRoom(e endpoints, syn header.IPv4) (*Flow, Exceeded) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.attempts[e]; f != nil { // sent again, or anew
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
	f := &Flow{stack: s, endpoints: e, syn: slices.Clone(syn), opened: make(chan *net.TCPConn, 1)}
	s.attempts[e] = f
	s.running.Add(1)
	return f, ""
}

// serve hands one connection attempt to the Handler.
func (s *Stack) serve(f *Flow) {
	defer s.running.Done()
	defer f.end()
	defer s.recover("a connection")
	s.cfg.Handler.TCP(s.ctx, f)
}

// accepted makes the Conn of a Flow, or returns nil if there is none: tcp is nil when
// the Flow has not waited for it, and what has come just now is reset.
func (s *Stack) accepted(f *Flow, tcp *net.TCPConn) *Conn {
	s.mu.Lock()
	delete(s.attempts, f.endpoints)
	s.mu.Unlock()
	if tcp == nil {
		select {
		case tcp = <-f.opened:
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

// refuse resets a connection attempt.
func (s *Stack) refuse(f *Flow) {
	s.mu.Lock()
	delete(s.attempts, f.endpoints)
	s.reset(f.syn)
	s.mu.Unlock()
	s.release(false)
}

// background runs what goes on after a handler; it is false when the stack ends.
func (s *Stack) background(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		s.running.Go(f)
	}
	return !s.closing
}

// remove gives the room of a connection back.
func (s *Stack) remove(c *Conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.release(c.wide)
}

// recover keeps the node alive if the Handler panics: what it handles was sent by
// a sandbox.
func (s *Stack) recover(handling string) {
	if p := recover(); p != nil {
		s.cfg.Log.Error("handling "+handling+" of a sandbox panicked", "panic", redact.Panic(p), "stack", string(debug.Stack()))
	}
}

// release gives the room of one connection back.
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
