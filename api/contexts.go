package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/sandbox"
)

// defaultCodeOutput and maxCodeOutput limit the output of code that the node holds. An
// interactive plot, which includes its library, has 5 MiB.
const (
	defaultCodeOutput = 4 << 20
	maxCodeOutput     = 16 << 20
)

// ContextPath is the part of a request's input that names a context.
type ContextPath struct {
	SandboxPath
	Context string `path:"context" maxLength:"64" doc:"Id of the context; python, javascript and typescript are the default contexts"`
}

type contextOutput struct {
	Location string `header:"Location"`
	Body     types.Context
}

type runCodeInput struct {
	ContextPath
	Exchange
}

// startContextCodes are the codes of routes that may start an interpreter.
var startContextCodes = []problem.Code{problem.InterpreterNotInstalled, problem.InterpreterFailed, problem.ContextLimitExceeded, problem.PathNotFound, problem.PathNotDirectory,
	problem.PathNotPermitted, problem.RequestTooLarge, problem.ProcessLimitExceeded, problem.SandboxDiskFull}

func (a *API) registerContexts() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/contexts", id: "open-context", tag: "contexts", status: http.StatusCreated,
		summary: "Open a context",
		description: "Wakes the sandbox. A context is an interpreter that executes code and retains its state: variables, imports and functions. A sandbox has at most 16. " +
			"They sleep with it, and end when it stops.",
		codes: slices.Concat(wakeCodes, startContextCodes, []problem.Code{problem.ContextExists}),
	}, withSandboxBody(a, a.openContext))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/contexts", id: "list-contexts", tag: "contexts",
		summary: "List contexts as last known", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.contexts))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/contexts/{context}", id: "get-context", tag: "contexts",
		summary: "Get a context as last known", description: "Never wakes the sandbox.",
		codes: []problem.Code{problem.ContextNotFound},
	}, withSandbox(a, a.context))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/contexts/{context}/run", id: "run-code", tag: "contexts",
		summary: "Execute code in a context",
		description: "Wakes the sandbox. The contexts `python`, `javascript` and `typescript` are opened by their first code. Code of a context is executed one after the other. " +
			"An exception is the result's error, with status 200. When the client disconnects, the code is interrupted; the context goes on.",
		codes:     slices.Concat(wakeCodes, startContextCodes, []problem.Code{problem.ContextNotFound, problem.ContextLost, problem.ContextBusy, problem.CallLimitExceeded, problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.CodeResult](a, "The code has ended; or with stream: its output while it is executed")},
		events: map[string]any{"stdout": types.Output{}, "stderr": types.Output{}, "result": types.CodeValue{}, "clear": types.CodeClear{},
			"error": types.CodeError{}, "complete": types.CodeComplete{}},
	}, a.runCode)
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/contexts/{context}/interrupt", id: "interrupt-context", tag: "contexts",
		summary: "Interrupt the code that a context executes", description: "Wakes the sandbox. The code ends as with Ctrl-C, and its `run` responds; the context goes on. Without code it does nothing.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.ContextNotFound, problem.ContextLost}),
	}, withSandbox(a, a.interruptContext))
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/contexts/{context}/restart", id: "restart-context", tag: "contexts",
		summary: "Start the interpreter of a context again", description: "Wakes the sandbox. The state is lost; id, language, working directory and environment stay. Also for a context that has ended.",
		codes: slices.Concat(wakeCodes, startContextCodes, []problem.Code{problem.ContextNotFound, problem.ContextExists}),
	}, withSandbox(a, a.restartContext))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/contexts/{context}", id: "close-context", tag: "contexts",
		summary: "Close a context", description: "Wakes the sandbox, unless the context has ended. Ends the interpreter with all that it started: SIGTERM, and SIGKILL after 1 s.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.ContextNotFound}),
	}, withSandbox(a, a.closeContext))
}

func (a *API) openContext(ctx context.Context, _ *SandboxPath, body *types.OpenContextRequest, sb sandbox.Sandbox) (*contextOutput, error) {
	if err := checkFolderAndEnv(body.Cwd, body.Env); err != nil {
		return nil, err
	}
	c, err := a.cfg.Sandboxes.OpenContext(ctx, sb.ID, sandbox.ContextSpec{ID: body.ID, Language: sandbox.Language(body.Language), Cwd: body.Cwd, Env: body.Env})
	if err != nil {
		return nil, contextError(sb, err)
	}
	return &contextOutput{
		Location: Prefix + "/sandbox/" + string(sb.ID) + "/contexts/" + url.PathEscape(c.ID),
		Body:     contextOf(c),
	}, nil
}

func (a *API) contexts(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.ContextList], error) {
	return respond(types.ContextList{Contexts: listOf(sb.OpenContexts(), contextOf)})
}

func (a *API) context(_ context.Context, in *ContextPath, sb sandbox.Sandbox) (*output[types.Context], error) {
	c, err := sb.Context(in.Context)
	return respondContext(sb, c, err)
}

func (a *API) interruptContext(ctx context.Context, in *ContextPath, sb sandbox.Sandbox) (*output[types.Context], error) {
	c, err := a.cfg.Sandboxes.InterruptContext(ctx, sb.ID, in.Context)
	return respondContext(sb, c, err)
}

func (a *API) restartContext(ctx context.Context, in *ContextPath, sb sandbox.Sandbox) (*output[types.Context], error) {
	c, err := a.cfg.Sandboxes.RestartContext(ctx, sb.ID, in.Context)
	return respondContext(sb, c, err)
}

func (a *API) closeContext(ctx context.Context, in *ContextPath, sb sandbox.Sandbox) (*output[types.Context], error) {
	c, err := a.cfg.Sandboxes.CloseContext(ctx, sb.ID, in.Context)
	return respondContext(sb, c, err)
}

func respondContext(sb sandbox.Sandbox, c sandbox.Context, err error) (*output[types.Context], error) {
	if err != nil {
		return nil, contextError(sb, err)
	}
	return respond(contextOf(c))
}

func contextOf(c sandbox.Context) types.Context {
	converted := types.Context{
		ID:        c.ID,
		Language:  types.Language(c.Language),
		Cwd:       c.Cwd,
		State:     types.ProcessState(c.State),
		ExitCode:  c.ExitCode,
		Signal:    c.Signal,
		Reason:    types.StateReason(c.Reason),
		Process:   c.Process,
		StartedAt: c.StartedAt,
	}
	if c.ExitedAt != nil {
		converted.ExitedAt = *c.ExitedAt
	}
	return converted
}

// contextError returns the problem of an error of a context.
func contextError(sb sandbox.Sandbox, err error) error {
	if missing, ok := errors.AsType[*sandbox.ContextError](err); ok {
		if missing.Closed {
			return problem.New(problem.ContextLost, missing.Error())
		}
		if missing.Known != nil {
			return problem.Newf(problem.ContextLost, "%v; start it again with POST %s/sandbox/%s/contexts/%s/restart", missing, Prefix, sb.Name, missing.Context)
		}
		return problem.Newf(problem.ContextNotFound, "%v; GET %s/sandbox/%s/contexts lists them", missing, Prefix, sb.Name)
	}
	if missing, ok := errors.AsType[*sandbox.InterpreterError](err); ok {
		return problem.Newf(problem.InterpreterNotInstalled, "%v; %s", missing, missing.Remedy())
	}
	if failed, ok := errors.AsType[*sandbox.KernelError](err); ok {
		return problem.New(problem.InterpreterFailed, validText(failed.Error(), maxGuestMessage))
	}
	switch {
	case errors.Is(err, sandbox.ErrContextExists):
		return problem.Newf(problem.ContextExists, "%v; use it, or close it first", err)
	case errors.Is(err, sandbox.ErrTooManyContexts):
		return problem.Newf(problem.ContextLimitExceeded, "%v; close one first", err)
	case errors.Is(err, sandbox.ErrContextBusy):
		return problem.Newf(problem.ContextBusy, "%v; wait, interrupt it, or use another context", err)
	case errors.Is(err, jupyter.ErrLost):
		return problem.New(problem.GuestLost, "lost the connection to the interpreter; it is unknown how the code ended")
	}
	return fromGuest(err)
}

// codeSpecOf converts a request to execute code.
func codeSpecOf(b types.RunCodeRequest) (sandbox.CodeSpec, error) {
	spec := sandbox.CodeSpec{Code: b.Code, Limit: cmp.Or(b.MaxOutputBytes, defaultCodeOutput)}
	switch {
	case b.Timeout != nil:
		spec.Timeout = time.Duration(*b.Timeout)
	case !b.Stream:
		spec.Timeout = bufferedTimeout
	}
	if spec.Timeout > maxExecTimeout {
		return spec, invalid("body.timeout", "longer than 24h", "use at most 24h, or start a background process: POST …/process")
	}
	return spec, nil
}

func (a *API) runCode(ctx context.Context, in *runCodeInput, body *types.RunCodeRequest) (*huma.StreamResponse, error) {
	spec, err := codeSpecOf(*body)
	if err != nil {
		return nil, err
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if err := a.calls.acquire(ctx, execSlots(spec.Limit)); err != nil {
		return nil, err
	}
	if body.Stream {
		if err := a.streams.acquire(ctx, 1); err != nil {
			return nil, err
		}
	}
	began := time.Now()
	run, err := a.cfg.Sandboxes.RunCode(ctx, sb.ID, in.Context, spec)
	if err != nil {
		return nil, contextError(sb, err)
	}
	if body.Stream {
		return &huma.StreamResponse{Body: func(huma.Context) {
			defer run.Close()
			a.serveEvents(in.Exchange, func(s *eventStream) { sendCode(s, sb, run, began) })
		}}, nil
	}
	defer run.Close()
	result := codeOutput{limit: spec.Limit}
	for {
		ev, err := run.Next()
		if err != nil {
			return nil, contextError(sb, err)
		}
		if ev.Kind == jupyter.Complete {
			return jsonResponse(in.Exchange, result.end(codeEndOf(ev, run.TimedOut(), began))), nil
		}
		result.add(ev)
	}
}

func codeEndOf(ev jupyter.Event, timedOut bool, began time.Time) types.CodeEnd {
	return types.CodeEnd{ExecutionCount: ev.Count, TimedOut: timedOut, Truncated: ev.Truncated, DurationMS: milliseconds(time.Since(began))}
}

// sendCode sends the events of code until it has ended. When a write fails, the request's
// context ends, and with it the run.
func sendCode(s *eventStream, sb sandbox.Sandbox, run *sandbox.CodeRun, began time.Time) {
	for {
		ev, err := run.Next()
		if err == nil && s.ctx.Err() != nil {
			return
		}
		if err != nil {
			s.fail(contextError(sb, err))
			return
		}
		switch ev.Kind {
		case jupyter.Stdout:
			sendText(s, "stdout", ev.Text)
		case jupyter.Stderr:
			sendText(s, "stderr", ev.Text)
		case jupyter.Result:
			s.send("result", "", codeValueOf(*ev.Result))
		case jupyter.Clear:
			s.send("clear", "", types.CodeClear{Wait: ev.Wait})
		case jupyter.Failed:
			s.send("error", "", codeErrorOf(*ev.Error))
		case jupyter.Complete:
			s.send("complete", "", types.CodeComplete{CodeEnd: codeEndOf(ev, run.TimedOut(), began)})
			return
		}
	}
}

// maxCodeText bounds the text of one event, in bytes.
const maxCodeText = 64 << 10

// sendText sends text in parts. In JSON a byte takes up to six, and clients bound events.
func sendText(s *eventStream, name, text string) {
	for len(text) > 0 {
		n := min(len(text), maxCodeText)
		for n < len(text) && !utf8.RuneStart(text[n]) {
			n--
		}
		s.send(name, "", types.NewOutput([]byte(text[:n])))
		text = text[n:]
	}
}

func codeValueOf(v jupyter.Rich) types.CodeValue {
	return types.CodeValue{Data: formsOf(v.Data), Metadata: formsOf(v.Metadata), Main: v.Main, DisplayID: v.DisplayID, Update: v.Update}
}

func formsOf(raw map[string]json.RawMessage) map[string]any {
	forms := make(map[string]any, len(raw))
	for name, data := range raw {
		forms[name] = data
	}
	return forms
}

func codeErrorOf(e jupyter.Exception) types.CodeError { return types.CodeError(e) }

// codeOutput collects the output of code, at most limit bytes.
type codeOutput struct {
	limit, size    int
	truncated      bool
	clearing       bool // before the next output
	stdout, stderr strings.Builder
	results        []types.CodeValue
	sizes          []int // of the results
	failure        *types.CodeError
}

func (o *codeOutput) add(ev jupyter.Event) {
	if ev.Kind == jupyter.Failed {
		o.failure = new(codeErrorOf(*ev.Error)) // it has bounds of its own
		return
	}
	if ev.Kind == jupyter.Clear {
		if o.clearing = ev.Wait; !ev.Wait {
			o.clear()
		}
		return
	}
	if o.clearing {
		o.clear()
	}
	switch ev.Kind {
	case jupyter.Stdout:
		o.write(&o.stdout, ev.Text)
	case jupyter.Stderr:
		o.write(&o.stderr, ev.Text)
	case jupyter.Result:
		o.addValue(*ev.Result)
	}
}

func (o *codeOutput) clear() {
	o.stdout.Reset()
	o.stderr.Reset()
	o.results, o.sizes, o.size, o.clearing = nil, nil, 0, false
}

func (o *codeOutput) write(to *strings.Builder, text string) {
	if free := o.limit - o.size; len(text) > free {
		text, o.truncated = strings.ToValidUTF8(text[:free], ""), true
	}
	to.WriteString(text)
	o.size += len(text)
}

// addValue adds a value, or replaces the one that it updates.
func (o *codeOutput) addValue(v jupyter.Rich) {
	value, size, i := codeValueOf(v), v.Size(), -1
	if v.Update && v.DisplayID != "" {
		i = slices.IndexFunc(o.results, func(old types.CodeValue) bool { return old.DisplayID == v.DisplayID })
	}
	replaced := 0
	if i >= 0 {
		replaced = o.sizes[i]
	}
	if o.size+size-replaced > o.limit {
		o.truncated = true
		return
	}
	o.size += size - replaced
	if i < 0 {
		o.results, o.sizes = append(o.results, value), append(o.sizes, size)
		return
	}
	value.Main, value.Update = o.results[i].Main, false
	o.results[i], o.sizes[i] = value, size
}

func (o *codeOutput) end(end types.CodeEnd) types.CodeResult {
	end.Truncated = end.Truncated || o.truncated
	return types.CodeResult{
		Stdout: o.stdout.String(), Stderr: o.stderr.String(), Results: append([]types.CodeValue{}, o.results...), Error: o.failure, CodeEnd: end,
	}
}
