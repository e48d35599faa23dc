package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/doze-run/doze/api/types"
)

// RuleSet is the rules of an owner or of a sandbox.
type RuleSet struct {
	Revision  int64     `json:"revision"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	Default   string    `json:"default"` // inherit or deny
	// Rules is their list as the API writes it: a program that does not know a field
	// of a newer node must not lose it.
	Rules json.RawMessage `json:"rules"`
	// Warnings of SetRules are about rules that were accepted but may not work as intended.
	Warnings []types.Warning `json:"warnings,omitempty"`
}

// RulesUpdate is a change of rules.
type RulesUpdate struct {
	Default string          // inherit or deny; empty leaves it as it is
	Rules   json.RawMessage // replace all that there are
	// IfRevision, unless nil, is the only revision that is replaced: otherwise SetRules
	// returns an *Error with problem.RevisionConflict.
	IfRevision *int64
}

// Rule is what of a rule is shown.
type Rule struct {
	Name         string   `json:"name"`
	Hosts        []string `json:"hosts"`
	Addresses    []string `json:"addresses"`
	AllowPrivate bool     `json:"allow_private"`
	Ports        []string `json:"ports"`
	Scheme       string   `json:"scheme"`
	Methods      []string `json:"methods"`
	Paths        []string `json:"paths"`
	// Headers that a request has to have.
	Headers  map[string]string `json:"headers"`
	Action   string            `json:"action"`
	Reason   string            `json:"reason"`
	Respond  json.RawMessage   `json:"respond"`
	Policies []RulePolicy      `json:"policies"`
	// Placeholders are environment variables, to names of secrets.
	Placeholders map[string]string `json:"placeholders"`
}

// RulePolicy is a policy with the secrets that it gets.
type RulePolicy struct {
	Name    string            `json:"name"`
	Secrets map[string]string `json:"secrets"`
}

// NodeRules are the operator's.
type NodeRules struct {
	Default string          `json:"default"`
	Rules   json.RawMessage `json:"rules"`
}

// FlowFilter says which flows somebody wants. What is empty matches all.
type FlowFilter struct {
	Kind    types.FlowKind
	Verdict types.Verdict
	Host    string // a name, or *.example.com
}

func (f FlowFilter) query(cursor string) url.Values {
	query := url.Values{"cursor": {cursor}}
	for name, value := range map[string]string{"kind": string(f.Kind), "verdict": string(f.Verdict), "host": f.Host} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return query
}

// rulesPath is that of a sandbox's rules, or without one of the owner's.
func rulesPath(sandbox string) string {
	if sandbox == "" {
		return "/egress/rules"
	}
	return sandboxPath(sandbox, "egress", "rules")
}

// Presets returns the presets by name.
func (c *Client) Presets(ctx context.Context) ([]types.Preset, error) {
	var list types.PresetList
	_, err := c.call(ctx, request{method: http.MethodGet, path: "/egress/presets"}, &list)
	return list.Presets, err
}

// NodeRules returns the operator's rules.
func (c *Client) NodeRules(ctx context.Context) (rules NodeRules, err error) {
	_, err = c.call(ctx, request{method: http.MethodGet, path: "/node/egress/rules"}, &rules)
	return rules, err
}

// Rules returns those of a sandbox, or with an empty name the owner's.
func (c *Client) Rules(ctx context.Context, sandbox string) (set RuleSet, err error) {
	_, err = c.call(ctx, request{method: http.MethodGet, path: rulesPath(sandbox)}, &set)
	return set, err
}

// SetRules replaces all rules of a sandbox, or with an empty name the owner's.
func (c *Client) SetRules(ctx context.Context, sandbox string, u RulesUpdate) (set RuleSet, err error) {
	r := request{method: http.MethodPut, path: rulesPath(sandbox), body: struct {
		Default string          `json:"default,omitempty"`
		Rules   json.RawMessage `json:"rules"`
	}{u.Default, u.Rules}}
	if u.IfRevision != nil {
		r.header = http.Header{"If-Match": {strconv.Quote(strconv.FormatInt(*u.IfRevision, 10))}}
	}
	_, err = c.call(ctx, r, &set)
	return set, err
}

// flowsPath is that of a sandbox's flows, or without one of those of the proxy.
func flowsPath(sandbox string) string {
	if sandbox == "" {
		return "/egress/proxy/flows"
	}
	return sandboxPath(sandbox, "egress", "flows")
}

// explainPath is the same for requests that are not sent.
func explainPath(sandbox string) string {
	if sandbox == "" {
		return "/egress/proxy/explain"
	}
	return sandboxPath(sandbox, "egress", "explain")
}

// Flows returns all kept flows of a sandbox with a higher seq, oldest first; with an
// empty name those of the owner's programs outside of sandboxes, through the proxy.
func (c *Client) Flows(ctx context.Context, sandbox string, filter FlowFilter, after uint64) ([]types.Flow, error) {
	all, cursor := []types.Flow{}, cursorAt(after)
	for {
		var page types.FlowList
		query := filter.query(cursor)
		query.Set("limit", strconv.Itoa(eventPage))
		if _, err := c.call(ctx, request{method: http.MethodGet, path: flowsPath(sandbox), query: query}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Flows...)
		if page.NextCursor == "" || page.NextCursor == cursor {
			return all, nil
		}
		cursor = page.NextCursor
	}
}

// FollowFlows calls yield with all kept flows with a higher seq, of whom Flows says,
// and then with those that come. It returns nil when the stream ends: the sandbox was
// destroyed or the node shuts down.
func (c *Client) FollowFlows(ctx context.Context, sandbox string, filter FlowFilter, after uint64, yield func(types.Flow) error) error {
	stream, err := c.openStream(ctx, request{method: http.MethodGet, path: flowsPath(sandbox), query: filter.query(cursorAt(after))})
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		var f types.Flow
		if err := m.decode(&f); err != nil {
			return err
		}
		return yield(f)
	})
}

// Explain says what would become of a request of a sandbox, or with an empty name of
// one through the proxy. Nothing is sent.
func (c *Client) Explain(ctx context.Context, sandbox string, req types.ExplainRequest) (e types.Explanation, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: explainPath(sandbox), body: req}, &e)
	return e, err
}

// EgressCA returns the certificates of the node's own authority, in PEM.
func (c *Client) EgressCA(ctx context.Context) ([]byte, error) {
	resp, err := c.send(ctx, request{method: http.MethodGet, path: "/egress/ca"})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, maxProblem))
}
