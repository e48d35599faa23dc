package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// OpenSession wakes the sandbox and opens a session: a shell whose working directory,
// variables, functions and options persist from one command to the next. Exec and ExecStream
// run commands in it.
func (c *Client) OpenSession(ctx context.Context, idOrName string, req types.OpenSessionRequest) (types.Session, error) {
	return fetch[types.Session](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "sessions"), body: req})
}

// Sessions returns the sessions as last known. It never wakes the sandbox.
func (c *Client) Sessions(ctx context.Context, idOrName string) ([]types.Session, error) {
	page, err := fetch[types.SessionList](ctx, c, request{path: sandboxPath(idOrName, "sessions")})
	return page.Sessions, err
}

// Session returns a session as last known. It never wakes the sandbox.
func (c *Client) Session(ctx context.Context, idOrName, session string) (types.Session, error) {
	return fetch[types.Session](ctx, c, request{path: sandboxPath(idOrName, "sessions", url.PathEscape(session))})
}

// InterruptSession sends SIGINT to the command that the session runs, if any.
func (c *Client) InterruptSession(ctx context.Context, idOrName, session string) (types.Session, error) {
	return fetch[types.Session](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "sessions", url.PathEscape(session), "interrupt")})
}

// CloseSession ends the shell of a session with all that it started.
func (c *Client) CloseSession(ctx context.Context, idOrName, session string) (types.Session, error) {
	return fetch[types.Session](ctx, c, request{method: http.MethodDelete, path: sandboxPath(idOrName, "sessions", url.PathEscape(session))})
}
