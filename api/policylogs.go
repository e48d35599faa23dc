package api

import (
	"context"
	"net/http"
	"reflect"

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
	page := answerJSON[types.PolicyLog](a, "A page of lines, or with Accept: text/event-stream all of them and those to come")
	page.Content[eventStreamType] = eventSchema(a, map[string]reflect.Type{
		"line": reflect.TypeFor[types.PolicyLine](), "error": reflect.TypeFor[problem.Problem](),
	})
	register(a, route{
		method: http.MethodGet, path: "/policies/{name}/logs", id: "list-policy-logs", tag: "policies",
		summary: "What a policy of yours wrote, oldest first",
		description: "Its lines by the function log, and of its output, with the flow and the sandbox in whose request it wrote them. The latest 1,000 are kept " +
			"until the node restarts or the policy is deleted. As a stream it first sends those, then what comes; after a break go on with Last-Event-ID. " +
			"A client that reads too slowly is told how many lines it lost (`dropped`).",
		codes:   []problem.Code{problem.PolicyNotFound, problem.StreamLimitExceeded},
		answers: map[int]*huma.Response{http.StatusOK: page},
	}, a.policyLogs)
}

func (a *API) policyLogs(ctx context.Context, in *policyLogsInput) (_ *huma.StreamResponse, err error) {
	filter := policylog.Filter{Level: policylog.Level(in.Level)}
	if filter.After, err = in.after(); err != nil {
		return nil, err
	}
	owner := ownerOf(ctx)
	if !a.egress.HasPolicy(owner, in.Name) {
		return nil, catalog.ErrUnknown
	}
	if wantsEvents(in.r) {
		if err := a.streams.enter(ctx, 1); err != nil {
			return nil, err
		}
		return &huma.StreamResponse{Body: func(huma.Context) { a.streamPolicyLogs(in, owner, filter) }}, nil
	}
	lines, next := page(in.PageQuery, a.egress.PolicyLogs(owner, in.Name, filter), func(l policylog.Line) uint64 { return l.Seq })
	return jsonResponse(in.Exchange, types.PolicyLog{Lines: listOf(lines, lineOf), NextCursor: next}), nil
}

func (a *API) streamPolicyLogs(in *policyLogsInput, owner string, filter policylog.Filter) {
	s := a.openStream(in.Exchange, SandboxPath{})
	defer s.close()
	if in.r.Method == http.MethodHead {
		return
	}
	lines, stop := a.egress.FollowPolicyLogs(owner, in.Name, filter)
	defer stop()
	for {
		select {
		case <-s.ctx.Done():
			s.fail(context.Cause(s.ctx))
			return
		case line, ok := <-lines:
			if !ok {
				return // the policy is gone, or the node closes
			}
			if s.send("line", formatID(line.Seq), lineOf(line)) != nil {
				return
			}
		}
	}
}
