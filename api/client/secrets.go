package client

import (
	"context"
	"encoding/base64"
	"net/http"
	"net/url"
	"time"
	"unicode/utf8"
)

// Secret is what may be known of a secret.
type Secret struct {
	Name       string    `json:"name"`
	Hosts      []string  `json:"hosts"`
	Version    int64     `json:"version"`
	CreatedAt  time.Time `json:"created_at"`
	UpdatedAt  time.Time `json:"updated_at"`
	Unreadable bool      `json:"unreadable,omitempty"` // it has to be put again
}

// PutSecret makes a secret, or replaces its value and hosts. Nobody can read the
// value again.
func (c *Client) PutSecret(ctx context.Context, name string, value []byte, hosts []string) (secret Secret, err error) {
	body := map[string]any{"value": string(value), "hosts": hosts}
	if !utf8.Valid(value) {
		body["value"], body["encoding"] = base64.StdEncoding.EncodeToString(value), "base64"
	}
	_, err = c.call(ctx, request{method: http.MethodPut, path: "/secrets/" + url.PathEscape(name), body: body}, &secret)
	return secret, err
}

// Secrets returns the caller's secrets, without their values.
func (c *Client) Secrets(ctx context.Context) ([]Secret, error) {
	var page struct {
		Secrets []Secret `json:"secrets"`
	}
	_, err := c.call(ctx, request{method: http.MethodGet, path: "/secrets"}, &page)
	return page.Secrets, err
}

// DeleteSecret forgets a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/secrets/" + url.PathEscape(name)}, nil)
	return err
}
