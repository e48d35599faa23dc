// Package stack is the other end of a sandbox's network device: a TCP/IP stack in
// the node's own memory. What the sandbox dials becomes a Flow, which a Handler
// accepts or refuses; its name queries go to the Handler too; everything else that
// leaves the device is answered with a refusal or not at all.
//
// TCP is gVisor's netstack. It is made with the first packet that needs it and ended
// when no connection has been there for a while, so a sandbox that sends nothing
// costs one goroutine that waits. Datagrams need no stack: name queries, pings and
// the refusal of all other UDP are answered packet by packet, without a state.
//
// The other side is hostile. Whatever it sends is bounded by Limits, per sandbox, and
// by a Budget over all of them.
package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

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
	Device  *os.File
	Handler Handler
	Limits  Limits
	// Budget is shared by all stacks; nil: only Limits bound.
	Budget *Budget
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
	// Log is for what nobody can be told otherwise; the caller adds the sandbox.
	Log *slog.Logger

	clock tcpip.Clock // nil: the real one
}

// Stack serves one device. Make one with New.
type Stack struct {
	cfg    Config
	device *device
	ctx    context.Context // ends with the stack
	cancel context.CancelFunc

	awake    bool                     // since the last rest there was a packet; the reader's alone
	netstack atomic.Pointer[netstack] // nil while nobody needs it; made and ended by the reader
	refused  refusals                 // the reader's alone
	exceeded map[Exceeded]time.Time   // when it was told last; the reader's alone
	queries  chan struct{}            // one for each name query in flight
	running  sync.WaitGroup
	done     chan struct{} // closed when the reader has ended and released everything

	mu        sync.Mutex
	closing   bool
	flows     int                  // connections, from the attempt until the last trace of them is gone
	wide      int                  // of them with buffers that grow
	attempts  map[attempt]struct{} // undecided flows
	idleSince time.Time            // when flows became 0, or the reader awoke
}

// New returns a Stack that serves cfg.Device until Close.
func New(cfg Config) (*Stack, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Limits = cfg.Limits.withDefaults()
	device, err := openDevice(cfg.Device)
	if err != nil {
		return nil, fmt.Errorf("opening a sandbox's network device: %w", err)
	}
	s := &Stack{
		cfg:      cfg,
		device:   device,
		queries:  make(chan struct{}, cfg.Limits.Queries),
		done:     make(chan struct{}),
		attempts: make(map[attempt]struct{}),
		exceeded: make(map[Exceeded]time.Time),
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

// read takes packets from the device until that ends or Close is called. It alone
// makes and ends the netstack, between packets, so that nobody has to lock it.
func (s *Stack) read() {
	defer close(s.done)
	for {
		err := s.device.read(s.packet, s.waits)
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

// rest ends the netstack if there was no connection for long enough. It returns false
// when the Stack is to end.
func (s *Stack) rest() bool {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return false
	}
	s.device.wake(time.Time{})
	idle := s.flows == 0 && s.awake
	wait := time.Until(s.idleSince.Add(s.cfg.Limits.Idle))
	if idle && wait > 0 {
		s.wakeWhenIdle()
	}
	s.mu.Unlock()
	if idle && wait <= 0 {
		s.awake = false
		s.endNetstack()
		s.device.rest()
	}
	return true
}

// wakeWhenIdle makes the reader look whether it can rest. s.mu is held.
func (s *Stack) wakeWhenIdle() {
	if !s.closing {
		s.device.wake(s.idleSince.Add(s.cfg.Limits.Idle))
	}
}

// waits is called before the reader waits.
func (s *Stack) waits() {
	if !s.awake {
		s.device.rest()
	}
}

// arise makes the reader rest again after a while, also if no connection follows
// the packet that awoke it. Only the reader calls it.
func (s *Stack) arise() {
	s.awake = true
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idleSince = time.Now()
	s.wakeWhenIdle()
}

func (s *Stack) endNetstack() {
	if n := s.netstack.Swap(nil); n != nil {
		n.end()
	}
}

// end resets all connections and waits for the handlers.
func (s *Stack) end() {
	s.cancel()
	finished := make(chan struct{})
	go func() { // ends with the last handler
		s.running.Wait()
		close(finished)
	}()
	// A handler that just now accepts a flow has an endpoint only a moment later,
	// and nobody would tell it to give up.
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for waiting := true; waiting; {
		if n := s.netstack.Load(); n != nil {
			n.abort()
		}
		select {
		case <-finished:
			waiting = false
		case <-again.C:
		}
	}
	s.endNetstack()
	s.device.rest()
}

// admit takes room for a connection attempt if there is some. Only the reader calls
// it, so that nobody waits for the handlers while one is added.
func (s *Stack) admit(a attempt) (admitted, known bool) {
	admitted, known, full := s.takeRoom(a)
	if full != "" {
		s.tell(full)
	}
	return admitted, known
}

// takeRoom is admit without a word about what there is no room for.
func (s *Stack) takeRoom(a attempt) (taken, known bool, full Exceeded) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.attempts[a]; known {
		return false, true, ""
	}
	switch {
	case s.closing:
		return false, false, ""
	case len(s.attempts) >= s.cfg.Limits.Attempts:
		return false, false, Attempts
	case s.flows >= s.cfg.Limits.Connections:
		return false, false, Connections
	case !s.cfg.Budget.Take():
		return false, false, AllConnections
	}
	s.attempts[a] = struct{}{}
	s.flows++
	s.running.Add(1)
	return true, false, ""
}

// withdraw undoes admit.
func (s *Stack) withdraw(a attempt) {
	s.decided(a)
	s.release(false)
	s.running.Done()
}

// serve hands one connection attempt to the Handler.
func (s *Stack) serve(a attempt, request *tcp.ForwarderRequest) {
	defer s.running.Done()
	f := &Flow{stack: s, attempt: a, request: request}
	defer f.end()
	defer s.recover("a connection")
	s.cfg.Handler.TCP(s.ctx, f)
}

// recover keeps the node alive if the Handler panics: what it handles was sent by
// a sandbox.
func (s *Stack) recover(handling string) {
	if p := recover(); p != nil {
		s.cfg.Log.Error("handling "+handling+" of a sandbox panicked", "panic", redact.Panic(p), "stack", string(debug.Stack()))
	}
}

// decided notes that an attempt is none any more.
func (s *Stack) decided(a attempt) {
	s.mu.Lock()
	delete(s.attempts, a)
	s.mu.Unlock()
}

// release gives the room of one connection back.
func (s *Stack) release(wide bool) {
	s.cfg.Budget.give(wide)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flows--
	if wide {
		s.wide--
	}
	if s.flows == 0 {
		s.idleSince = time.Now()
		s.wakeWhenIdle()
	}
}

// widen says whether one more connection may have buffers that grow.
func (s *Stack) widen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wide >= s.cfg.Limits.Wide || !s.cfg.Budget.takeWide() {
		return false
	}
	s.wide++
	return true
}
