package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// pauseInput names a sandbox to put to sleep or to stop.
type pauseInput struct {
	SandboxPath
	Force bool `query:"force" doc:"Also while requests, commands or transfers are in progress: sleep pauses them until the next wake, or ends them if persist is not memory; stop ends them"`
}

// endingInput names a sandbox whose programs end.
type endingInput struct {
	SandboxPath
	Exchange
	Force bool `query:"force" doc:"Also while requests, commands or transfers are in progress, which end"`
}

func (a *API) registerLifecycle() {
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/sleep", id: "sleep-sandbox", tag: "lifecycle",
		summary: "Put a sandbox to sleep", description: "Responds when the sandbox sleeps. Its memory is retained; if persist is not memory, it is stopped instead. Ends a hold.",
		codes: []problem.Code{problem.SandboxBusy, problem.SleepFailed, problem.SandboxDestroyed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout},
	}, withSandbox(a, a.pause(a.cfg.Sandboxes.Sleep, a.cfg.Sandboxes.ForceSleep)))
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/wake", id: "wake-sandbox", tag: "lifecycle",
		summary: "Wake a sandbox", description: "Wakes the sandbox. Responds when it runs.",
		codes: wakeCodes,
	}, withSandbox(a, a.wake))
	register(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/stop", id: "stop-sandbox", tag: "lifecycle",
		summary: "Stop a sandbox", description: "Responds when its processes have ended. Its files are retained.",
		codes: []problem.Code{problem.SandboxBusy, problem.SandboxDestroyed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout},
	}, withSandbox(a, a.pause(a.cfg.Sandboxes.Stop, a.cfg.Sandboxes.ForceStop)))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/archive", id: "archive-sandbox", tag: "lifecycle",
		summary: "Move the disk of a sandbox to the object store",
		description: "Stops the sandbox, backs up its disk, and frees the space on the node. Its next use downloads the disk and starts the sandbox. " +
			"Responds when the sandbox is archived, also if it was already. Continues when the client disconnects. " +
			"After an error, the disk is on the node. If the sandbox is used during the upload, the error is `sandbox_busy`.",
		codes: slices.Concat(objectStoreCodes, []problem.Code{problem.BackupLimitExceeded, problem.BackupUnsupported, problem.SnapshotLimitExceeded, problem.SandboxBusy, problem.SandboxDestroyed,
			problem.NodeDiskFull, problem.SandboxTimeout, problem.StreamLimitExceeded}),
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.Sandbox](a, "The sandbox; or with stream: events while the sandbox is archived")},
		events:    map[string]any{"progress": types.BackupProgress{}, "complete": types.Sandbox{}},
	}, withSandboxBody(a, a.archive))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/hold", id: "hold-sandbox", tag: "lifecycle",
		summary: "Keep a sandbox from sleeping when it is idle", description: "Replaces an earlier hold. Never wakes the sandbox.",
		codes: []problem.Code{problem.SandboxDestroyed, problem.NodeDiskFull},
	}, withSandboxBody(a, a.hold))
}

// pause returns the handler that puts a sandbox to sleep or stops it.
func (a *API) pause(graceful, forced func(context.Context, sandbox.ID) (sandbox.Sandbox, error)) func(context.Context, *pauseInput, sandbox.Sandbox) (*output[types.Sandbox], error) {
	return func(ctx context.Context, in *pauseInput, sb sandbox.Sandbox) (*output[types.Sandbox], error) {
		if in.Force {
			return a.respondSandbox(forced(ctx, sb.ID))
		}
		return a.respondSandbox(graceful(ctx, sb.ID))
	}
}

func (a *API) wake(ctx context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.Sandbox], error) {
	return a.respondSandbox(a.cfg.Sandboxes.Wake(ctx, sb.ID))
}

func (a *API) archive(ctx context.Context, in *endingInput, body *types.ArchiveSandboxRequest, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	return a.respondTransfer(ctx, in.Exchange, body.Stream, func(ctx context.Context, progress func(sandbox.BackupProgress)) (sandbox.Sandbox, error) {
		archived, err := a.cfg.Sandboxes.Archive(ctx, sb.ID, in.Force, progress)
		if errors.Is(err, sandbox.ErrBusy) {
			err = problem.Newf(problem.SandboxBusy, "%v; try again when its requests, commands and backups have ended; force=true ends requests and commands", err)
		}
		return archived, err
	})
}

func (a *API) hold(ctx context.Context, _ *SandboxPath, body *types.HoldRequest, sb sandbox.Sandbox) (*output[types.Sandbox], error) {
	return a.respondSandbox(a.cfg.Sandboxes.Hold(ctx, sb.ID, time.Duration(body.Duration)))
}
