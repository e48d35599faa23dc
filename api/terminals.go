package api

import (
	"context"
	"errors"
	"net/http"
	"reflect"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// TerminalPath is the part of a request's input that names a terminal.
type TerminalPath struct {
	SandboxPath
	Terminal string `path:"terminal" maxLength:"64" doc:"Id of the terminal"`
}

type terminalInput struct {
	SandboxPath
	Exchange
	SignedQuery
	ID      string `query:"id" maxLength:"64" pattern:"^[A-Za-z0-9_][A-Za-z0-9._-]*$" doc:"Id of the terminal. One that runs is joined, otherwise it is opened. Default: a new one"`
	Cols    uint16 `query:"cols" minimum:"1" maximum:"1000" default:"80" doc:"Width in characters"`
	Rows    uint16 `query:"rows" minimum:"1" maximum:"1000" default:"24" doc:"Height in characters"`
	Since   int64  `query:"since" minimum:"-1" default:"-1" doc:"Cursor of an earlier connection to the terminal with this id, to resume after it; the terminal is never opened. Default: the output that the sandbox still has"`
	Command string `query:"command" maxLength:"4096" doc:"Command line of a new terminal, for /bin/sh -c. Default: an interactive bash, or sh"`
	Cwd     string `query:"cwd" maxLength:"4096" doc:"Working directory of a new terminal, an absolute path. Default: the session's, or the image's"`
	Session string `query:"session" maxLength:"64" doc:"Id of a session. A new terminal starts with the working directory and the exported variables of its shell"`
	Wake    bool   `query:"wake" default:"true" doc:"Whether to wake the sandbox. If false, the connection to one that is asleep is refused with sandbox_asleep: for clients that reconnect by themselves"`
	Origin  string `query:"origin" maxLength:"255" doc:"Of a signed URL: the origin of the web pages that may use it"`
}

func (a *API) registerTerminals() {
	a.terminalMessages = map[types.TerminalMessageType]*huma.Schema{
		types.TerminalMessageTypeResize: a.schema(reflect.TypeFor[types.TerminalResize]()), types.TerminalMessageTypeSignal: a.schema(reflect.TypeFor[types.TerminalSignal]()),
	}
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/terminal", id: "connect-terminal", tag: "terminals", signed: true, unsigned: terminalParameters, status: http.StatusSwitchingProtocols,
		summary: "Open or join a terminal, over a WebSocket",
		description: "Wakes the sandbox, unless `wake` is false. Binary messages carry what is typed and what is printed. The node first sends the last output of the terminal, " +
			"at most 256 KiB, then the message ready. The terminal and its program stay when the client disconnects, and when the sandbox sleeps; " +
			"what is typed wakes it. A terminal may have several clients. A client that does not read for 2 s, reads too slowly for 4 s in total, or holds faster clients up for 250 ms, " +
			"misses output beyond 256 KiB and gets the message truncated, so that it delays neither the program nor the other clients. All terminals end when the sandbox stops. With `session`, a new terminal waits up to 10 s until the session runs no command. With a signed URL, refusals are messages of the WebSocket, unless the URL is invalid, a parameter is not as its schema describes it, or the URL is not for the page's origin.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.CommandNotFound, problem.CommandNotExecutable, problem.ShellNotFound, problem.PathNotFound, problem.PathNotDirectory,
			problem.PathNotPermitted, problem.TerminalNotFound, problem.TerminalLost, problem.TerminalLimitExceeded, problem.StreamLimitExceeded, problem.UpgradeRequired,
			problem.OriginNotAllowed, problem.SandboxAsleep, problem.SandboxStopped, problem.SessionNotFound, problem.SessionLost, problem.SessionBusy}),
		responses: a.socketResponse(
			[]any{types.TerminalTruncated{}, types.TerminalReady{}, types.TerminalExit{}, types.TerminalFailed{}},
			[]any{types.TerminalResize{}, types.TerminalSignal{}},
		),
	}, a.terminalSocket)
	a.registerTerminalURL()
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/terminals", id: "list-terminals", tag: "terminals",
		summary: "List terminals as last known", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.terminals))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/terminal/{terminal}", id: "close-terminal", tag: "terminals",
		summary: "Close a terminal", description: "Wakes the sandbox, unless it has stopped since the terminal was opened. Ends the program with its whole process tree: SIGHUP to the program, then SIGTERM, and SIGKILL after 5 s.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.TerminalNotFound}),
	}, withSandbox(a, a.closeTerminal))
}

func (a *API) terminals(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.TerminalList], error) {
	return respond(types.TerminalList{Terminals: listOf(sb.Terminals, terminalOf)})
}

func (a *API) closeTerminal(ctx context.Context, in *TerminalPath, sb sandbox.Sandbox) (*output[types.Terminal], error) {
	t, err := a.cfg.Sandboxes.CloseTerminal(ctx, sb.ID, in.Terminal)
	if err != nil {
		return nil, terminalError(sb, err)
	}
	return respond(terminalOf(t))
}

func terminalOf(t sandbox.Terminal) types.Terminal {
	converted := types.Terminal{
		ID:        t.ID,
		PID:       t.PID,
		Command:   t.Command,
		Cols:      t.Cols,
		Rows:      t.Rows,
		State:     types.ProcessState(t.State),
		ExitCode:  t.ExitCode,
		Signal:    t.Signal,
		Reason:    types.StateReason(t.Reason),
		StartedAt: t.StartedAt,
	}
	if t.ExitedAt != nil {
		converted.ExitedAt = *t.ExitedAt
	}
	return converted
}

// terminalError returns the problem of an error of a terminal.
func terminalError(sb sandbox.Sandbox, err error) error {
	if missing, ok := errors.AsType[*sandbox.TerminalError](err); ok {
		if missing.Reason != "" {
			return problem.Newf(problem.TerminalLost, "%v; connect without since to open a new one", missing)
		}
		return problem.Newf(problem.TerminalNotFound, "%v; GET %s/sandbox/%s/terminals lists them", missing, Prefix, sb.Name)
	}
	if refused, ok := errors.AsType[*guest.Error](err); ok && refused.Code == guest.CodeTooMany {
		return problem.New(problem.TerminalLimitExceeded, validText(refused.Message, maxGuestMessage))
	}
	return sessionError(sb, err)
}

func (a *API) terminalSocket(ctx context.Context, in *terminalInput) (*huma.StreamResponse, error) {
	if p := checkUpgrade(in.r); p != nil {
		return nil, p
	}
	sb, err := a.lookup(ctx, in.SandboxPath.ID)
	if err != nil {
		return nil, err
	}
	signed := callOf(ctx).signed
	if signed {
		if p := checkOrigin(in.r, in.Origin); p != nil {
			return nil, p
		}
	}
	stream, id, err := a.connectTerminal(ctx, sb.ID, in)
	if err != nil {
		return a.refuseTerminal(ctx, in, terminalError(sb, err))
	}
	return &huma.StreamResponse{Body: func(huma.Context) {
		defer stream.Close()
		s := &terminalSocket{api: a, sandbox: sb, terminal: id, stream: stream, cursor: max(0, in.Since)}
		if s.accept(a, in.Exchange) != nil {
			return
		}
		if signed {
			defer s.endAt(time.Unix(in.Expires, 0))()
		}
		s.serve(a, s.receive, s.run, terminalFailed)
	}}, nil
}

// connectTerminal joins the terminal, after it has opened it unless it runs or since is given.
func (a *API) connectTerminal(ctx context.Context, sb sandbox.ID, in *terminalInput) (stream *guest.TerminalStream, id string, err error) {
	id = in.ID
	if in.Cwd != "" {
		if err := checkPath("query.cwd", in.Cwd); err != nil {
			return nil, "", err
		}
	}
	if in.Since >= 0 && id == "" {
		return nil, "", invalid("query.since", "no id given", "send the id of the terminal that the cursor belongs to")
	}
	if err := a.streams.acquire(ctx, 1); err != nil {
		return nil, "", err
	}
	if !in.Wake {
		release, err := a.holdRunning(sb, in.Since >= 0)
		if err != nil {
			return nil, "", err
		}
		defer release()
	}
	if in.Since < 0 {
		t, err := a.cfg.Sandboxes.OpenTerminal(ctx, sb, guest.TerminalSpec{
			ID: id, Session: in.Session, Command: guest.Command{Command: in.Command, Cwd: in.Cwd}, TerminalSize: guest.TerminalSize{Cols: in.Cols, Rows: in.Rows},
		})
		refused, ok := errors.AsType[*guest.Error](err)
		switch {
		case err == nil:
			id = t.ID
		case !ok || refused.Code != guest.CodeExists:
			return nil, "", err
		}
	}
	stream, err = a.cfg.Sandboxes.AttachTerminal(ctx, sb, id, in.Since)
	return stream, id, err
}
