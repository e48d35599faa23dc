package api

import (
	"cmp"
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// FlowsQuery is the part of a request's input that selects flows.
type FlowsQuery struct {
	Exchange
	Kind    types.FlowKind `query:"kind" doc:"Only this kind"`
	Verdict types.Verdict  `query:"verdict" enum:"allow,deny,respond,error" doc:"Only flows with this verdict"`
	Host    string         `query:"host" maxLength:"255" doc:"Only flows to this host; *.example.com selects the hosts below example.com"`
	PageQuery
}

type flowsInput struct {
	SandboxPath
	FlowsQuery
}

func (a *API) registerFlows() {
	page := responseJSON[types.FlowList](a, "A page of flows, or with Accept: text/event-stream all of them and then new ones")
	kinds := eventsOf[types.FlowKind](types.Flow{})
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/egress/flows", id: "list-flows", tag: "egress",
		summary: "List the flows of a sandbox with their verdicts, oldest first",
		description: "The latest 1,000 are stored until the node restarts. Never wakes the sandbox. A stream sends these first, and then new ones; resume it " +
			"with Last-Event-ID. `dropped` counts the flows that a client lost because it read too slowly. The stream ends when the sandbox is destroyed.",
		codes:     []problem.Code{problem.StreamLimitExceeded},
		responses: map[int]*huma.Response{http.StatusOK: page},
		events:    kinds,
	}, withSandbox(a, a.flows))
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/egress/explain", id: "explain-request", tag: "egress",
		summary:     "Explain how the rules apply to a request",
		description: "Sends no request, resolves no name and runs no policy. Never wakes the sandbox.",
	}, withSandboxBody(a, func(ctx context.Context, _ *SandboxPath, body *types.ExplainRequest, sb sandbox.Sandbox) (*output[types.Explanation], error) {
		return respondExplanation(a.cfg.Egress.Explain(ctx, sb.ID, cmp.Or(body.Method, http.MethodGet), body.URL, headerOf(body.Headers)))
	}))
	register(a, route{
		method: http.MethodGet, path: "/egress/proxy/flows", id: "list-proxy-flows", tag: "egress",
		summary:     "List the flows of the owner's clients of the proxy with their verdicts, oldest first",
		description: "The latest 1,000 of an owner are stored until the node restarts. A stream sends these first, and then new ones; resume it with Last-Event-ID.",
		codes:       []problem.Code{problem.StreamLimitExceeded},
		responses:   map[int]*huma.Response{http.StatusOK: page},
		events:      kinds,
	}, a.proxyFlows)
	registerBody(a, route{
		method: http.MethodPost, path: "/egress/proxy/explain", id: "explain-proxy-request", tag: "egress",
		summary:     "Explain how the rules apply to a request through the proxy",
		description: "The node's rules and the owner's apply. Sends no request, resolves no name and runs no policy.",
	}, func(ctx context.Context, _ *struct{}, body *types.ExplainRequest) (*output[types.Explanation], error) {
		return respondExplanation(a.cfg.Egress.ExplainProxy(ctx, ownerOf(ctx), cmp.Or(body.Method, http.MethodGet), body.URL, headerOf(body.Headers)))
	})
}

func (a *API) flows(ctx context.Context, in *flowsInput, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	return a.serveFlows(ctx, &in.FlowsQuery, string(sb.ID))
}

func (a *API) proxyFlows(ctx context.Context, in *FlowsQuery) (*huma.StreamResponse, error) {
	return a.serveFlows(ctx, in, flow.ProxyName(ownerOf(ctx)))
}

// serveFlows responds with the flows of a client of egress, see flow.Client.Name.
func (a *API) serveFlows(ctx context.Context, in *FlowsQuery, client string) (*huma.StreamResponse, error) {
	after, err := in.after()
	if err != nil {
		return nil, err
	}
	filter := audit.Filter{Kind: audit.Kind(in.Kind), Verdict: audit.Verdict(in.Verdict), Host: in.Host, After: after}
	return serveLog(ctx, a, in.Exchange, in.PageQuery, log[audit.Entry]{
		list:   func() []audit.Entry { return a.cfg.Egress.Flows.Entries(client, filter) },
		follow: func() (<-chan audit.Entry, func()) { return a.cfg.Egress.Flows.Follow(client, filter) },
		seq:    func(e audit.Entry) uint64 { return e.Seq },
		page: func(entries []audit.Entry, next string) any {
			return types.FlowList{Flows: listOf(entries, flowOf), NextCursor: next}
		},
		event: func(e audit.Entry) (string, any) { return string(e.Kind), flowOf(e) },
	})
}

func respondExplanation(e explain.Explanation, err error) (*output[types.Explanation], error) {
	return &output[types.Explanation]{explanationOf(e)}, err
}

func headerOf(headers map[string]string) http.Header {
	header := make(http.Header, len(headers))
	for name, value := range headers {
		header.Add(name, value)
	}
	return header
}
