package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/network/dns"
	"github.com/doze-run/doze/egress/network/stack"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/sandbox"
)

// member is a sandbox with its way out.
type member struct {
	sender
	names *dns.Server

	mu    sync.Mutex
	stack *stack.Stack // nil while nothing is attached
	ended bool         // nothing is attached any more
}

// table is all that applies to a sandbox. It does not change.
type table struct {
	rule.Table
	layers [3]*layer // as Layers

	environment map[string]string // with placeholders
	offers      []placeholder.Offer
}

// layerOf returns the layer that a step or an offer comes from.
func (t *table) layerOf(s rule.Source) *layer {
	switch s {
	case rule.Node:
		return t.layers[0]
	case rule.Owner:
		return t.layers[1]
	default:
		return t.layers[2]
	}
}

// Attach implements sandbox.Uplink.
func (e *Egress) Attach(ctx context.Context, sb sandbox.Sandbox, pid int) error {
	m, err := e.member(ctx, sb)
	if err != nil {
		return err
	}
	m.detach() // an older one of this process holds the name of the device
	device, listener, err := e.cfg.Device(ctx, sb.ID, pid)
	if err != nil {
		return fmt.Errorf("making its network device: %w", err)
	}
	s, err := stack.New(stack.Config{
		Device:      device,
		Listener:    listener,
		Handler:     m,
		Limits:      stack.Limits{Connections: e.settings.Load().MaxSandboxConnections},
		Connections: e.connections, Wide: e.wide,
		Exceeded: m.exceeded,
		Refused:  m.refusedDatagram,
		Sent:     func() { e.cfg.Sandboxes.Touch(sb.ID) },
		Arriving: m.wake,
		Log:      e.log.With("sandbox", sb.ID),
	})
	if err != nil {
		return fmt.Errorf("starting its network: %w", err)
	}
	if !m.attach(s) {
		_ = s.Close() // its flows end; there is nothing to be done about an error
		return sandbox.ErrClosed
	}
	return nil
}

// attach is false when the member has ended.
func (m *member) attach(s *stack.Stack) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended {
		return false
	}
	m.stack = s
	return true
}

// member returns the sandbox's, and makes it when it is missing.
func (e *Egress) member(ctx context.Context, sb sandbox.Sandbox) (*member, error) {
	if m := e.find(sb.ID); m != nil { // without waiting for a change of rules
		return m, nil
	}
	done, err := e.changeWith(ctx, sb.Owner, e.sets.Get(ruleset.OfSandbox(sb.ID)).Rules) // so that no change of rules misses it
	if err != nil {
		return nil, err
	}
	defer done()
	if m := e.find(sb.ID); m != nil {
		return m, nil
	}
	if err := e.armSandbox(ctx, sb); err != nil {
		return nil, err
	}
	m := &member{sender: sender{e: e, id: sb.ID, owner: sb.Owner, load: e.load.child()}}
	m.names = dns.New(dns.Config{
		Decide:  m.decideName,
		Refused: m.refusedName,
		Known:   e.names.known(sb.ID),
		Record:  func(name string, a netip.Addr) { e.names.record(sb.ID, name, a) },
		Forget:  func(_ string, a netip.Addr) { e.names.withdraw(sb.ID, a) },
	})
	e.build(&m.sender)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, sandbox.ErrClosed
	}
	e.members[sb.ID] = m
	return m, nil
}

// armSandbox makes a sandbox's own rules ready that were given before. Needs changing.
func (e *Egress) armSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	if e.own[sb.ID] != nil {
		return nil
	}
	own, err := e.armKept(ctx, ruleset.OfSandbox(sb.ID), sb.Owner)
	if err != nil || own == nil {
		return err
	}
	e.own[sb.ID] = own
	return nil
}

// Detach implements sandbox.Uplink.
func (e *Egress) Detach(id sandbox.ID) {
	if m := e.find(id); m != nil {
		m.detach()
	}
}

// forgetLimit bounds the writes that forget a sandbox.
const forgetLimit = 10 * time.Second

// Forget implements sandbox.Uplink.
func (e *Egress) Forget(id sandbox.ID) {
	e.changing.Lock()
	defer e.changing.Unlock()
	e.mu.Lock()
	m := e.members[id]
	delete(e.members, id)
	e.mu.Unlock()
	if m != nil {
		m.end()
	}
	e.own[id].release()
	delete(e.own, id)
	ctx, cancel := context.WithTimeout(e.ctx, forgetLimit)
	defer cancel()
	if err := errors.Join(e.sets.Delete(ctx, ruleset.OfSandbox(id)), e.names.forget(ctx, id)); err != nil {
		e.log.Warn("what is kept of a destroyed sandbox's egress stays", "sandbox", id, "error", err)
	}
	e.audit.Forget(string(id))
}

// Known implements sandbox.Uplink.
func (e *Egress) Known() []sandbox.ID {
	kept := e.names.sandboxes()
	for scope := range e.sets.All() {
		if id := scope.Sandbox(); id != "" {
			kept[id] = struct{}{}
		}
	}
	return slices.Collect(maps.Keys(kept))
}

func (e *Egress) find(id sandbox.ID) *member {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.members[id]
}

// end detaches for good.
func (m *member) end() {
	m.mu.Lock()
	m.ended = true
	m.mu.Unlock()
	m.detach()
}

func (m *member) detach() {
	m.mu.Lock()
	s := m.stack
	m.stack = nil
	m.mu.Unlock()
	if s != nil {
		_ = s.Close() // ends its flows; there is nothing to be done about an error
	}
}

// wake makes sure that the sandbox runs for what comes from upstream, unless it is
// stopped: then its connections are at their end too.
func (m *member) wake(ctx context.Context) error { return m.e.cfg.Sandboxes.Rouse(ctx, m.id) }

// decideName says whether DNS answers a name.
func (m *member) decideName(name string) (bool, string) {
	d := m.table.Load().Name(name)
	return d.Verdict != rule.VerdictDeny, d.Reason
}

func (m *member) refusedName(name, reason string) {
	entry := audit.Entry{Kind: audit.DNS, Host: name, Verdict: audit.Deny, Reason: reason}
	// It may also be no name, or one too many, which no rule says.
	if d := m.table.Load().Name(name); d.Verdict == rule.VerdictDeny && d.Reason == reason {
		entry.Rule = d.Rule
	}
	m.record(entry)
}

// exceeded tells of a limit that was reached; the stack calls it rarely.
func (m *member) exceeded(what stack.Exceeded) {
	m.record(audit.Entry{Kind: audit.Connection, Verdict: audit.Deny, Reason: "a limit was reached: " + string(what)})
}

// refusedDatagram tells that UDP is not carried, of which QUIC is most.
func (m *member) refusedDatagram(to netip.AddrPort) {
	entry := audit.Entry{Kind: audit.Connection, Port: to.Port(), Verdict: audit.Deny, Reason: "it is UDP, and only TCP is carried"}
	if entry.Host, _ = m.names.Host(to.Addr()); entry.Host == "" {
		entry.Address = to.Addr()
	}
	m.record(entry)
}

// DNS implements stack.Handler.
func (m *member) DNS(_ context.Context, server netip.Addr, query []byte) []byte {
	m.e.cfg.Sandboxes.Touch(m.id)
	if server == link.SecondServer {
		return m.names.AnswerSecond(query)
	}
	return m.names.Answer(query)
}

var _ sandbox.Uplink = (*Egress)(nil)
