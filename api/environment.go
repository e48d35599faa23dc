package api

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func (a *API) registerEnvironment() {
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/env", id: "get-environment", tag: "sandboxes",
		summary: "Get the environment of a sandbox", description: "Never wakes the sandbox.",
	}, withSandbox(a, a.environment))
	registerBody(a, route{
		method: http.MethodPatch, path: "/sandbox/{id}/env", id: "update-environment", tag: "sandboxes",
		summary: "Change the environment of a sandbox",
		description: "Never wakes the sandbox. Commands, processes, terminals and sessions that start later have the new environment, and so have declared processes " +
			"when a cold wake starts them. Variables of their own prevail, and variables of the image stay: a removed variable has the image's value again, except one " +
			"that was set when the sandbox was created, which is unset.",
		codes: []problem.Code{problem.SandboxDestroyed, problem.NodeDiskFull},
	}, withSandboxBody(a, a.updateEnvironment))
}

func (a *API) environment(_ context.Context, _ *SandboxPath, sb sandbox.Sandbox) (*output[types.Environment], error) {
	return respond(environmentOf(sb))
}

func (a *API) updateEnvironment(ctx context.Context, _ *SandboxPath, body *types.UpdateEnvironmentRequest, sb sandbox.Sandbox) (*output[types.Environment], error) {
	sb, err := a.cfg.Sandboxes.UpdateEnvironment(ctx, sb.ID, body.Env)
	if err != nil {
		return nil, err
	}
	return respond(environmentOf(sb))
}

func environmentOf(sb sandbox.Sandbox) types.Environment {
	env := sb.Environment()
	if env == nil {
		env = map[string]string{}
	}
	return types.Environment{Env: env}
}
