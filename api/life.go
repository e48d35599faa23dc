package api

import (
	"context"
	"net/http"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// pauseInput names a sandbox that is to sleep or to stop.
type pauseInput struct {
	SandboxPath
	Force bool `query:"force" doc:"Although requests, commands or transfers are under way: sleep pauses them until the next wake, stop ends them"`
}

func (a *API) registerLife() {
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/sleep", id: "sleep-sandbox", tag: "lifecycle",
		summary: "Put a sandbox to sleep", description: "Answers when it sleeps. It keeps its memory. Ends a hold.",
		codes: onSandbox([]problem.Code{problem.SandboxBusy, problem.SleepFailed, problem.SandboxDestroyed, problem.NodeDiskFull, problem.SandboxTimeout}),
	}, a.pause(a.sandboxes.Sleep, a.sandboxes.ForceSleep))
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/wake", id: "wake-sandbox", tag: "lifecycle",
		summary: "Wake a sandbox", description: "Answers when it runs.",
		codes: onSandbox(wakeCodes),
	}, a.wake)
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/stop", id: "stop-sandbox", tag: "lifecycle",
		summary: "Stop a sandbox", description: "Answers when its processes have ended. It keeps its files.",
		codes: onSandbox([]problem.Code{problem.SandboxBusy, problem.SandboxDestroyed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout}),
	}, a.pause(a.sandboxes.Stop, a.sandboxes.ForceStop))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/hold", id: "hold-sandbox", tag: "lifecycle",
		summary: "Keep a sandbox from sleeping by itself", description: "Replaces the hold before. Does not wake it.",
		codes: onSandbox([]problem.Code{problem.SandboxDestroyed, problem.NodeDiskFull}),
	}, a.hold)
}

// pause answers with the sandbox once it sleeps or has stopped.
func (a *API) pause(gentle, forced func(context.Context, sandbox.ID) (sandbox.Sandbox, error)) func(context.Context, *pauseInput) (*sandboxOutput, error) {
	return func(ctx context.Context, in *pauseInput) (*sandboxOutput, error) {
		sb, err := a.lookup(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		if in.Force {
			return a.showing(forced(ctx, sb.ID))
		}
		return a.showing(gentle(ctx, sb.ID))
	}
}

func (a *API) wake(ctx context.Context, in *SandboxPath) (*sandboxOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return a.showing(a.sandboxes.Wake(ctx, sb.ID))
}

func (a *API) hold(ctx context.Context, in *SandboxPath, body *types.HoldRequest) (*sandboxOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return a.showing(a.sandboxes.Hold(ctx, sb.ID, time.Duration(body.Duration)))
}
