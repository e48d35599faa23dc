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

type sandboxOutput struct {
	Body types.Sandbox
}

type listInput struct {
	Exchange
	Label  []string    `query:"label,explode" maxItems:"64" maxLength:"512" nullable:"false" doc:"Only sandboxes with this label, as key=value; may be repeated"`
	State  types.State `query:"state" doc:"Only sandboxes in this state"`
	Usage  bool        `query:"usage" doc:"Whether to include the CPU time and the memory of each"`
	Cursor string      `query:"cursor" maxLength:"255" doc:"next_cursor of the previous page"`
	Limit  int         `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of sandboxes"`
}

type listOutput struct {
	Body types.SandboxList
}

func (a *API) registerSandboxes() {
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox", id: "create-sandbox", tag: "sandboxes", status: http.StatusCreated,
		summary: "Create a sandbox, or find it by name",
		description: "Answers 201 when it was made and runs, 200 when it was there. The creation goes on when the client " +
			"goes away; asking again joins it. Pulling a missing image shows in the events.",
		codes: []problem.Code{problem.NameInvalid, problem.ImageNotAllowed, problem.ImageUnavailable, problem.SandboxConflict, problem.SandboxLimitExceeded,
			problem.SandboxDestroyed, problem.WakeFailed, problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout},
		answers: map[int]*huma.Response{http.StatusOK: answerJSON[types.Sandbox](a, "It was there")},
	}, a.create)
	register(a, route{
		method: http.MethodGet, path: "/sandbox", id: "list-sandboxes", tag: "sandboxes",
		summary: "List sandboxes, in the order of their names", description: "Wakes nothing. Entries have no env and no processes, and usage only when asked for.",
	}, a.list)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}", id: "get-sandbox", tag: "sandboxes",
		summary: "Get a sandbox", description: "Wakes nothing.",
		codes: onSandbox(),
	}, a.get)
	registerBody(a, route{
		method: http.MethodPatch, path: "/sandbox/{id}", id: "update-sandbox", tag: "sandboxes",
		summary: "Change name, labels or times of a sandbox", description: "Wakes nothing. Image, size and env are for ever.",
		codes: onSandbox([]problem.Code{problem.NameInvalid, problem.SandboxConflict, problem.SandboxDestroyed, problem.NodeDiskFull}),
	}, a.update)
	register(a, route{
		method: http.MethodDelete, path: "/sandbox/{id}", id: "delete-sandbox", tag: "sandboxes", status: http.StatusNoContent,
		summary: "Destroy a sandbox with its files", description: "Whatever runs in it is killed. Goes on when the client goes away.",
		codes: onSandbox([]problem.Code{problem.EngineUnavailable, problem.NodeDiskFull, problem.SandboxTimeout}),
	}, a.destroy)
}

// lookup finds the sandbox that a request names, if it is the caller's.
func (a *API) lookup(ctx context.Context, idOrName string) (sandbox.Sandbox, error) {
	return a.sandboxes.Get(ownerOf(ctx), idOrName)
}

func (a *API) create(ctx context.Context, _ *struct{}, body *types.CreateSandboxRequest) (*createOutput, error) {
	sb, created, err := a.sandboxes.Create(ctx, sandbox.CreateRequest{
		Owner:      ownerOf(ctx),
		Name:       body.Name,
		Image:      body.Image,
		Size:       body.Size,
		Env:        body.Env,
		Labels:     body.Labels,
		SleepAfter: (*sandbox.Duration)(body.SleepAfter),
		StopAfter:  (*sandbox.Duration)(body.StopAfter),
		TTL:        (*sandbox.Duration)(body.TTL),
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

func (a *API) list(ctx context.Context, in *listInput) (*listOutput, error) {
	labels, err := parseLabels(in.r.URL.Query()["label"])
	if err != nil {
		return nil, err
	}
	sbs, next := a.sandboxes.List(ownerOf(ctx), sandbox.Filter{Labels: labels, State: sandbox.State(in.State)}, in.Cursor, in.Limit)
	page := types.SandboxList{Sandboxes: listOf(sbs, a.sandboxSummary), NextCursor: next}
	if in.Usage {
		for i, sb := range sbs {
			page.Sandboxes[i].Usage = a.usage(ctx, sb.ID)
		}
	}
	return &listOutput{Body: page}, nil
}

// parseLabels reads key=value, key=value, …
func parseLabels(pairs []string) (map[string]string, error) {
	labels := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, invalid("query.label", strconv.Quote(clip(pair))+" is no label", "write it as label=key=value")
		}
		if have, twice := labels[key]; twice && have != value {
			return nil, invalid("query.label", clip(key)+" is asked for with two values, which no sandbox has", "ask for one")
		}
		labels[key] = value
	}
	return labels, nil
}

func (a *API) get(ctx context.Context, in *SandboxPath) (*sandboxOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	out, err := a.showing(sb, err)
	if err != nil {
		return nil, err
	}
	out.Body.Usage = a.usage(ctx, sb.ID)
	return out, nil
}

// usage is nil when the sandbox is gone since.
func (a *API) usage(ctx context.Context, id sandbox.ID) *types.Usage {
	u, err := a.sandboxes.Usage(ctx, id)
	if err != nil {
		return nil
	}
	return &types.Usage{CPUSeconds: u.CPU.Seconds(), MemoryBytes: u.Memory}
}

// showing is the answer of a call that returns a sandbox.
func (a *API) showing(sb sandbox.Sandbox, err error) (*sandboxOutput, error) {
	if err != nil {
		return nil, err
	}
	return &sandboxOutput{Body: a.sandboxOf(sb)}, nil
}

func (a *API) update(ctx context.Context, in *SandboxPath, body *types.UpdateSandboxRequest) (*sandboxOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return a.showing(a.sandboxes.Update(ctx, sb.ID, sandbox.Patch{
		Name:       body.Name,
		Labels:     body.Labels,
		SleepAfter: (*sandbox.Duration)(body.SleepAfter),
		StopAfter:  (*sandbox.Duration)(body.StopAfter),
		TTL:        (*sandbox.Duration)(body.TTL),
	}))
}

func (a *API) destroy(ctx context.Context, in *SandboxPath) (*struct{}, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	return nil, a.sandboxes.Destroy(ctx, sb.ID)
}
