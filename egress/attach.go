package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/network/dns"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Attach implements sandbox.Uplink.
func (e *Egress) Attach(ctx context.Context, sb sandbox.Sandbox, pid int) error {
	a, err := e.attachment(ctx, sb)
	if err != nil {
		return err
	}
	a.Detach() // an older attachment of this process still holds the device name
	device, listener, err := e.cfg.Device(ctx, sb.ID, pid)
	if err != nil {
		return fmt.Errorf("make the network device of sandbox %s: %w", sb.ID, err)
	}
	if err := a.Attach(device, listener); err != nil {
		return fmt.Errorf("attach the network of sandbox %s: %w", sb.ID, err)
	}
	return nil
}

// attachment returns the sandbox's attachment, and makes it if it does not exist.
func (e *Egress) attachment(ctx context.Context, sb sandbox.Sandbox) (*flow.Attachment, error) {
	if a := e.find(sb.ID); a != nil { // without waiting for a change of rules
		return a, nil
	}
	done, err := e.changeWith(ctx, sb.Owner, e.sets.Get(ruleset.Scope{Sandbox: sb.ID}).Rules) // so that no change of rules misses it
	if err != nil {
		return nil, err
	}
	defer done()
	if a := e.find(sb.ID); a != nil {
		return a, nil
	}
	if err := e.loadLayer(ctx, ruleset.Scope{Sandbox: sb.ID}, sb.Owner); err != nil {
		return nil, err
	}
	a := flow.NewAttachment(e.carrier.NewClient(sb.ID, sb.Owner), dns.Config{
		Known:  e.names.known(sb.ID),
		Record: func(name string, addr netip.Addr) { e.names.record(sb.ID, name, addr) },
		Forget: func(addr netip.Addr) { e.names.record(sb.ID, "", addr) },
	})
	e.build(a.Client)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, sandbox.ErrClosed
	}
	e.attachments[sb.ID] = a
	return a, nil
}

// Detach implements sandbox.Uplink.
func (e *Egress) Detach(id sandbox.ID) {
	if a := e.find(id); a != nil {
		a.Detach()
	}
}

// forgetLimit bounds the duration of the writes that delete a sandbox's state.
const forgetLimit = 10 * time.Second

// Forget implements sandbox.Uplink.
func (e *Egress) Forget(id sandbox.ID) {
	e.changeMu.Lock()
	defer e.changeMu.Unlock()
	e.mu.Lock()
	a := e.attachments[id]
	delete(e.attachments, id)
	e.mu.Unlock()
	if a != nil {
		a.End()
	}
	scope := ruleset.Scope{Sandbox: id}
	e.layers[scope].Release()
	delete(e.layers, scope)
	ctx, cancel := context.WithTimeout(e.ctx, forgetLimit)
	defer cancel()
	if err := errors.Join(e.sets.Delete(ctx, scope), e.names.forget(ctx, id)); err != nil {
		e.log.Warn("failed to delete egress state of destroyed sandbox", "sandbox", id, "error", err)
	}
	e.Flows.Forget(string(id))
}

// Known implements sandbox.Uplink.
func (e *Egress) Known() []sandbox.ID {
	known := e.names.sandboxes()
	for scope := range e.sets.All() {
		if id := scope.Sandbox; id != "" {
			known[id] = struct{}{}
		}
	}
	return slices.Collect(maps.Keys(known))
}

// Environment implements sandbox.Uplink. It returns the placeholders that rules offer.
func (e *Egress) Environment(id sandbox.ID) map[string]string {
	if a := e.find(id); a != nil {
		return a.Table().Environment
	}
	return nil
}

// find returns the sandbox's attachment, or nil.
func (e *Egress) find(id sandbox.ID) *flow.Attachment {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.attachments[id]
}

var _ sandbox.Uplink = (*Egress)(nil)
