package client

import (
	"context"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// Expose gives a port a preview URL, or changes the modes of one that has it.
func (c *Client) Expose(ctx context.Context, idOrName string, req types.ExposePortRequest) (port types.Port, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "expose"), body: req}, &port)
	return port, err
}

// Unexpose ends the preview of a port. Its URL is gone for good.
func (c *Client) Unexpose(ctx context.Context, idOrName string, port uint16) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName, "ports", strconv.Itoa(int(port)))}, nil)
	return err
}
