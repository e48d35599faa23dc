package api

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// SessionPath is the part of a request's input that names a session.
type SessionPath struct {
	SandboxPath
	Session string `path:"session" maxLength:"64" doc:"Id of the session"`
}

type sessionOutput struct {
	Location string `header:"Location"`
	Body     types.Session
}

func (a *API) registerSessions() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/sessions", id: "open-session", tag: "sessions", status: http.StatusCreated,
		summary: "Open a session",
		description: "Wakes the sandbox. A session is a shell, bash or else sh, that runs the commands of `exec` with its id one after the other: " +
			"working directory, variables, functions and options persist. A sandbox has at most 128 sessions. They sleep with it, and end when it stops.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.SessionExists, problem.SessionLimitExceeded, problem.ShellNotFound, problem.PathNotFound, problem.PathNotDirectory,
			problem.PathNotPermitted, problem.RequestTooLarge, problem.ProcessLimitExceeded}),
	}, withSandboxBody(a, a.openSession))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/sessions", id: "list-sessions", tag: "sessions",
		summary: "List sessions as last known", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.sessions))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/sessions/{session}", id: "get-session", tag: "sessions",
		summary: "Get a session as last known", description: "Never wakes the sandbox.",
		codes: []problem.Code{problem.SessionNotFound},
	}, withSandbox(a, a.session))
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/sessions/{session}/interrupt", id: "interrupt-session", tag: "sessions",
		summary: "Interrupt the command that a session runs", description: "Wakes the sandbox. Sends SIGINT to the command, as Ctrl-C does. Its `exec` responds when it has ended; the session goes on. Without a command it does nothing.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.SessionNotFound, problem.SessionLost}),
	}, withSandbox(a, a.interruptSession))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/sessions/{session}", id: "close-session", tag: "sessions",
		summary: "Close a session", description: "Wakes the sandbox, unless it has stopped since the session was opened. Ends the shell with all that it started: SIGHUP to the shell, then SIGTERM, and SIGKILL after 5 s.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.SessionNotFound}),
	}, withSandbox(a, a.closeSession))
}

func (a *API) openSession(ctx context.Context, _ *SandboxPath, body *types.OpenSessionRequest, sb sandbox.Sandbox) (*sessionOutput, error) {
	if err := checkFolderAndEnv(body.Cwd, body.Env); err != nil {
		return nil, err
	}
	s, err := a.cfg.Sandboxes.OpenSession(ctx, sb.ID, guest.SessionSpec{ID: body.ID, Cwd: body.Cwd, Env: body.Env})
	if refused, ok := errors.AsType[*guest.Error](err); ok {
		switch refused.Code {
		case guest.CodeExists:
			return nil, problem.New(problem.SessionExists, validText(refused.Message, maxGuestMessage))
		case guest.CodeTooMany:
			return nil, problem.New(problem.SessionLimitExceeded, validText(refused.Message, maxGuestMessage))
		}
	}
	if err != nil {
		return nil, fromGuest(err)
	}
	return &sessionOutput{
		Location: Prefix + "/sandbox/" + string(sb.ID) + "/sessions/" + url.PathEscape(s.ID),
		Body:     sessionOf(s),
	}, nil
}

func (a *API) sessions(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.SessionList], error) {
	return respond(types.SessionList{Sessions: listOf(sb.Sessions, sessionOf)})
}

func (a *API) session(_ context.Context, in *SessionPath, sb sandbox.Sandbox) (*output[types.Session], error) {
	s, err := sb.Session(in.Session)
	if err != nil {
		return nil, sessionError(sb, err)
	}
	return respond(sessionOf(s))
}

func (a *API) interruptSession(ctx context.Context, in *SessionPath, sb sandbox.Sandbox) (*output[types.Session], error) {
	s, err := a.cfg.Sandboxes.InterruptSession(ctx, sb.ID, in.Session)
	if err != nil {
		return nil, sessionError(sb, err)
	}
	return respond(sessionOf(s))
}

func (a *API) closeSession(ctx context.Context, in *SessionPath, sb sandbox.Sandbox) (*output[types.Session], error) {
	s, err := a.cfg.Sandboxes.CloseSession(ctx, sb.ID, in.Session)
	if err != nil {
		return nil, sessionError(sb, err)
	}
	return respond(sessionOf(s))
}

func sessionOf(s sandbox.Session) types.Session {
	converted := types.Session{
		ID:        s.ID,
		PID:       s.PID,
		Shell:     s.Shell,
		Cwd:       s.Cwd,
		State:     types.ProcessState(s.State),
		ExitCode:  s.ExitCode,
		Signal:    s.Signal,
		Command:   s.Command,
		Reason:    types.StateReason(s.Reason),
		StartedAt: s.StartedAt,
	}
	if s.ExitedAt != nil {
		converted.ExitedAt = *s.ExitedAt
	}
	return converted
}

// checkSession refuses a session that is known to have ended, without waking the sandbox.
func (a *API) checkSession(id sandbox.ID, session string) error {
	if session == "" {
		return nil
	}
	sb, ok := a.cfg.Sandboxes.ByID(id)
	if !ok {
		return nil // destroyed meanwhile, as Acquire reports
	}
	if err := sb.CheckSession(session); err != nil {
		return sessionError(sb, err)
	}
	return nil
}

// sessionError returns the problem of an error of a session.
func sessionError(sb sandbox.Sandbox, err error) error {
	if missing, ok := errors.AsType[*sandbox.SessionError](err); ok {
		if missing.Known != nil {
			return problem.Newf(problem.SessionLost, "%v; open it again with POST %s/sandbox/%s/sessions", missing, Prefix, sb.Name)
		}
		return problem.Newf(problem.SessionNotFound, "%v; GET %s/sandbox/%s/sessions lists them", missing, Prefix, sb.Name)
	}
	return fromGuest(err)
}
