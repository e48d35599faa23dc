package api

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

type startOutput struct {
	Location string `header:"Location"`
	Body     types.Process
}

// ProcessPath is the part of a request's input that names a process.
type ProcessPath struct {
	SandboxPath
	Process string `path:"process" maxLength:"64" doc:"Id or name of the process. If several have the name: the running one, or else the last"`
}

type stopInput struct {
	ProcessPath
	Signal string `query:"signal" maxLength:"16" doc:"Only deliver this signal, such as SIGHUP. Default: SIGTERM to the whole process tree, and SIGKILL after 5 s"`
}

func (a *API) registerProcesses() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/process", id: "start-process", tag: "processes", status: http.StatusCreated,
		summary: "Start a process in the background", description: "Wakes the sandbox, which stores the output of the process. With ready, responds once the process is ready.",
		codes: slices.Concat(wakeCodes, readyCodes, []problem.Code{problem.NameInvalid, problem.CommandNotFound, problem.CommandNotExecutable, problem.ShellNotFound, problem.PathNotFound, problem.PathNotDirectory, problem.PathNotPermitted, problem.ProcessExists, problem.RequestTooLarge, problem.ProcessLimitExceeded}),
	}, withSandboxBody(a, a.startProcess))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/processes", id: "list-processes", tag: "processes",
		summary: "List processes as last known", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.processes))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/process/{process}", id: "get-process", tag: "processes",
		summary: "Get a process as last known", description: "Never wakes the sandbox.",
		codes: []problem.Code{problem.ProcessNotFound},
	}, withSandbox(a, a.process))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/process/{process}", id: "stop-process", tag: "processes",
		summary: "End a process, or send it a signal", description: "Wakes the sandbox if the process may still run. An ended process is not restarted.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.ProcessNotFound}),
	}, withSandbox(a, a.stopProcess))
}

func (a *API) startProcess(ctx context.Context, _ *SandboxPath, body *types.StartProcessRequest, sb sandbox.Sandbox) (*startOutput, error) {
	if err := checkCommand(body.Command); err != nil {
		return nil, err
	}
	var wait *guest.Wait
	if body.Ready != nil {
		w, err := waitOf(*body.Ready, "body.ready")
		if err != nil {
			return nil, err
		}
		wait = &w
		if err := a.calls.acquire(ctx, 1); err != nil {
			return nil, err
		}
	}
	process, err := a.cfg.Sandboxes.StartProcess(ctx, sb.ID, guest.ProcessSpec{Command: commandOf(body.Command), Name: body.Name, Restart: guest.Restart(body.Restart), Ready: wait})
	if err != nil {
		return nil, fromGuest(startError(err))
	}
	out := &startOutput{
		Location: Prefix + "/sandbox/" + string(sb.ID) + "/process/" + url.PathEscape(process.ID),
		Body:     processOf(process),
	}
	if body.Ready != nil {
		ready, err := a.awaitProcess(ctx, sb, process.ID, *wait)
		if err != nil {
			return nil, err
		}
		out.Body = ready.Process
	}
	return out, nil
}

// startError gives the error of a name in use its own code: the guest uses the same
// code for paths and processes that exist.
func startError(err error) error {
	if failure, ok := errors.AsType[*guest.Error](err); ok && failure.Code == guest.CodeExists {
		return problem.New(problem.ProcessExists, validText(failure.Message, maxGuestMessage))
	}
	return err
}

func (a *API) processes(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.ProcessList], error) {
	return respond(types.ProcessList{Processes: listOf(sb.Processes, processOf)})
}

func (a *API) process(_ context.Context, in *ProcessPath, sb sandbox.Sandbox) (*output[types.Process], error) {
	p, err := sb.Process(in.Process)
	if err != nil {
		return nil, noProcess(sb, err)
	}
	return respond(processOf(p))
}

// noProcess returns the problem of a *sandbox.ProcessError, and other errors unchanged.
func noProcess(sb sandbox.Sandbox, err error) error {
	missing, ok := errors.AsType[*sandbox.ProcessError](err)
	switch {
	case !ok:
		return err
	case missing.Known != nil:
		return problem.New(problem.ProcessNotFound, missing.Error())
	case len(sb.Processes) == 0:
		return problem.Newf(problem.ProcessNotFound, "%v; sandbox %s has had no background processes", missing, sb.Name)
	}
	var known []string
	for _, p := range sb.Processes[max(0, len(sb.Processes)-maxNamed):] {
		known = append(known, clip(p.Name)+" ("+p.ID+")")
	}
	return problem.Newf(problem.ProcessNotFound, "%v; a process is named by its id or name: %s", missing, strings.Join(known, ", "))
}

// maxNamed limits how many processes an error names.
const maxNamed = 10

func (a *API) stopProcess(ctx context.Context, in *stopInput, sb sandbox.Sandbox) (*output[types.Process], error) {
	process, err := a.cfg.Sandboxes.StopProcess(ctx, sb.ID, in.Process, strings.ToUpper(in.Signal))
	if err != nil {
		return nil, fromGuest(noProcess(sb, err))
	}
	return respond(processOf(process))
}
