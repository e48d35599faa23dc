package client

import (
	"context"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// Expose gives a port a preview URL, or changes the modes of an exposed port.
func (c *Client) Expose(ctx context.Context, idOrName string, req types.ExposePortRequest) (types.Port, error) {
	return fetch[types.Port](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "expose"), body: req})
}

// Ports returns the exposed ports, and those on which processes listen, as last known. It
// never wakes the sandbox.
func (c *Client) Ports(ctx context.Context, idOrName string) (types.PortList, error) {
	return fetch[types.PortList](ctx, c, request{path: sandboxPath(idOrName, "ports")})
}

// Unexpose ends the preview of a port. Its URL is never used again.
func (c *Client) Unexpose(ctx context.Context, idOrName string, port uint16) error {
	return c.delete(ctx, sandboxPath(idOrName, "ports", strconv.Itoa(int(port))))
}
