package api

import (
	"context"
	"net/http"
	"time"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// QuarantinedSandbox is a container of which the node has no record.
type QuarantinedSandbox struct {
	ID        sandbox.ID `json:"id"`
	Name      string     `json:"name,omitempty" doc:"That it had last; missing when its container does not say it"`
	Image     string     `json:"image,omitempty"`
	Size      string     `json:"size,omitempty"`
	CreatedAt time.Time  `json:"created_at,omitzero"`
	Container bool       `json:"container" doc:"Whether there is a container, which can be adopted; else only its run folder is left"`
	Problem   string     `json:"problem,omitempty" doc:"Why it could not be stopped yet, or not be removed; missing when nothing has failed"`
}

// QuarantinePath is the part of a request's input that names a container in quarantine.
type QuarantinePath struct {
	ID string `path:"id" maxLength:"255" doc:"Id of the sandbox"`
}

func (p QuarantinePath) target() string { return p.ID }

type adoptInput struct {
	QuarantinePath
	Body AdoptBody
}

// AdoptBody says how a container becomes a sandbox again.
type AdoptBody struct {
	Name string `json:"name,omitempty" doc:"The name that it had last when missing" example:"shop"`
}

func (a *API) registerQuarantine() {
	register(a, route{
		method: http.MethodPost, path: "/node/quarantine/{id}/adopt", id: "adopt-sandbox", tag: "node",
		summary: "Make a container in quarantine a sandbox again",
		description: "With its files and with the settings, ports and declared processes that it had last, stopped. Its TTL begins anew. " +
			"GET /node lists what is in quarantine.",
		codes: []problem.Code{problem.QuarantineNotFound, problem.NameInvalid, problem.SandboxConflict, problem.NodeDiskFull, problem.SandboxTimeout},
	}, a.adopt)
	register(a, route{
		method: http.MethodDelete, path: "/node/quarantine/{id}", id: "delete-quarantined", tag: "node", status: http.StatusNoContent,
		summary: "Remove a container in quarantine with its files", description: "This cannot be undone. Goes on when the client goes away.",
		codes: []problem.Code{problem.QuarantineNotFound, problem.EngineUnavailable, problem.SandboxTimeout},
	}, a.removeQuarantined)
}

func (a *API) adopt(ctx context.Context, in *adoptInput) (*sandboxOutput, error) {
	return a.showing(a.sandboxes.Adopt(ctx, ownerOf(ctx), sandbox.ID(in.ID), in.Body.Name))
}

func (a *API) removeQuarantined(ctx context.Context, in *QuarantinePath) (*struct{}, error) {
	return nil, a.sandboxes.RemoveQuarantined(ctx, ownerOf(ctx), sandbox.ID(in.ID))
}

// quarantinedOf are the containers in quarantine that the owner created, and those
// that do not say who did.
func quarantinedOf(owner string, all []sandbox.Quarantined) []QuarantinedSandbox {
	list := []QuarantinedSandbox{}
	for _, q := range all {
		if q.Owner == "" || q.Owner == owner {
			list = append(list, QuarantinedSandbox{
				ID: q.ID, Name: validText(q.Name, maxGuestMessage), Image: q.Image, Size: q.Size, CreatedAt: q.CreatedAt,
				Container: q.Container, Problem: validText(q.Problem, maxGuestMessage),
			})
		}
	}
	return list
}
