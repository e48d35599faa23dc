package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/problem"
)

type policyLogsInput struct {
	Exchange
	NamePath
	Level types.LogLevel `query:"level" doc:"Only lines of this level and above"`
	PageQuery
}

func (a *API) registerPolicyLogs() {
	register(a, route{
		method: http.MethodGet, path: "/policies/{name}/logs", id: "list-policy-logs", tag: "policies",
		summary: "List the log of your policy, oldest first",
		description: "Contains calls of the function log and output of the policy, with the flow and the sandbox of the request. The latest 1,000 lines are " +
			"stored until the node restarts or the policy is deleted. A stream sends these first, and then new ones; resume it with Last-Event-ID. " +
			"`dropped` counts the lines that a client lost because it read too slowly.",
		codes:     []problem.Code{problem.PolicyNotFound, problem.StreamLimitExceeded},
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.PolicyLog](a, "A page of lines, or with Accept: text/event-stream all of them and then new ones")},
		events:    map[string]any{"line": types.PolicyLine{}},
	}, a.policyLogs)
}

func (a *API) policyLogs(ctx context.Context, in *policyLogsInput) (*huma.StreamResponse, error) {
	after, err := in.after()
	if err != nil {
		return nil, err
	}
	owner, filter := ownerOf(ctx), policylog.Filter{Level: policylog.Level(in.Level), After: after}
	if !a.cfg.Egress.HasPolicy(owner, in.Name) {
		return nil, catalog.ErrUnknown
	}
	of := policylog.Policy{Owner: owner, Name: in.Name}
	return serveLog(ctx, a, in.Exchange, in.PageQuery, log[policylog.Line]{
		list:   func() []policylog.Line { return a.cfg.Egress.PolicyLogs.Lines(of, filter) },
		follow: func() (<-chan policylog.Line, func()) { return a.cfg.Egress.PolicyLogs.Follow(of, filter) },
		seq:    func(l policylog.Line) uint64 { return l.Seq },
		page: func(lines []policylog.Line, next string) any {
			return types.PolicyLog{Lines: listOf(lines, lineOf), NextCursor: next}
		},
		event: func(l policylog.Line) (string, any) { return "line", lineOf(l) },
	})
}
