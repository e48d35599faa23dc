package guest

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// SessionSpec is a session to open.
type SessionSpec struct {
	// ID is unique among the sessions of a sandbox whose shell runs. If it is empty, the guest
	// generates one.
	ID string `json:"id,omitempty"`
	// Cwd, Env, Changes and Defaults apply to the start of the shell, as in a Command.
	Cwd      string             `json:"cwd,omitempty"`
	Env      map[string]string  `json:"env,omitempty"`
	Changes  map[string]*string `json:"changes,omitempty"`
	Defaults map[string]string  `json:"defaults,omitempty"`
}

// Command returns a Command without a program.
func (s SessionSpec) Command() Command {
	return Command{Cwd: s.Cwd, Env: s.Env, Changes: s.Changes, Defaults: s.Defaults}
}

// Session is a shell that executes commands one after the other, and keeps its working
// directory, variables, functions and options between them.
type Session struct {
	ID        string       `json:"id"`
	PID       int          `json:"pid"`   // of the shell, inside the sandbox
	Shell     string       `json:"shell"` // bash or sh
	Cwd       string       `json:"cwd"`   // at its start
	State     ProcessState `json:"state"`
	ExitCode  *int         `json:"exit_code,omitempty"` // nil while the shell runs
	Signal    string       `json:"signal,omitempty"`
	Command   string       `json:"command,omitempty"` // during which the shell ended
	StartedAt time.Time    `json:"started_at"`
	ExitedAt  *time.Time   `json:"exited_at,omitempty"`
	// Unresponsive: the shell was killed because it did not end a command when it was
	// interrupted.
	Unresponsive bool `json:"unresponsive,omitempty"`
	// Closed: the session is forgotten.
	Closed bool `json:"closed,omitempty"`
}

// Ending describes how the shell ended, such as: has ended: its shell exited with code 1.
func (s Session) Ending() string {
	text := "has ended"
	switch {
	case s.Unresponsive:
		text += ": its shell was killed because it ignored SIGINT"
	case s.Signal != "":
		text += ": its shell was ended by " + s.Signal
	case s.ExitCode != nil:
		text += fmt.Sprintf(": its shell exited with code %d", *s.ExitCode)
	}
	if s.Command != "" {
		text += fmt.Sprintf(" in the command %q", s.Command)
	}
	return text
}

const (
	sessionIDPrefix = "s-"
	// maxSessionWait is how long a command without a timeout waits for others of its session.
	maxSessionWait = 24 * time.Hour
	maxCwd         = 4 << 10
)

// MaxSessionCommand bounds Session.Command.
const MaxSessionCommand = 256

// NewSessionID returns a random id of a session, such as "s-k3f9x2m7".
func NewSessionID() string { return sessionIDPrefix + randomID() }

// OpenSession starts a shell: bash, or sh in an image without bash. Errors: CodeExists when
// a session with that id runs, CodeTooMany, CodeNoShell, CodeInvalid.
func (c *Client) OpenSession(ctx context.Context, spec SessionSpec) (Session, error) {
	spec.Defaults, spec.Changes = c.defaultsOr(spec.Defaults), c.changesOr(spec.Changes)
	return c.session(ctx, request{method: http.MethodPost, route: RouteSession, json: spec})
}

// InterruptSession sends SIGINT to the command that the session executes, if any. Errors:
// CodeNoSession, CodeSessionLost.
func (c *Client) InterruptSession(ctx context.Context, id string) (Session, error) {
	return c.session(ctx, request{method: http.MethodPost, route: sessionRoute(id, SuffixInterrupt)})
}

// CloseSession ends the shell and everything that it started: SIGHUP and SIGTERM, SIGKILL to
// what is left after grace. It returns when they have ended. The session is forgotten then.
// Errors: CodeNoSession.
func (c *Client) CloseSession(ctx context.Context, id string, grace time.Duration) (Session, error) {
	return c.session(ctx, request{
		method: http.MethodDelete, route: sessionRoute(id, ""),
		query: url.Values{"grace": {grace.String()}}, wait: grace,
	})
}

func sessionRoute(id, suffix string) string { return RouteSession + "/" + url.PathEscape(id) + suffix }

func (c *Client) session(ctx context.Context, r request) (Session, error) {
	s, err := get[Session](ctx, c, r)
	if err != nil {
		return Session{}, err
	}
	return s, s.validate()
}

// validate refuses an invalid session.
func (s *Session) validate() error {
	if s.State != ProcessRunning && s.State != ProcessExited {
		return fmt.Errorf("guest reported a session that is %q", Shorten(string(s.State), 20))
	}
	if s.PID <= 0 || s.ID == "" || len(s.ID) > maxTerminalID || len(s.Command) > MaxSessionCommand || len(s.Shell) > maxSignal || len(s.Cwd) > maxCwd {
		return fmt.Errorf("guest reported the unusable session %q with the pid %d", Shorten(s.ID, 20), s.PID)
	}
	return checkEnd(s.State, s.ExitCode, s.Signal)
}
