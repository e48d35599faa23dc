package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"
)

// MaxPolicy bounds a module that is pushed.
const MaxPolicy = 16 << 20

// Policy is what is known of a policy.
type Policy struct {
	Name      string    `json:"name"`
	Digest    string    `json:"digest"`
	Size      int64     `json:"size"`
	BuiltIn   bool      `json:"built_in,omitempty"` // it comes with doze
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	UsedBy    []string  `json:"used_by,omitempty"` // rules, such as owner/NAME
}

// PushPolicy makes a policy of a WASM module, or replaces one.
func (c *Client) PushPolicy(ctx context.Context, name string, module io.Reader) (policy Policy, err error) {
	_, err = c.call(ctx, request{
		method: http.MethodPut, path: "/policies/" + url.PathEscape(name), raw: module, contentType: "application/wasm",
	}, &policy)
	return policy, err
}

// Policies returns the caller's policies, and those that come with doze.
func (c *Client) Policies(ctx context.Context) ([]Policy, error) {
	var page struct {
		Policies []Policy `json:"policies"`
	}
	_, err := c.call(ctx, request{method: http.MethodGet, path: "/policies"}, &page)
	return page.Policies, err
}

// DeletePolicy forgets a policy that was pushed.
func (c *Client) DeletePolicy(ctx context.Context, name string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/policies/" + url.PathEscape(name)}, nil)
	return err
}
