package api

import (
	"context"
	"fmt"
	"mime"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/problem"
)

const wasmType = "application/wasm"

type putPolicyInput struct {
	NamePath
	Exchange
}

type policyOutput struct {
	Body types.Policy
}

type policiesOutput struct {
	Body types.PolicyList
}

func (a *API) registerPolicies() {
	addRoute(a, route{
		method: http.MethodPut, path: "/policies/{name}", id: "put-policy", tag: "policies",
		summary: "Push a policy, or replace one",
		description: "The body is a WASM module of at most 16 MiB. It is compiled before it is taken. Requests under way end with the module " +
			"that they began with; the next ones get the new. One module of an owner is compiled at a time: try again after Retry-After if too many wait.",
		codes: append([]problem.Code{problem.NameInvalid, problem.PolicyInvalid, problem.PolicyLimitExceeded, problem.PushLimitExceeded, problem.CallLimitExceeded, problem.NodeDiskFull}, bodyCodes...),
	}, rawContent(wasmType), a.putPolicy)
	register(a, route{
		method: http.MethodGet, path: "/policies", id: "list-policies", tag: "policies",
		summary: "List policies, in the order of their names", description: "Yours, and those that come with doze.",
	}, a.policies)
	register(a, route{
		method: http.MethodGet, path: "/policies/{name}", id: "get-policy", tag: "policies",
		summary: "Get a policy", description: "With the rules that name it, without the module.", codes: []problem.Code{problem.PolicyNotFound},
	}, a.policy)
	register(a, route{
		method: http.MethodDelete, path: "/policies/{name}", id: "delete-policy", tag: "policies", status: http.StatusNoContent,
		summary: "Forget a policy that was pushed", description: "Not while rules name it.",
		codes: []problem.Code{problem.PolicyNotFound, problem.PolicyInUse, problem.PolicyBuiltIn, problem.NodeDiskFull},
	}, a.deletePolicy)
}

// callsOfPush is what a module in memory counts for: one for each MiB, as output of
// commands does.
const callsOfPush = catalog.MaxModule >> 20

func (a *API) putPolicy(ctx context.Context, in *putPolicyInput) (*policyOutput, error) {
	if kind := in.r.Header.Get("Content-Type"); kind != "" && !isModule(kind) {
		return nil, problem.Newf(problem.MediaTypeUnsupported, "the body is %s; send %s", clip(kind), wasmType)
	}
	if err := a.pushes.enter(ctx); err != nil {
		return nil, err
	}
	if err := a.calls.enter(ctx, callsOfPush); err != nil {
		return nil, err
	}
	module, err := a.readBody(in.w, in.r, catalog.MaxModule, "leave symbols and unused code out of the module")
	if err != nil {
		return nil, err
	}
	info, err := a.egress.PutPolicy(ctx, ownerOf(ctx), in.Name, module)
	if err != nil {
		return nil, err
	}
	pushed := &policyOutput{Body: policyOf(info)}
	if info.ReplacesBuiltIn {
		pushed.Body.Warnings = []types.Warning{{
			Location: "path.name", Message: fmt.Sprintf("doze ships a policy %q, and your rules that name it use yours from now on", info.Name),
			Hint: "push it under another name, and delete this one to use the shipped one",
		}}
	}
	return pushed, nil
}

func isModule(contentType string) bool {
	kind, _, err := mime.ParseMediaType(contentType)
	return err == nil && (kind == wasmType || kind == octetStream)
}

func (a *API) policies(ctx context.Context, _ *struct{}) (*policiesOutput, error) {
	return &policiesOutput{Body: types.PolicyList{Policies: listOf(a.egress.Policies(ownerOf(ctx)), policyOf)}}, nil
}

func (a *API) policy(ctx context.Context, in *NamePath) (*policyOutput, error) {
	for _, p := range a.egress.Policies(ownerOf(ctx)) {
		if p.Name == in.Name {
			return &policyOutput{Body: policyOf(p)}, nil
		}
	}
	return nil, catalog.ErrUnknown
}

func (a *API) deletePolicy(ctx context.Context, in *NamePath) (*struct{}, error) {
	return nil, a.egress.DeletePolicy(ctx, ownerOf(ctx), in.Name)
}
