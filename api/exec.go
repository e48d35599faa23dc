package api

import (
	"cmp"
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// bufferedTimeout is the default timeout of a command whose output is collected: its
	// client sees nothing until the command ends. Streams have no default.
	bufferedTimeout = 10 * time.Minute
	maxExecTimeout  = 24 * time.Hour
	// defaultOutput and maxOutput limit the bytes that are collected of stdout and of
	// stderr. The rest is read and dropped, so that the command is not blocked.
	defaultOutput = 1 << 20
	maxOutput     = 10 << 20
	// responseGrace is how long the node waits for the result after a command's timeout.
	// The guest enforces the timeout, but is not trusted to.
	responseGrace = 15 * time.Second
)

// execCodes are the codes of both routes that run a command.
var execCodes = []problem.Code{problem.CommandNotFound, problem.CommandNotExecutable, problem.ShellNotFound, problem.PathNotFound, problem.PathNotDirectory,
	problem.PathNotPermitted, problem.RequestTooLarge, problem.ProcessLimitExceeded, problem.StreamLimitExceeded, problem.SessionNotFound, problem.SessionLost, problem.SessionBusy}

func (a *API) registerExec() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/exec", id: "exec", tag: "exec",
		summary: "Run a command",
		description: "Wakes the sandbox. When the client disconnects, the whole process tree is killed; a command of a session is interrupted. " +
			"If it is unknown how the command ended, the response is an error, never an exit code.",
		codes:     slices.Concat(wakeCodes, execCodes, []problem.Code{problem.CallLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.ExecResult](a, "The command has ended; or with stream: its output while it runs")},
		events:    map[string]any{"start": types.ExecStart{}, "stdout": types.Output{}, "stderr": types.Output{}, "complete": types.ExecComplete{}},
	}, a.exec)
}

func commandOf(c types.Command) guest.Command {
	return guest.Command{Command: c.Command, Argv: c.Argv, Cwd: c.Cwd, Env: c.Env}
}

// execRequestOf converts a request to run a command for the guest.
func execRequestOf(b types.ExecRequest) (guest.ExecRequest, error) {
	if err := checkCommand(b.Command); err != nil {
		return guest.ExecRequest{}, err
	}
	if err := checkSessionCommand(b.Command, b.Session); err != nil {
		return guest.ExecRequest{}, err
	}
	stdin, err := decode(b.Stdin, b.StdinEncoding, "body.stdin")
	if err != nil {
		return guest.ExecRequest{}, err
	}
	req := guest.ExecRequest{Command: commandOf(b.Command), Session: b.Session, Stdin: stdin}
	switch {
	case b.Timeout != nil:
		req.Timeout = time.Duration(*b.Timeout)
	case !b.Stream:
		req.Timeout = bufferedTimeout
	}
	if req.Timeout > maxExecTimeout {
		return guest.ExecRequest{}, invalid("body.timeout", "longer than 24h", "use at most 24h, or start a background process: POST …/process")
	}
	return req, nil
}

// checkCommand refuses an invalid command before the sandbox is woken for it.
func checkCommand(c types.Command) error {
	const want = `send either "command": "ls -l" or "argv": ["ls", "-l"]`
	switch {
	case c.Command == "" && (len(c.Argv) == 0 || c.Argv[0] == ""):
		return invalid("body.command", "no command given", want)
	case c.Command != "" && len(c.Argv) > 0:
		return invalid("body.command", "both command and argv are given", want)
	case strings.ContainsRune(c.Command, 0) || slices.ContainsFunc(c.Argv, func(word string) bool { return strings.ContainsRune(word, 0) }):
		return invalid("body.command", "contains a NUL byte", "send binary data as stdin, in base64")
	}
	return checkFolderAndEnv(c.Cwd, c.Env)
}

func checkFolderAndEnv(cwd string, env map[string]string) error {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return invalid("body.env", strconv.Quote(clip(name))+" is not a valid variable", "a name has no =, and neither name nor value a NUL byte")
		}
	}
	if cwd == "" {
		return nil
	}
	return checkPath("body.cwd", cwd)
}

// checkSessionCommand refuses what a session does not take from a command.
func checkSessionCommand(c types.Command, session string) error {
	if session == "" {
		return nil
	}
	const want = "change it in the session, with cd and export"
	if c.Cwd != "" {
		return invalid("body.cwd", "a session has a working directory of its own", want)
	}
	if len(c.Env) > 0 {
		return invalid("body.env", "a session has an environment of its own", want)
	}
	return nil
}

// running is a started command.
type running struct {
	client context.Context // ends when the client disconnects
	stream *guest.ExecStream
	cancel context.CancelFunc
	lease  *sandbox.Lease
	began  time.Time
	// outcome is the label of the metric.
	outcome string
}

func (a *API) exec(ctx context.Context, in *sandboxExchange, body *types.ExecRequest) (*huma.StreamResponse, error) {
	req, err := execRequestOf(*body)
	if err != nil {
		return nil, err
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	maxBytes := cmp.Or(body.MaxOutputBytes, defaultOutput)
	if body.Stream {
		err = a.streams.acquire(ctx, 1)
	} else {
		err = a.calls.acquire(ctx, execSlots(maxBytes))
	}
	if err != nil {
		return nil, err
	}
	run, err := a.start(ctx, sb.ID, req)
	if err != nil {
		return nil, err
	}
	if body.Stream {
		return &huma.StreamResponse{Body: func(huma.Context) {
			defer a.finish(run)
			a.serveEvents(in.Exchange, run.sendEvents)
		}}, nil
	}
	defer a.finish(run)
	result, err := run.collect(maxBytes)
	if err != nil {
		return nil, err
	}
	return jsonResponse(in.Exchange, result), nil
}

// execSlots returns how many calls a command counts as: one for each MiB of output, which
// limits the memory of all commands.
func execSlots(maxOutput int) int64 {
	return max(1, (int64(maxOutput)+defaultOutput-1)/defaultOutput)
}

// start wakes the sandbox and starts the command. The caller calls finish.
func (a *API) start(ctx context.Context, id sandbox.ID, req guest.ExecRequest) (*running, error) {
	if err := a.checkSession(id, req.Session); err != nil {
		return nil, err
	}
	lease, err := a.cfg.Sandboxes.Acquire(ctx, id, sandbox.CauseExec)
	if err != nil {
		return nil, err
	}
	run := &running{client: ctx, cancel: func() {}, lease: lease, began: time.Now(), outcome: outcomeLost}
	if req.Timeout > 0 {
		ctx, run.cancel = context.WithTimeout(ctx, req.Timeout+responseGrace)
	}
	if run.stream, err = lease.Guest().Exec(ctx, req); err != nil {
		run.cancel()
		lease.Release()
		return nil, fromGuest(err)
	}
	return run, nil
}

// finish kills the command if it is still running, and releases the sandbox.
func (a *API) finish(run *running) {
	run.stream.Close()
	run.cancel()
	run.lease.Release()
	a.cfg.Metrics.observeExec(run.outcome, time.Since(run.began))
}

// next returns the next event and sets outcome at the end of the command.
func (run *running) next() (guest.ExecEvent, error) {
	ev, err := run.stream.Next()
	switch {
	case err != nil && clientGone(run.client):
		run.outcome = outcomeClient
	case err == io.EOF, err == nil && ev.Kind == guest.FrameComplete && ev.Result == nil:
		err = guest.ErrLost // EOF comes after the complete event only, after which next is not called
	case err == nil && ev.Kind == guest.FrameComplete:
		run.outcome = outcomeExited
		if ev.Result.TimedOut {
			run.outcome = outcomeTimedOut
		}
	}
	return ev, fromGuest(err)
}

// collect reads all output until the command ends, and returns at most limit bytes of
// each stream.
func (run *running) collect(limit int) (*types.ExecResult, error) {
	stdout, stderr := capture{limit: limit}, capture{limit: limit}
	for {
		ev, err := run.next()
		if err != nil {
			return nil, err
		}
		switch ev.Kind {
		case guest.FrameStdout:
			stdout.add(ev.Data)
		case guest.FrameStderr:
			stderr.add(ev.Data)
		case guest.FrameComplete:
			r := &types.ExecResult{Truncated: stdout.truncated || stderr.truncated, ExecExit: execExitOf(ev.Result)}
			r.Stdout, r.StdoutEncoding = stdout.text()
			r.Stderr, r.StderrEncoding = stderr.text()
			return r, nil
		}
	}
}

// sendEvents sends the output until the command ends.
func (run *running) sendEvents(s *eventStream) {
	// Next does not end when the client disconnects; closing the stream ends it and the
	// command.
	defer context.AfterFunc(s.ctx, func() { run.stream.Close() })()
	run.client = s.ctx
	stdout, stderr := outputStream{s: s, event: "stdout"}, outputStream{s: s, event: "stderr"}
	for {
		ev, err := run.next()
		if err != nil {
			s.fail(err)
			return
		}
		switch ev.Kind {
		case guest.FrameStart:
			s.send("start", "", types.ExecStart{PID: ev.PID})
		case guest.FrameStdout:
			stdout.send(ev.Data)
		case guest.FrameStderr:
			stderr.send(ev.Data)
		case guest.FrameComplete:
			stdout.flush()
			stderr.flush()
			s.send("complete", "", types.ExecComplete{ExecExit: execExitOf(ev.Result)})
			return
		}
	}
}

func execExitOf(r *guest.ExecResult) types.ExecExit {
	return types.ExecExit{ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, DurationMS: milliseconds(r.Duration)}
}

// outputStream sends a stream of bytes as events, whose text never ends in the middle
// of a rune. It ignores errors of writes: they end the stream's context.
type outputStream struct {
	s      *eventStream
	event  string
	joiner runeJoiner
}

func (o *outputStream) send(b []byte) { o.emit(o.joiner.join(b)) }

// flush sends the bytes that might have been the start of a rune.
func (o *outputStream) flush() { o.emit(o.joiner.remainder()) }

func (o *outputStream) emit(b []byte) {
	if len(b) == 0 {
		return
	}
	o.s.send(o.event, "", types.NewOutput(b))
}
