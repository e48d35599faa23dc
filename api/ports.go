package api

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// maxPortWait limits how long expose waits for a server.
const maxPortWait = 5 * time.Minute

type portInput struct {
	SandboxPath
	Port int `path:"port" minimum:"1" maximum:"65535" doc:"TCP port inside the sandbox"`
}

func (a *API) registerPorts() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/expose", id: "expose-port", tag: "ports",
		summary: "Give a port a preview URL",
		description: "Exposing a port again replaces all of its modes; missing ones get their defaults. Its URL changes only with its access. Wakes the sandbox only to wait for a server. " +
			"The port is exposed even if the response is port_not_ready.",
		codes: slices.Concat(wakeCodes, []problem.Code{problem.PortNotReady, problem.CallLimitExceeded}),
	}, withSandboxBody(a, a.expose))
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/ports", id: "list-ports", tag: "ports",
		summary: "List exposed ports, and those with a server", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.ports))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/ports/{port}", id: "delete-port", tag: "ports", status: http.StatusNoContent,
		summary: "End the preview of a port", description: "Its URL is never used again. Never wakes the sandbox.",
		codes: []problem.Code{problem.PortNotExposed, problem.NodeDiskFull},
	}, withSandbox(a, a.unexpose))
}

func (a *API) expose(ctx context.Context, _ *SandboxPath, body *types.ExposePortRequest, sb sandbox.Sandbox) (*output[types.Port], error) {
	wait := time.Duration(body.WaitTimeout)
	if wait > maxPortWait {
		return nil, invalid("body.wait_timeout", "longer than 5m", "use at most 5m, and repeat the request")
	}
	port, err := a.cfg.Sandboxes.Expose(ctx, sb.ID, sandbox.Port{
		Port:      body.Port,
		Access:    sandbox.Access(body.Access),
		Wake:      sandbox.WakeMode(body.Wake),
		Host:      sandbox.HostMode(body.HostHeader),
		Protocol:  sandbox.Protocol(body.Protocol),
		WebSocket: sandbox.WebSocketMode(body.WebSocket),
	})
	if err != nil {
		return nil, err
	}
	if wait > 0 {
		if err := a.awaitPort(ctx, sb.ID, port.Port, wait); err != nil {
			return nil, err
		}
	}
	return respond(a.portOf(sb, port))
}

func (a *API) awaitPort(ctx context.Context, id sandbox.ID, port uint16, wait time.Duration) error {
	if err := a.calls.acquire(ctx, 1); err != nil {
		return err
	}
	lease, err := a.cfg.Sandboxes.Acquire(ctx, id, sandbox.CauseRequested)
	if err != nil {
		return err
	}
	defer lease.Release()
	// The guest enforces the timeout and returns the reason, but is not trusted to.
	waitCtx, cancel := context.WithTimeout(ctx, wait+responseGrace)
	defer cancel()
	waitCtx, end := context.WithCancelCause(waitCtx)
	var watch sync.WaitGroup
	watch.Go(func() { a.endOnCrash(waitCtx, end, id) })
	err = lease.Guest().PortReady(waitCtx, port, wait)
	end(nil)
	watch.Wait()
	if crash, ok := errors.AsType[*crashError](context.Cause(waitCtx)); ok && err != nil {
		return problem.Newf(problem.PortNotReady, "nothing listens on port %d: %v; its last lines: %s", port, crash, cmp.Or(lease.LastOutput(ctx, crash.ID), "none"))
	}
	return fromGuest(err)
}

// crashError is the end of a process that might have listened on the port.
type crashError struct{ guest.Process }

func (e *crashError) Error() string { return "process " + e.Name + " " + e.Ending() }

// crashCheck is the interval of checks for a crash. A check is a read from memory.
const crashCheck = 100 * time.Millisecond

// endOnCrash ends ctx with a *crashError when the sandbox has no process left that could
// begin to listen on a port.
func (a *API) endOnCrash(ctx context.Context, end context.CancelCauseFunc, id sandbox.ID) {
	tick := time.NewTicker(crashCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		sb, _ := a.cfg.Sandboxes.ByID(id)
		if process, ok := sb.Crashed(); ok {
			end(&crashError{process})
			return
		}
	}
}

func (a *API) ports(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.PortList], error) {
	listening := listOf(sb.Listening, func(l guest.Listening) types.ListeningPort { return *listeningOf(&l) })
	return respond(types.PortList{Ports: a.portsOf(sb), Listening: listening})
}

func (a *API) unexpose(ctx context.Context, in *portInput, sb sandbox.Sandbox) (*struct{}, error) {
	err := a.cfg.Sandboxes.Unexpose(ctx, sb.ID, uint16(in.Port))
	if errors.Is(err, sandbox.ErrNotFound) {
		err = problem.Newf(problem.PortNotExposed, "port %d is not exposed; GET %s/sandbox/%s/ports lists the exposed ports", in.Port, Prefix, sb.ID)
	}
	return nil, err
}
