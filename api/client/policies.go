package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// MaxPolicy limits a pushed module, in bytes.
const MaxPolicy = 16 << 20

// PushPolicy creates a policy from a WASM module, or replaces one.
func (c *Client) PushPolicy(ctx context.Context, name string, module io.Reader) (types.Policy, error) {
	return fetch[types.Policy](ctx, c, request{
		method: http.MethodPut, path: "/policies/" + url.PathEscape(name), raw: module, contentType: "application/wasm",
	})
}

// Policies returns the caller's policies, and those that are part of doze.
func (c *Client) Policies(ctx context.Context) ([]types.Policy, error) {
	page, err := fetch[types.PolicyList](ctx, c, request{path: "/policies"})
	return page.Policies, err
}

func policyLogs(name, level string, after uint64) request {
	query := cursorAt(after)
	if level != "" {
		query.Set("level", level)
	}
	return request{path: "/policies/" + url.PathEscape(name) + "/logs", query: query}
}

// PolicyLogs returns all stored lines of a policy with a higher seq, oldest first. A level
// selects lines of that level and above.
func (c *Client) PolicyLogs(ctx context.Context, name, level string, after uint64) ([]types.PolicyLine, error) {
	return fetchAll(ctx, c, policyLogs(name, level, after),
		func(page types.PolicyLog) ([]types.PolicyLine, string) { return page.Lines, page.NextCursor })
}

// FollowPolicyLogs yields all stored lines with a higher seq, and then new ones. It returns
// nil when the stream ends: the policy was deleted or the node shuts down.
func (c *Client) FollowPolicyLogs(ctx context.Context, name, level string, after uint64, yield func(types.PolicyLine) error) error {
	return follow(ctx, c, policyLogs(name, level, after), yield)
}

// DeletePolicy deletes a pushed policy.
func (c *Client) DeletePolicy(ctx context.Context, name string) error {
	return c.delete(ctx, "/policies/"+url.PathEscape(name))
}
