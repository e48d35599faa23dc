package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// maxPortWait bounds how long expose waits for a server.
const maxPortWait = 5 * time.Minute

type portOutput struct {
	Body types.Port
}

type portsOutput struct {
	Body types.PortList
}

type portInput struct {
	SandboxPath
	Port int `path:"port" minimum:"1" maximum:"65535" doc:"TCP port inside the sandbox"`
}

func (a *API) registerPorts() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/expose", id: "expose-port", tag: "ports",
		summary: "Give a port a preview URL",
		description: "Exposing it again sets all of its modes, those that are missing to their defaults; its URL stays unless its access changes. Wakes nothing unless it is to wait. " +
			"With port_not_ready the port is exposed all the same.",
		codes: onSandbox(wakeCodes, []problem.Code{problem.PortNotReady, problem.CallLimitExceeded}),
	}, a.expose)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/ports", id: "list-ports", tag: "ports",
		summary: "List exposed ports", description: "Wakes nothing, so it does not say whether anybody listens.",
		codes: onSandbox(),
	}, a.ports)
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}/ports/{port}", id: "delete-port", tag: "ports", status: http.StatusNoContent,
		summary: "End the preview of a port", description: "Its URL is gone for good. Wakes nothing.",
		codes: onSandbox([]problem.Code{problem.PortNotExposed, problem.NodeDiskFull}),
	}, a.unexpose)
}

func (a *API) expose(ctx context.Context, in *SandboxPath, body *types.ExposePortRequest) (*portOutput, error) {
	wait := time.Duration(body.WaitTimeout)
	if wait > maxPortWait {
		return nil, invalid("body.wait_timeout", "it is too long", "use at most 5m, and ask again")
	}
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	port, err := a.sandboxes.Expose(ctx, sb.ID, sandbox.Port{
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
	return &portOutput{Body: a.portOf(sb, port)}, nil
}

func (a *API) awaitPort(ctx context.Context, id sandbox.ID, port uint16, wait time.Duration) error {
	if err := a.calls.enter(ctx, 1); err != nil {
		return err
	}
	lease, err := a.sandboxes.Acquire(ctx, id, sandbox.CauseRequested)
	if err != nil {
		return err
	}
	defer lease.Release()
	// The guest gives up first and says why; it is not trusted to.
	waitCtx, cancel := context.WithTimeout(ctx, wait+answerGrace)
	defer cancel()
	waitCtx, end := context.WithCancelCause(waitCtx)
	var watch sync.WaitGroup
	watch.Go(func() { a.endOnCrash(waitCtx, end, id) })
	err = lease.Guest().PortReady(waitCtx, port, wait)
	end(nil)
	watch.Wait()
	var crashed *crashError
	if err != nil && errors.As(context.Cause(waitCtx), &crashed) {
		return problem.Newf(problem.PortNotReady, "nothing listens on port %d: process %s %s; its last lines: %s",
			port, crashed.process.Name, crashed.process.Ending(), cmp.Or(lease.LastOutput(ctx, crashed.process.ID), "none"))
	}
	return fromGuest(err)
}

// crashError: the process that would have listened has ended.
type crashError struct{ process guest.Process }

func (e *crashError) Error() string { return "process " + e.process.Name + " " + e.process.Ending() }

// crashCheck is between checks for a crash, each of which is a read from memory.
const crashCheck = 100 * time.Millisecond

// endOnCrash ends ctx with a *crashError when nothing is left in the sandbox that
// could begin to listen on a port.
func (a *API) endOnCrash(ctx context.Context, end context.CancelCauseFunc, id sandbox.ID) {
	tick := time.NewTicker(crashCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		sb, _ := a.sandboxes.ByID(id)
		if process, ok := sb.Crashed(); ok {
			end(&crashError{process})
			return
		}
	}
}

func (a *API) ports(ctx context.Context, in *SandboxPath) (*portsOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return &portsOutput{Body: types.PortList{Ports: a.portsOf(sb)}}, nil
}

func (a *API) unexpose(ctx context.Context, in *portInput) (*struct{}, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	err = a.sandboxes.Unexpose(ctx, sb.ID, uint16(in.Port))
	if errors.Is(err, sandbox.ErrNotFound) {
		err = problem.New(problem.PortNotExposed, fmt.Sprintf("port %d is not exposed; GET %s/sandbox/%s/ports lists those that are", in.Port, Prefix, sb.ID))
	}
	return nil, err
}
