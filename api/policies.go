package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/problem"
)

const wasmType = "application/wasm"

type putPolicyInput struct {
	NamePath
	Exchange
}

func (a *API) registerPolicies() {
	addRoute(a, route{
		method: http.MethodPut, path: "/policies/{name}", id: "put-policy", tag: "policies",
		summary: "Push a policy, or replace one",
		description: "The body is a WASM module of at most 16 MiB. It replaces the policy if it compiles. Requests in progress end with the module " +
			"that they began with. One module of an owner is compiled at a time: if too many wait, try again after Retry-After.",
		codes: append([]problem.Code{problem.NameInvalid, problem.PolicyInvalid, problem.PolicyLimitExceeded, problem.PushLimitExceeded, problem.CallLimitExceeded, problem.NodeDiskFull}, bodyCodes...),
	}, &huma.RequestBody{Description: "The WASM module.", Content: rawContent(wasmType)}, a.putPolicy)
	register(a, route{
		method: http.MethodGet, path: "/policies", id: "list-policies", tag: "policies",
		summary: "List policies, in the order of their names", description: "Your policies, and those that are part of doze.",
	}, a.policies)
	register(a, route{
		method: http.MethodGet, path: "/policies/{name}", id: "get-policy", tag: "policies",
		summary: "Get a policy", description: "Lists the rules that name the policy. Does not include the module.", codes: []problem.Code{problem.PolicyNotFound},
	}, a.policy)
	register(a, route{
		method: http.MethodDelete, path: "/policies/{name}", id: "delete-policy", tag: "policies", status: http.StatusNoContent,
		summary: "Delete a pushed policy", description: "Refused while rules name the policy.",
		codes: []problem.Code{problem.PolicyNotFound, problem.PolicyInUse, problem.PolicyBuiltIn, problem.NodeDiskFull},
	}, a.deletePolicy)
}

// pushSlots is how many calls a push counts as: one for each MiB of a module in memory, as
// for the output of commands.
const pushSlots = catalog.MaxModule >> 20

func (a *API) putPolicy(ctx context.Context, in *putPolicyInput) (*output[types.Policy], error) {
	if kind := in.r.Header.Get("Content-Type"); kind != "" && !hasType(kind, wasmType) && !hasType(kind, octetStream) {
		return nil, problem.Newf(problem.MediaTypeUnsupported, "the body is %s; send %s", clip(kind), wasmType)
	}
	if err := a.pushes.acquire(ctx); err != nil {
		return nil, err
	}
	if err := a.calls.acquire(ctx, pushSlots); err != nil {
		return nil, err
	}
	module, err := a.readBody(in.w, in.r, catalog.MaxModule, "remove symbols and unused code from the module")
	if err != nil {
		return nil, err
	}
	info, err := a.cfg.Egress.PutPolicy(ctx, ownerOf(ctx), in.Name, module)
	if err != nil {
		return nil, err
	}
	pushed := policyOf(info)
	if info.ReplacesBuiltIn {
		pushed.Warnings = []types.Warning{{
			Location: "path.name", Message: fmt.Sprintf("doze ships a policy %q, and your rules that name it use yours from now on", info.Name),
			Hint: "push it under another name, and delete this one to use the shipped one",
		}}
	}
	return respond(pushed)
}

func (a *API) policies(ctx context.Context, _ *struct{}) (*output[types.PolicyList], error) {
	return respond(types.PolicyList{Policies: listOf(a.cfg.Egress.Policies(ownerOf(ctx)), policyOf)})
}

func (a *API) policy(ctx context.Context, in *NamePath) (*output[types.Policy], error) {
	for _, p := range a.cfg.Egress.Policies(ownerOf(ctx)) {
		if p.Name == in.Name {
			return respond(policyOf(p))
		}
	}
	return nil, catalog.ErrUnknown
}

func (a *API) deletePolicy(ctx context.Context, in *NamePath) (*struct{}, error) {
	return nil, a.cfg.Egress.DeletePolicy(ctx, ownerOf(ctx), in.Name)
}
