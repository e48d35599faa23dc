package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// maxTerminals bounds the terminals that the node stores: more than a guest runs. They take less
// than 96 KiB of the sandbox's record.
const maxTerminals = 144

// Terminal is a terminal as last known.
type Terminal struct {
	guest.Terminal
	// Reason is why its sandbox has stopped; empty for a terminal of its present run.
	Reason StateReason `json:"reason,omitempty"`
}

var terminals = programs[Terminal]{func(sb *Sandbox) *[]Terminal { return &sb.Terminals }, maxTerminals, maxTerminals}

func (t Terminal) key() string                             { return t.ID }
func (t Terminal) status() (guest.ProcessState, time.Time) { return t.State, t.StartedAt }
func (t Terminal) current() bool                           { return t.Reason == "" }

func (t *Terminal) lose(reason StateReason) {
	if t.State == guest.ProcessRunning {
		t.State = guest.ProcessLost
	}
	t.Reason = cmp.Or(t.Reason, reason)
}

// TerminalError: a sandbox does not have a terminal with that id, or no longer since it has
// stopped. It is ErrNotFound.
type TerminalError struct {
	Terminal string      // as in the call
	Reason   StateReason // why the sandbox stopped; empty if the id is unknown
}

func (e *TerminalError) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("the sandbox has no terminal %q", e.Terminal)
	}
	return fmt.Sprintf("the terminal %s has ended, because its sandbox stopped (%s)", e.Terminal, e.Reason)
}

func (e *TerminalError) Unwrap() error { return ErrNotFound }

// Terminal returns the terminal with that id, as last known. Errors: *TerminalError.
func (sb *Sandbox) Terminal(id string) (Terminal, error) {
	if t, ok := find(sb.Terminals, id); ok {
		return t, nil
	}
	return Terminal{}, &TerminalError{Terminal: cutText(id, maxEventText)}
}

// OpenTerminal wakes the sandbox and starts a program on a terminal, unless its session is
// known to have ended. Errors: *SessionError; errors of the guest come as *guest.Error.
func (m *Manager) OpenTerminal(ctx context.Context, id ID, spec guest.TerminalSpec) (guest.Terminal, error) {
	if spec.Session != "" {
		if err := m.checkSession(id, spec); err != nil {
			return guest.Terminal{}, err
		}
	}
	lease, err := m.Acquire(ctx, id, CauseTerminal)
	if err != nil {
		return guest.Terminal{}, err
	}
	defer lease.Release()
	t, err := lease.b.guest.OpenTerminal(ctx, spec)
	if err == nil {
		lease.b.noteTerminal(t)
	}
	if isGuestError(err, guest.CodeNoSession) {
		err = &SessionError{Session: cutText(spec.Session, maxEventText)}
	}
	return t, err
}

// checkSession returns *SessionError if it is certain that the session of a new terminal has ended.
// A terminal that runs does not need it.
func (m *Manager) checkSession(id ID, spec guest.TerminalSpec) error {
	b, err := m.live(id)
	if err != nil {
		return err
	}
	sb := b.view.Load()
	if t, err := sb.Terminal(spec.ID); err == nil && t.State == guest.ProcessRunning {
		return nil
	}
	return sb.CheckSession(spec.Session)
}

// AttachTerminal wakes the sandbox if it is asleep, and connects to a terminal: see
// guest.Client.AttachTerminal. A stopped sandbox has no terminals, and is not woken. The stream may
// outlive the caller's lease; while the sandbox is asleep it is silent. Errors: *TerminalError,
// *guest.Error.
func (m *Manager) AttachTerminal(ctx context.Context, id ID, terminal string, since int64) (*guest.TerminalStream, error) {
	return onTerminal(ctx, m, id, terminal, func(b *liveSandbox) (*guest.TerminalStream, error) {
		return b.guest.AttachTerminal(ctx, terminal, since)
	})
}

// CloseTerminal ends the program of a terminal with everything that it started: SIGHUP, then
// SIGTERM, and SIGKILL after a grace. It wakes the sandbox if it is asleep. Errors: *TerminalError.
func (m *Manager) CloseTerminal(ctx context.Context, id ID, terminal string) (Terminal, error) {
	b, err := m.live(id)
	if err != nil {
		return Terminal{}, err
	}
	known, err := b.view.Load().Terminal(terminal)
	if err != nil {
		return Terminal{}, err
	}
	t, err := onTerminal(ctx, m, id, terminal, func(b *liveSandbox) (guest.Terminal, error) {
		return b.guest.CloseTerminal(ctx, terminal, stopProcessGrace)
	})
	_, missing := errors.AsType[*TerminalError](err)
	switch {
	case err == nil:
		known.Terminal = t
	case !missing: // otherwise it has ended meanwhile
		return Terminal{}, err
	}
	terminals.forget(b, known)
	return known, nil
}

// onTerminal calls do with a sandbox that is awake and may have the terminal. It does not start
// the container of one that has stopped.
func onTerminal[T any](ctx context.Context, m *Manager, id ID, terminal string, do func(*liveSandbox) (T, error)) (none T, err error) {
	b, err := m.live(id)
	if err != nil {
		return none, err
	}
	known, unknown := b.view.Load().Terminal(terminal)
	if known.Reason != "" {
		return none, b.missingTerminal(terminal)
	}
	lease, err := m.Rouse(ctx, id, CauseTerminal)
	if errors.Is(err, ErrNotRunning) {
		return none, b.missingTerminal(terminal)
	}
	if err != nil {
		return none, err
	}
	defer lease.Release()
	result, err := do(b)
	if isGuestError(err, guest.CodeNoTerminal) {
		err = b.missingTerminal(terminal)
		if now, _ := b.view.Load().Terminal(terminal); unknown == nil && now.Reason == "" {
			terminals.forget(b, known)
		}
	}
	return result, err
}

// missingTerminal returns the error of a terminal that the sandbox does not have, or no longer.
func (b *liveSandbox) missingTerminal(id string) error {
	known, _ := b.view.Load().Terminal(id)
	return &TerminalError{Terminal: cutText(id, maxEventText), Reason: known.Reason}
}

// shortenTerminal cuts every text of a terminal. The client has checked the others.
func shortenTerminal(t guest.Terminal) guest.Terminal {
	t.ID, t.Command = cutText(t.ID, maxKnownID), cutText(t.Command, maxBriefText)
	return t
}

// noteTerminal stores a terminal as last known.
func (b *liveSandbox) noteTerminal(t guest.Terminal) {
	terminals.note(b, Terminal{Terminal: shortenTerminal(t)}, t.Closed)
}
