package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// Bounds of the sessions that the node stores. They take less than 100 KiB of the sandbox's
// record.
const (
	maxSessions      = 144 // more than a guest runs
	maxEndedSessions = 16  // whose shell has ended by itself, as many as the guest remembers
)

// Session is a session as last known.
type Session struct {
	guest.Session
	// Reason is why its sandbox stopped while the shell ran; set with guest.ProcessLost.
	Reason StateReason `json:"reason,omitempty"`
}

var sessions = programs[Session]{func(sb *Sandbox) *[]Session { return &sb.Sessions }, maxSessions, maxEndedSessions}

func (s Session) key() string                             { return s.ID }
func (s Session) status() (guest.ProcessState, time.Time) { return s.State, s.StartedAt }
func (s Session) current() bool                           { return s.State != guest.ProcessLost }

func (s *Session) lose(reason StateReason) {
	if s.State == guest.ProcessRunning {
		s.State, s.Reason = guest.ProcessLost, reason
	}
}

// SessionError: a sandbox does not have a session with that id, or the session has ended. It
// is ErrNotFound.
type SessionError struct {
	Session string   // as in the call
	Known   *Session // that has ended
}

func (e *SessionError) Error() string {
	switch {
	case e.Known == nil:
		return fmt.Sprintf("the sandbox has no session %q", e.Session)
	case e.Known.State == guest.ProcessLost:
		return fmt.Sprintf("the session %s ended when its sandbox stopped (%s)", e.Session, e.Known.Reason)
	}
	return fmt.Sprintf("the session %s %s", e.Session, e.Known.Ending())
}

func (e *SessionError) Unwrap() error { return ErrNotFound }

// Session returns the session with that id, as last known. Errors: *SessionError.
func (sb *Sandbox) Session(id string) (Session, error) {
	if s, ok := find(sb.Sessions, id); ok {
		return s, nil
	}
	return Session{}, &SessionError{Session: cutText(id, maxEventText)}
}

// CheckSession returns *SessionError if it is certain, without waking the sandbox, that the
// session cannot execute commands.
func (sb *Sandbox) CheckSession(id string) error {
	s, err := sb.Session(id)
	switch {
	case err == nil && s.State != guest.ProcessRunning:
		return &SessionError{Session: s.ID, Known: &s}
	case sb.State == StateStopped || sb.State == StateArchived:
		return err
	}
	return nil
}

// OpenSession wakes the sandbox and starts a shell. Errors of the guest come as *guest.Error.
func (m *Manager) OpenSession(ctx context.Context, id ID, spec guest.SessionSpec) (Session, error) {
	lease, err := m.Acquire(ctx, id, CauseSession)
	if err != nil {
		return Session{}, err
	}
	defer lease.Release()
	s, err := lease.b.guest.OpenSession(ctx, spec)
	if err == nil {
		lease.b.noteSession(s)
	}
	return Session{Session: s}, err
}

// InterruptSession sends SIGINT to the command that the session executes, if any. It wakes the
// sandbox unless the session has ended. Errors: *SessionError.
func (m *Manager) InterruptSession(ctx context.Context, id ID, session string) (Session, error) {
	return m.onSession(ctx, id, session, func(b *liveSandbox) (guest.Session, error) {
		return b.guest.InterruptSession(ctx, session)
	})
}

// CloseSession ends the shell of a session and everything that it started: SIGHUP and SIGTERM,
// SIGKILL after a grace. It wakes the sandbox if it is asleep. A stopped sandbox has no shells, and
// is not woken. Errors: *SessionError.
func (m *Manager) CloseSession(ctx context.Context, id ID, session string) (Session, error) {
	b, err := m.live(id)
	if err != nil {
		return Session{}, err
	}
	view := b.view.Load()
	known, err := view.Session(session)
	if err != nil {
		return Session{}, err
	}
	if known.State == guest.ProcessLost || known.State == guest.ProcessExited && (view.State == StateStopped || view.State == StateArchived) {
		sessions.forget(b, known)
		return known, nil
	}
	lease, err := m.Acquire(ctx, id, CauseSession)
	if err != nil {
		return Session{}, err
	}
	defer lease.Release()
	s, err := b.guest.CloseSession(ctx, session, stopProcessGrace)
	switch {
	case isGuestError(err, guest.CodeNoSession): // it has ended meanwhile and was forgotten
	case err != nil:
		return Session{}, err
	default:
		known.Session = s
	}
	sessions.forget(b, known)
	return known, nil
}

// onSession calls f with a running sandbox whose session may run.
func (m *Manager) onSession(ctx context.Context, id ID, session string, f func(*liveSandbox) (guest.Session, error)) (Session, error) {
	b, err := m.live(id)
	if err != nil {
		return Session{}, err
	}
	if err := b.view.Load().CheckSession(session); err != nil {
		return Session{}, err
	}
	lease, err := m.Acquire(ctx, id, CauseSession)
	if err != nil {
		return Session{}, err
	}
	defer lease.Release()
	s, err := f(b)
	if isGuestError(err, guest.CodeNoSession) {
		err = &SessionError{Session: cutText(session, maxEventText)}
	}
	return Session{Session: s}, err
}

// shortenSession cuts every text of a session. The client has checked the others.
func shortenSession(s guest.Session) guest.Session {
	s.ID, s.Shell, s.Cwd = cutText(s.ID, maxKnownID), cutText(s.Shell, maxKnownID), cutText(s.Cwd, maxBriefText)
	s.Command = cutText(s.Command, maxBriefText)
	if s.State == guest.ProcessRunning {
		s.Command, s.ExitedAt = "", nil
	}
	return s
}

// noteSession stores a session as last known.
func (b *liveSandbox) noteSession(s guest.Session) {
	sessions.note(b, Session{Session: shortenSession(s)}, s.Closed)
}
