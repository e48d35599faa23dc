package client

import (
	"context"
	"net/http"
	"net/url"
	"strings"

	"github.com/doze-run/doze/api/types"
)

// SignTerminalURL returns the URL of a WebSocket for terminals of the sandbox that needs no
// token, for browsers. It wakes nothing.
func (c *Client) SignTerminalURL(ctx context.Context, idOrName string, req types.SignTerminalURLRequest) (types.SignedURL, error) {
	return fetch[types.SignedURL](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "terminal", "url"), body: req})
}

// TerminalPage returns the address of the node's page with a terminal of the sandbox, for
// people. Without an id it is the page's default, main.
func (c *Client) TerminalPage(idOrName, terminal string) string {
	address := strings.TrimSuffix(c.base, "/api/v1") + "/terminal/" + url.PathEscape(idOrName)
	if terminal != "" {
		address += "?" + url.Values{"id": {terminal}}.Encode()
	}
	return address
}
