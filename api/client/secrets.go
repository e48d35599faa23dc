package client

import (
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"unicode/utf8"

	"github.com/doze-run/doze/api/types"
)

// PutSecret creates a secret, or replaces its value and hosts. The value cannot be read
// again.
func (c *Client) PutSecret(ctx context.Context, name string, value []byte, hosts []string) (types.Secret, error) {
	body := types.SetSecretRequest{Value: string(value), Hosts: hosts}
	if !utf8.Valid(value) {
		body.Value, body.Encoding = base64.StdEncoding.EncodeToString(value), types.EncodingBase64
	}
	return fetch[types.Secret](ctx, c, request{method: http.MethodPut, path: "/secrets/" + url.PathEscape(name), body: body})
}

// Secrets returns the caller's secrets, without their values.
func (c *Client) Secrets(ctx context.Context) ([]types.Secret, error) {
	page, err := fetch[types.SecretList](ctx, c, request{path: "/secrets"})
	return page.Secrets, err
}

// DeleteSecret deletes a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/secrets/" + url.PathEscape(name)}, nil)
	return err
}
