package api

import (
	"context"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type createOutput struct {
	Status   int
	Location string `header:"Location"`
	Body     types.Sandbox
}

type listInput struct {
	Exchange
	Label  []string    `query:"label,explode" maxItems:"64" maxLength:"512" nullable:"false" doc:"Only sandboxes with this label, as key=value; may be repeated"`
	State  types.State `query:"state" doc:"Only sandboxes in this state"`
	Usage  bool        `query:"usage" doc:"Whether to include each sandbox's CPU time, memory and disk usage"`
	Cursor string      `query:"cursor" maxLength:"255" doc:"next_cursor of the previous page"`
	Limit  int         `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of sandboxes"`
}

func (a *API) registerSandboxes() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox", id: "create-sandbox", tag: "sandboxes", status: http.StatusCreated,
		summary: "Create a sandbox, or find it by name",
		description: "Responds with 201 when the sandbox was created and runs, and with 200 when it existed. The creation continues when the client " +
			"disconnects; another request with the name joins it. The events of the sandbox show the pull of a missing image.",
		codes: []problem.Code{problem.NameInvalid, problem.ImageNotAllowed, problem.ImageUnavailable, problem.SnapshotNotFound, problem.SandboxConflict, problem.SandboxLimitExceeded,
			problem.SandboxDestroyed, problem.WakeFailed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout},
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.Sandbox](a, "The sandbox, which existed")},
	}, a.create)
	register(a, route{
		method: http.MethodGet, path: "/sandbox", id: "list-sandboxes", tag: "sandboxes",
		summary: "List sandboxes, in the order of their names", description: "Never wakes a sandbox. Entries have no env and no processes, and usage only if requested.",
	}, a.list)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}", id: "get-sandbox", tag: "sandboxes",
		summary: "Get a sandbox", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.get))
	registerBody(a, route{
		method: http.MethodPatch, path: "/sandbox/{id}", id: "update-sandbox", tag: "sandboxes",
		summary: "Change name, labels or times of a sandbox", description: "Never wakes the sandbox. Image and size are immutable; PATCH …/env changes the environment.",
		codes: []problem.Code{problem.NameInvalid, problem.SandboxConflict, problem.SandboxDestroyed, problem.NodeDiskFull},
	}, withSandboxBody(a, a.update))
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}", id: "delete-sandbox", tag: "sandboxes", status: http.StatusNoContent,
		summary: "Destroy a sandbox with its files", description: "Kills all of its processes. Continues when the client disconnects.",
		codes: []problem.Code{problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout},
	}, withSandbox(a, a.destroy))
}

// lookup returns the sandbox that a request names, if it is the owner's.
func (a *API) lookup(ctx context.Context, idOrName string) (sandbox.Sandbox, error) {
	if callOf(ctx).signed {
		return a.signedSandbox(idOrName)
	}
	return a.cfg.Sandboxes.Get(ownerOf(ctx), idOrName)
}

func (a *API) create(ctx context.Context, _ *struct{}, body *types.CreateSandboxRequest) (*createOutput, error) {
	sb, created, err := a.cfg.Sandboxes.Create(ctx, sandbox.CreateRequest{
		Owner:        ownerOf(ctx),
		Name:         body.Name,
		Image:        body.Image,
		Size:         body.Size,
		Env:          body.Env,
		Labels:       body.Labels,
		SleepAfter:   (*sandbox.Duration)(body.SleepAfter),
		StopAfter:    (*sandbox.Duration)(body.StopAfter),
		ArchiveAfter: (*sandbox.Duration)(body.ArchiveAfter),
		Persist:      sandbox.Persist(body.Persist),
		TTL:          (*sandbox.Duration)(body.TTL),
		Snapshot:     body.Snapshot,
		Warm:         listOf(body.Warm, func(l types.Language) sandbox.Language { return sandbox.Language(l) }),
	})
	if err != nil {
		return nil, err
	}
	out := &createOutput{Status: http.StatusOK, Location: Prefix + "/sandbox/" + string(sb.ID), Body: a.sandboxOf(sb)}
	if created {
		out.Status = http.StatusCreated
	}
	return out, nil
}

func (a *API) list(ctx context.Context, in *listInput) (*output[types.SandboxList], error) {
	labels, err := parseLabels(in.r.URL.Query()["label"])
	if err != nil {
		return nil, err
	}
	sbs, next := a.cfg.Sandboxes.List(ownerOf(ctx), sandbox.Filter{Labels: labels, State: sandbox.State(in.State)}, in.Cursor, in.Limit)
	page := types.SandboxList{Sandboxes: listOf(sbs, a.sandboxSummary), NextCursor: next}
	if in.Usage {
		for i, sb := range sbs {
			page.Sandboxes[i].Usage = a.usage(ctx, sb.ID)
		}
	}
	return respond(page)
}

// parseLabels parses key=value, key=value, …
func parseLabels(pairs []string) (map[string]string, error) {
	labels := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, invalid("query.label", "invalid label "+strconv.Quote(clip(pair)), "write it as label=key=value")
		}
		if have, twice := labels[key]; twice && have != value {
			return nil, invalid("query.label", clip(key)+" has two values, and no sandbox has both", "send one of them")
		}
		labels[key] = value
	}
	return labels, nil
}

func (a *API) get(ctx context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.Sandbox], error) {
	body := a.sandboxOf(sb)
	body.Usage = a.usage(ctx, sb.ID)
	return respond(body)
}

// usage returns nil for a sandbox that was destroyed meanwhile.
func (a *API) usage(ctx context.Context, id sandbox.ID) *types.Usage {
	u, err := a.cfg.Sandboxes.Usage(ctx, id)
	if err != nil {
		return nil
	}
	return &types.Usage{CPUSeconds: u.CPU.Seconds(), MemoryBytes: u.Memory, DiskBytes: u.Disk.Bytes, Files: u.Disk.Entries}
}

// respondSandbox responds with the result of a call that returns a sandbox.
func (a *API) respondSandbox(sb sandbox.Sandbox, err error) (*output[types.Sandbox], error) {
	return &output[types.Sandbox]{a.sandboxOf(sb)}, err
}

func (a *API) update(ctx context.Context, _ *SandboxPath, body *types.UpdateSandboxRequest, sb sandbox.Sandbox) (*output[types.Sandbox], error) {
	return a.respondSandbox(a.cfg.Sandboxes.Update(ctx, sb.ID, sandbox.Patch{
		Name:         body.Name,
		Labels:       body.Labels,
		SleepAfter:   (*sandbox.Duration)(body.SleepAfter),
		StopAfter:    (*sandbox.Duration)(body.StopAfter),
		ArchiveAfter: (*sandbox.Duration)(body.ArchiveAfter),
		Persist:      (*sandbox.Persist)(body.Persist),
		TTL:          (*sandbox.Duration)(body.TTL),
	}))
}

func (a *API) destroy(ctx context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*struct{}, error) {
	return nil, a.cfg.Sandboxes.Destroy(ctx, sb.ID)
}
