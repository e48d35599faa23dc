package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// MaxPolicy bounds a module that is pushed.
const MaxPolicy = 16 << 20

// PushPolicy makes a policy of a WASM module, or replaces one.
func (c *Client) PushPolicy(ctx context.Context, name string, module io.Reader) (policy types.Policy, err error) {
	_, err = c.call(ctx, request{
		method: http.MethodPut, path: "/policies/" + url.PathEscape(name), raw: module, contentType: "application/wasm",
	}, &policy)
	return policy, err
}

// Policies returns the caller's policies, and those that come with doze.
func (c *Client) Policies(ctx context.Context) ([]types.Policy, error) {
	var page types.PolicyList
	_, err := c.call(ctx, request{method: http.MethodGet, path: "/policies"}, &page)
	return page.Policies, err
}

func policyLogsQuery(level, cursor string) url.Values {
	query := url.Values{"cursor": {cursor}}
	if level != "" {
		query.Set("level", level)
	}
	return query
}

func policyLogsPath(name string) string { return "/policies/" + url.PathEscape(name) + "/logs" }

// PolicyLogs returns all kept lines of a policy with a higher seq, oldest first. With a
// level only those of that level and above.
func (c *Client) PolicyLogs(ctx context.Context, name, level string, after uint64) ([]types.PolicyLine, error) {
	all, cursor := []types.PolicyLine{}, cursorAt(after)
	for {
		var page types.PolicyLog
		query := policyLogsQuery(level, cursor)
		query.Set("limit", strconv.Itoa(eventPage))
		if _, err := c.call(ctx, request{method: http.MethodGet, path: policyLogsPath(name), query: query}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Lines...)
		if page.NextCursor == "" || page.NextCursor == cursor {
			return all, nil
		}
		cursor = page.NextCursor
	}
}

// FollowPolicyLogs calls yield with all kept lines with a higher seq, and then with
// those that come. It returns nil when the stream ends: the policy was deleted or the
// node shuts down.
func (c *Client) FollowPolicyLogs(ctx context.Context, name, level string, after uint64, yield func(types.PolicyLine) error) error {
	stream, err := c.openStream(ctx, request{method: http.MethodGet, path: policyLogsPath(name), query: policyLogsQuery(level, cursorAt(after))})
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		var line types.PolicyLine
		if err := m.decode(&line); err != nil {
			return err
		}
		return yield(line)
	})
}

// DeletePolicy forgets a policy that was pushed.
func (c *Client) DeletePolicy(ctx context.Context, name string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/policies/" + url.PathEscape(name)}, nil)
	return err
}
