package client

import (
	"context"
	"io"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// CreateSnapshot takes a snapshot of the disk of a sandbox in any state, or of some of its paths, without waking it.
func (c *Client) CreateSnapshot(ctx context.Context, idOrName string, req types.CreateSnapshotRequest) (types.Snapshot, error) {
	return fetch[types.Snapshot](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "snapshot"), body: req})
}

// Snapshots returns the snapshots of a sandbox, or all if idOrName is empty, newest first.
func (c *Client) Snapshots(ctx context.Context, idOrName string) ([]types.Snapshot, error) {
	path := "/snapshots"
	if idOrName != "" {
		path = sandboxPath(idOrName, "snapshots")
	}
	return fetchAll(ctx, c, request{path: path, query: url.Values{}},
		func(page types.SnapshotList) ([]types.Snapshot, string) { return page.Snapshots, page.NextCursor })
}

// Snapshot returns a snapshot by id or name.
func (c *Client) Snapshot(ctx context.Context, idOrName string) (types.Snapshot, error) {
	return fetch[types.Snapshot](ctx, c, request{path: "/snapshots/" + url.PathEscape(idOrName)})
}

// ExportSnapshot exports a snapshot as a container image. The archive is both an OCI image layout and
// a docker-archive. The caller must close it.
func (c *Client) ExportSnapshot(ctx context.Context, idOrName string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, request{path: "/snapshots/" + url.PathEscape(idOrName) + "/export", transfer: true})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// DeleteSnapshot deletes a snapshot. Sandboxes that are based on it retain their files.
func (c *Client) DeleteSnapshot(ctx context.Context, idOrName string) error {
	return c.delete(ctx, "/snapshots/"+url.PathEscape(idOrName))
}

// Restore replaces the disk of a sandbox by a snapshot, or only the paths of a partial one, and returns the sandbox. With
// force, it also ends requests and commands in progress.
func (c *Client) Restore(ctx context.Context, idOrName string, req types.RestoreRequest, force bool) (types.Sandbox, error) {
	return fetch[types.Sandbox](ctx, c, restoreRequest(idOrName, req, force))
}

func restoreRequest(idOrName string, req types.RestoreRequest, force bool) request {
	r := request{method: http.MethodPost, path: sandboxPath(idOrName, "restore"), body: req}
	if force {
		r.query = url.Values{"force": {"true"}}
	}
	return r
}

// Fork creates sandboxes with the disk of another, which goes on.
func (c *Client) Fork(ctx context.Context, idOrName string, req types.ForkRequest) ([]types.Sandbox, error) {
	list, err := fetch[types.ForkList](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "fork"), body: req})
	return list.Sandboxes, err
}
