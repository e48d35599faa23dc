package api

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

type processOutput struct {
	Body types.Process
}

type processesOutput struct {
	Body types.ProcessList
}

// ProcessPath is the part of a request's input that names a process.
type ProcessPath struct {
	SandboxPath
	Process string `path:"process" maxLength:"64" doc:"Id or name of the process; of several with the name, the one that runs, or else the last"`
}

type stopInput struct {
	ProcessPath
	Signal string `query:"signal" maxLength:"16" doc:"Only deliver this one, such as SIGHUP; when missing, SIGTERM to the whole tree and SIGKILL after 5 s"`
}

func (a *API) registerProcesses() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/process", id: "start-process", tag: "processes", status: http.StatusCreated,
		summary: "Start a process in the background", description: "Wakes the sandbox. What the process prints is kept for its logs.",
		codes: onSandbox(wakeCodes, []problem.Code{problem.NameInvalid, problem.CommandNotFound, problem.CommandNotExecutable, problem.ShellNotFound, problem.PathNotFound, problem.PathNotDirectory, problem.PathNotPermitted, problem.ProcessExists, problem.RequestTooLarge, problem.ProcessLimitExceeded}),
	}, a.startProcess)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/processes", id: "list-processes", tag: "processes",
		summary: "List processes as last known", description: "Wakes nothing.",
		codes: onSandbox(),
	}, a.processes)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/process/{process}", id: "get-process", tag: "processes",
		summary: "Get a process as last known", description: "Wakes nothing.",
		codes: onSandbox([]problem.Code{problem.ProcessNotFound}),
	}, a.process)
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/process/{process}", id: "stop-process", tag: "processes",
		summary: "End a process, or send it a signal", description: "Wakes the sandbox if the process may still run. A process that was ended is not started again.",
		codes: onSandbox(wakeCodes, []problem.Code{problem.ProcessNotFound}),
	}, a.stopProcess)
}

func (a *API) startProcess(ctx context.Context, in *SandboxPath, body *types.StartProcessRequest) (*processOutput, error) {
	if err := checkCommand(body.Command); err != nil {
		return nil, err
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	process, err := a.sandboxes.StartProcess(ctx, sb.ID, guest.ProcessSpec{
		Command: body.Command.Command,
		Argv:    body.Argv,
		Cwd:     body.Cwd,
		Env:     body.Env,
		Name:    body.Name,
		Restart: guest.Restart(body.Restart),
	})
	if err != nil {
		return nil, fromGuest(startError(err))
	}
	return &processOutput{Body: processOf(process)}, nil
}

// startError gives the error of a name in use its own code: the guest uses the same
// code for paths and processes that exist.
func startError(err error) error {
	var failure *guest.Error
	if errors.As(err, &failure) && failure.Code == guest.CodeExists {
		return problem.New(problem.ProcessExists, validText(failure.Message, maxGuestMessage))
	}
	return err
}

func (a *API) processes(ctx context.Context, in *SandboxPath) (*processesOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return &processesOutput{Body: types.ProcessList{Processes: listOf(sb.Processes, processOf)}}, nil
}

func (a *API) process(ctx context.Context, in *ProcessPath) (*processOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	p, err := sb.Process(in.Process)
	if err != nil {
		return nil, noProcess(sb, err)
	}
	return &processOutput{Body: processOf(p)}, nil
}

// noProcess is the problem for a *sandbox.ProcessError; another error stays as it is.
func noProcess(sb sandbox.Sandbox, err error) error {
	var missing *sandbox.ProcessError
	switch {
	case !errors.As(err, &missing):
		return err
	case missing.Known != nil:
		return problem.New(problem.ProcessNotFound, missing.Error())
	case len(sb.Processes) == 0:
		return problem.Newf(problem.ProcessNotFound, "%v; sandbox %s has had no processes in the background", missing, sb.Name)
	}
	var known []string
	for _, p := range sb.Processes[max(0, len(sb.Processes)-maxNamed):] {
		known = append(known, clip(p.Name)+" ("+p.ID+")")
	}
	return problem.Newf(problem.ProcessNotFound, "%v; a process is named by its id or name: %s", missing, strings.Join(known, ", "))
}

// maxNamed is how many processes an error names.
const maxNamed = 10

func (a *API) stopProcess(ctx context.Context, in *stopInput) (*processOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	process, err := a.sandboxes.StopProcess(ctx, sb.ID, in.Process, strings.ToUpper(in.Signal))
	if err != nil {
		return nil, fromGuest(noProcess(sb, err))
	}
	return &processOutput{Body: processOf(process)}, nil
}
