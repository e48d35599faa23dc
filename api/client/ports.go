package client

import (
	"context"
	"net/http"
	"strconv"
)

// ExposeRequest asks for a preview of a port. What is empty gets its default.
type ExposeRequest struct {
	Port      uint16   `json:"port"`
	Access    string   `json:"access,omitempty"`    // token, public
	Wake      string   `json:"wake,omitempty"`      // any, navigation, never
	Host      string   `json:"host,omitempty"`      // auto, rewrite, preserve
	Protocol  string   `json:"protocol,omitempty"`  // auto, http1, h2c
	WebSocket string   `json:"websocket,omitempty"` // sleep, keep_awake
	Wait      Duration `json:"wait,omitzero"`       // for somebody to listen; wakes the sandbox
}

// Expose gives a port a preview URL, or changes the modes of one that has it.
func (c *Client) Expose(ctx context.Context, idOrName string, req ExposeRequest) (port Port, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "expose"), body: req}, &port)
	return port, err
}

// Unexpose ends the preview of a port. Its URL is gone for good.
func (c *Client) Unexpose(ctx context.Context, idOrName string, port uint16) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName, "ports", strconv.Itoa(int(port)))}, nil)
	return err
}
