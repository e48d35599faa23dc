package api

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// QuarantinePath is the part of a request's input that names a sandbox in quarantine.
type QuarantinePath struct {
	ID string `path:"id" maxLength:"255" doc:"Id of the sandbox"`
}

func (a *API) registerQuarantine() {
	registerBody(a, route{
		method: http.MethodPost, path: "/node/quarantine/{id}/adopt", id: "adopt-sandbox", tag: "node",
		summary: "Adopt a sandbox from quarantine",
		description: "The sandbox has its files and its last settings, ports and declared processes, and is stopped. Its TTL starts again. " +
			"GET /node lists the quarantine.",
		codes: []problem.Code{problem.QuarantineNotFound, problem.NameInvalid, problem.SandboxConflict, problem.NodeDiskFull, problem.SandboxTimeout},
	}, a.adopt)
	register(a, route{
		method: http.MethodDelete, path: "/node/quarantine/{id}", id: "delete-quarantined", tag: "node", status: http.StatusNoContent,
		summary: "Remove a sandbox in quarantine with its files", description: "Irreversible. Continues when the client disconnects.",
		codes: []problem.Code{problem.QuarantineNotFound, problem.EngineUnavailable, problem.SandboxTimeout},
	}, a.removeQuarantined)
}

func (a *API) adopt(ctx context.Context, in *QuarantinePath, body *types.AdoptRequest) (*output[types.Sandbox], error) {
	return a.respondSandbox(a.cfg.Sandboxes.Adopt(ctx, ownerOf(ctx), sandbox.ID(in.ID), body.Name))
}

func (a *API) removeQuarantined(ctx context.Context, in *QuarantinePath) (*struct{}, error) {
	return nil, a.cfg.Sandboxes.RemoveQuarantined(ctx, ownerOf(ctx), sandbox.ID(in.ID))
}

// quarantinedOf converts the sandboxes in quarantine that the owner created, and
// sandboxes of unknown owners.
func quarantinedOf(owner string, all []sandbox.Quarantined) []types.QuarantinedSandbox {
	list := []types.QuarantinedSandbox{}
	for _, q := range all {
		if q.Owner == "" || q.Owner == owner {
			list = append(list, types.QuarantinedSandbox{
				ID: string(q.ID), Name: validText(q.Name, maxGuestMessage), Image: q.Image, Size: q.Size, CreatedAt: q.CreatedAt,
				HasContainer: q.Container, Error: validText(q.Problem, maxGuestMessage),
			})
		}
	}
	return list
}
