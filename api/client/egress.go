package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/doze-run/doze/api/types"
)

// RuleSet is the rules of an owner or of a sandbox.
type RuleSet struct {
	Revision  int64     `json:"revision"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	Default   string    `json:"default"` // inherit or deny
	// Rules is the list as the node wrote it, so that fields of a newer node are not lost.
	Rules json.RawMessage `json:"rules"`
	// Warnings of SetRules are about rules that were accepted but may not work as intended.
	Warnings []types.Warning `json:"warnings,omitempty"`
}

// RulesUpdate is a change of rules.
type RulesUpdate struct {
	Default string          // inherit or deny; empty keeps the present one
	Rules   json.RawMessage // replaces all rules
	// IfRevision, unless nil, is the revision to replace. If the rules have another one,
	// SetRules returns a *problem.Problem with problem.RevisionConflict.
	IfRevision *int64
}

// NodeRules are the operator's.
type NodeRules struct {
	Default string          `json:"default"`
	Rules   json.RawMessage `json:"rules"`
}

// FlowFilter selects flows. Empty fields match all.
type FlowFilter struct {
	Kind    types.FlowKind
	Verdict types.Verdict
	Host    string // a name, or *.example.com
}

// flows returns the request for the flows of a sandbox, or with an empty name of the
// owner's clients of the proxy.
func (f FlowFilter) flows(sandbox string, after uint64) request {
	query := cursorAt(after)
	for name, value := range map[string]string{"kind": string(f.Kind), "verdict": string(f.Verdict), "host": f.Host} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return request{path: proxyOr(sandbox, "flows"), query: query}
}

// rulesPath returns the path of a sandbox's rules, or with an empty name of the owner's.
func rulesPath(sandbox string) string {
	if sandbox == "" {
		return "/egress/rules"
	}
	return sandboxPath(sandbox, "egress", "rules")
}

// Presets returns the presets by name.
func (c *Client) Presets(ctx context.Context) ([]types.Preset, error) {
	list, err := fetch[types.PresetList](ctx, c, request{path: "/egress/presets"})
	return list.Presets, err
}

// NodeRules returns the operator's rules.
func (c *Client) NodeRules(ctx context.Context) (NodeRules, error) {
	return fetch[NodeRules](ctx, c, request{path: "/node/egress/rules"})
}

// Rules returns the rules of a sandbox, or with an empty name the owner's.
func (c *Client) Rules(ctx context.Context, sandbox string) (RuleSet, error) {
	return fetch[RuleSet](ctx, c, request{path: rulesPath(sandbox)})
}

// SetRules replaces all rules of a sandbox, or with an empty name the owner's.
func (c *Client) SetRules(ctx context.Context, sandbox string, u RulesUpdate) (RuleSet, error) {
	r := request{method: http.MethodPut, path: rulesPath(sandbox), body: struct {
		Default string          `json:"default,omitempty"`
		Rules   json.RawMessage `json:"rules"`
	}{u.Default, u.Rules}}
	if u.IfRevision != nil {
		r.header = http.Header{"If-Match": {strconv.Quote(strconv.FormatInt(*u.IfRevision, 10))}}
	}
	return fetch[RuleSet](ctx, c, r)
}

// proxyOr returns the path of a route of a sandbox's egress, or with an empty name of the
// proxy's.
func proxyOr(sandbox, route string) string {
	if sandbox == "" {
		return "/egress/proxy/" + route
	}
	return sandboxPath(sandbox, "egress", route)
}

// Flows returns all stored flows of a sandbox with a higher seq, oldest first; with an
// empty name, the flows of the owner's clients of the proxy.
func (c *Client) Flows(ctx context.Context, sandbox string, filter FlowFilter, after uint64) ([]types.Flow, error) {
	return fetchAll(ctx, c, filter.flows(sandbox, after),
		func(page types.FlowList) ([]types.Flow, string) { return page.Flows, page.NextCursor })
}

// FollowFlows yields the flows that Flows returns, and then new ones. It returns nil when
// the stream ends: the sandbox was destroyed or the node shuts down.
func (c *Client) FollowFlows(ctx context.Context, sandbox string, filter FlowFilter, after uint64, yield func(types.Flow) error) error {
	return follow(ctx, c, filter.flows(sandbox, after), yield)
}

// Explain returns how the rules apply to a request of a sandbox, or with an empty name to a
// request through the proxy. The request is not sent.
func (c *Client) Explain(ctx context.Context, sandbox string, req types.ExplainRequest) (types.Explanation, error) {
	return fetch[types.Explanation](ctx, c, request{method: http.MethodPost, path: proxyOr(sandbox, "explain"), body: req})
}

// EgressCA returns the certificates of the node's certificate authority, in PEM.
func (c *Client) EgressCA(ctx context.Context) ([]byte, error) {
	resp, err := c.send(ctx, request{path: "/egress/ca"})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, maxProblem))
}
