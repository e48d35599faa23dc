package client

import (
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"unicode/utf8"

	"github.com/doze-run/doze/api/types"
)

// PutSecret makes a secret, or replaces its value and hosts. Nobody can read the
// value again.
func (c *Client) PutSecret(ctx context.Context, name string, value []byte, hosts []string) (secret types.Secret, err error) {
	body := types.SetSecretRequest{Value: string(value), Hosts: hosts}
	if !utf8.Valid(value) {
		body.Value, body.Encoding = base64.StdEncoding.EncodeToString(value), types.EncodingBase64
	}
	_, err = c.call(ctx, request{method: http.MethodPut, path: "/secrets/" + url.PathEscape(name), body: body}, &secret)
	return secret, err
}

// Secrets returns the caller's secrets, without their values.
func (c *Client) Secrets(ctx context.Context) ([]types.Secret, error) {
	var page types.SecretList
	_, err := c.call(ctx, request{method: http.MethodGet, path: "/secrets"}, &page)
	return page.Secrets, err
}

// DeleteSecret forgets a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/secrets/" + url.PathEscape(name)}, nil)
	return err
}
