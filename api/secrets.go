package api

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
)

// NamePath is the part of a request's input that names a secret or a policy.
type NamePath struct {
	Name string `path:"name" maxLength:"255" doc:"1 to 64 of a-z, 0-9, - and _"`
}

func (a *API) registerSecrets() {
	registerBody(a, route{
		method: http.MethodPut, path: "/secrets/{name}", id: "put-secret", tag: "secrets",
		summary:     "Create a secret, or replace its value and hosts",
		description: "Applies to the next request of each sandbox. The value is stored encrypted and sent only to the hosts of the secret.",
		codes:       []problem.Code{problem.NameInvalid, problem.SecretLimitExceeded, problem.NodeDiskFull},
	}, a.putSecret)
	register(a, route{
		method: http.MethodGet, path: "/secrets", id: "list-secrets", tag: "secrets",
		summary: "List secrets, in the order of their names", description: "Without their values.",
	}, a.secrets)
	register(a, route{
		method: http.MethodGet, path: "/secrets/{name}", id: "get-secret", tag: "secrets",
		summary: "Get a secret", description: "Without its value.", codes: []problem.Code{problem.SecretNotFound},
	}, a.secret)
	register(a, route{
		method: http.MethodDelete, path: "/secrets/{name}", id: "delete-secret", tag: "secrets", status: http.StatusNoContent,
		summary: "Delete a secret", description: "Requests whose rules use the secret are refused from then on.",
		codes: []problem.Code{problem.SecretNotFound, problem.NodeDiskFull},
	}, a.deleteSecret)
}

func (a *API) putSecret(ctx context.Context, in *NamePath, body *types.SetSecretRequest) (*output[types.Secret], error) {
	value, err := decode(body.Value, body.Encoding, "body.value")
	if err != nil {
		return nil, err
	}
	return respondSecret(a.cfg.Egress.Secrets.Put(ctx, ownerOf(ctx), in.Name, value, body.Hosts))
}

func respondSecret(s vault.Secret, err error) (*output[types.Secret], error) {
	return &output[types.Secret]{secretOf(s)}, err
}

func (a *API) secrets(ctx context.Context, _ *struct{}) (*output[types.SecretList], error) {
	return respond(types.SecretList{Secrets: listOf(a.cfg.Egress.Secrets.List(ownerOf(ctx)), secretOf)})
}

func (a *API) secret(ctx context.Context, in *NamePath) (*output[types.Secret], error) {
	return respondSecret(a.cfg.Egress.Secrets.Get(ownerOf(ctx), in.Name))
}

func (a *API) deleteSecret(ctx context.Context, in *NamePath) (*struct{}, error) {
	return nil, a.cfg.Egress.Secrets.Delete(ctx, ownerOf(ctx), in.Name)
}
