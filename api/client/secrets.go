package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// PutSecret creates a secret, or replaces its value and hosts. The value cannot be read
// again.
func (c *Client) PutSecret(ctx context.Context, name string, value []byte, hosts []string) (types.Secret, error) {
	body := types.SetSecretRequest{Hosts: hosts}
	body.Value, body.Encoding = types.Encode(value)
	return fetch[types.Secret](ctx, c, request{method: http.MethodPut, path: "/secrets/" + url.PathEscape(name), body: body})
}

// Secrets returns the caller's secrets, without their values.
func (c *Client) Secrets(ctx context.Context) ([]types.Secret, error) {
	page, err := fetch[types.SecretList](ctx, c, request{path: "/secrets"})
	return page.Secrets, err
}

// DeleteSecret deletes a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	return c.delete(ctx, "/secrets/"+url.PathEscape(name))
}
