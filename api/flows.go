package api

import (
	"cmp"
	"context"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/problem"
)

type flowsInput struct {
	SandboxPath
	FlowsQuery
}

// FlowsQuery is which flows are wanted, whoever sent them.
type FlowsQuery struct {
	Exchange
	Kind    types.FlowKind `query:"kind" doc:"Only this kind"`
	Verdict types.Verdict  `query:"verdict" enum:"allow,deny,respond,error" doc:"Only flows with this verdict"`
	Host    string         `query:"host" maxLength:"255" doc:"Only to this host, or with *.example.com to those below one"`
	PageQuery
}

type explainOutput struct {
	Body types.Explanation
}

func (a *API) registerFlows() {
	page := answerJSON[types.FlowList](a, "A page of flows, or with Accept: text/event-stream all of them and those to come")
	kinds := map[string]reflect.Type{"error": reflect.TypeFor[problem.Problem]()}
	for _, kind := range types.FlowKind("").Values() {
		kinds[string(kind)] = reflect.TypeFor[types.Flow]()
	}
	page.Content[eventStreamType] = eventSchema(a, kinds)
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/egress/flows", id: "list-flows", tag: "egress",
		summary: "What a sandbox sent, and what became of it, oldest first",
		description: "The latest 1,000 are kept until the node restarts. Wakes nothing. As a stream it first sends those, then what comes; after a break go " +
			"on with Last-Event-ID. Who reads too slowly is told how many it lost (`dropped`). The stream ends when the sandbox is destroyed.",
		codes:   onSandbox([]problem.Code{problem.StreamLimitExceeded}),
		answers: map[int]*huma.Response{http.StatusOK: page},
	}, a.flows)
	registerBody(a, route{
		method: http.MethodPost, path: "/sandbox/{id}/egress/explain", id: "explain-request", tag: "egress",
		summary:     "What would become of a request, and why",
		description: "Nothing is sent, no name is resolved and no policy runs. Wakes nothing.",
		codes:       onSandbox(),
	}, a.explain)
	register(a, route{
		method: http.MethodGet, path: "/egress/proxy/flows", id: "list-proxy-flows", tag: "egress",
		summary:     "What the owner's programs outside of sandboxes sent through the proxy, oldest first",
		description: "As with a sandbox's flows, without `sandbox`.",
		codes:       []problem.Code{problem.StreamLimitExceeded},
		answers:     map[int]*huma.Response{http.StatusOK: page},
	}, a.outsideFlows)
	registerBody(a, route{
		method: http.MethodPost, path: "/egress/proxy/explain", id: "explain-proxy-request", tag: "egress",
		summary:     "What would become of a request through the proxy, and why",
		description: "The node's rules and the owner's apply. Nothing is sent, no name is resolved and no policy runs.",
	}, a.explainOutside)
}

// source is whose flows are wanted.
type source struct {
	target SandboxPath // for the log
	list   func(audit.Filter) []audit.Entry
	follow func(audit.Filter) (<-chan audit.Entry, func())
}

func (a *API) flows(ctx context.Context, in *flowsInput) (*huma.StreamResponse, error) {
	return a.serveFlows(ctx, &in.FlowsQuery, func() (source, error) {
		sb, err := a.lookup(ctx, in.ID)
		return source{
			target: in.SandboxPath,
			list:   func(f audit.Filter) []audit.Entry { return a.egress.Flows(sb.ID, f) },
			follow: func(f audit.Filter) (<-chan audit.Entry, func()) { return a.egress.FollowFlows(sb.ID, f) },
		}, err
	})
}

func (a *API) outsideFlows(ctx context.Context, in *FlowsQuery) (*huma.StreamResponse, error) {
	return a.serveFlows(ctx, in, func() (source, error) {
		owner := ownerOf(ctx)
		return source{
			list:   func(f audit.Filter) []audit.Entry { return a.egress.OutsideFlows(owner, f) },
			follow: func(f audit.Filter) (<-chan audit.Entry, func()) { return a.egress.FollowOutsideFlows(owner, f) },
		}, nil
	})
}

func (a *API) serveFlows(ctx context.Context, in *FlowsQuery, find func() (source, error)) (_ *huma.StreamResponse, err error) {
	filter := audit.Filter{Kind: audit.Kind(in.Kind), Verdict: audit.Verdict(in.Verdict), Host: in.Host}
	if filter.After, err = in.after(); err != nil {
		return nil, err
	}
	from, err := find()
	if err != nil {
		return nil, err
	}
	if wantsEvents(in.r) {
		if err := a.streams.enter(ctx, 1); err != nil {
			return nil, err
		}
		return &huma.StreamResponse{Body: func(huma.Context) { a.streamFlows(in, from, filter) }}, nil
	}
	flows, next := page(in.PageQuery, from.list(filter), func(e audit.Entry) uint64 { return e.Seq })
	return jsonResponse(in.Exchange, types.FlowList{Flows: listOf(flows, flowOf), NextCursor: next}), nil
}

func (a *API) streamFlows(in *FlowsQuery, from source, filter audit.Filter) {
	s := a.openStream(in.Exchange, from.target)
	defer s.close()
	if in.r.Method == http.MethodHead {
		return
	}
	entries, stop := from.follow(filter)
	defer stop()
	for {
		select {
		case <-s.ctx.Done():
			s.fail(context.Cause(s.ctx))
			return
		case e, ok := <-entries:
			if !ok {
				return // the sandbox is gone, or the node closes
			}
			if s.send(string(e.Kind), formatID(e.Seq), flowOf(e)) != nil {
				return
			}
		}
	}
}

func (a *API) explain(ctx context.Context, in *SandboxPath, body *types.ExplainRequest) (*explainOutput, error) {
	sb, err := a.lookup(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	explanation, err := a.egress.Explain(ctx, sb.ID, cmp.Or(body.Method, http.MethodGet), body.URL, headerOf(body.Headers))
	if err != nil {
		return nil, err
	}
	return &explainOutput{Body: explanationOf(explanation)}, nil
}

func (a *API) explainOutside(ctx context.Context, _ *struct{}, body *types.ExplainRequest) (*explainOutput, error) {
	explanation, err := a.egress.ExplainOutside(ctx, ownerOf(ctx), cmp.Or(body.Method, http.MethodGet), body.URL, headerOf(body.Headers))
	if err != nil {
		return nil, err
	}
	return &explainOutput{Body: explanationOf(explanation)}, nil
}

func headerOf(headers map[string]string) http.Header {
	header := make(http.Header, len(headers))
	for name, value := range headers {
		header.Add(name, value)
	}
	return header
}
