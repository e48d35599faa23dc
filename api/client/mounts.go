package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// Mount mounts a bucket as a folder of a sandbox, which it wakes. Repeating it changes nothing.
func (c *Client) Mount(ctx context.Context, idOrName string, req types.MountRequest) (types.Mount, error) {
	return fetch[types.Mount](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "mounts"), body: req})
}

// Mounts returns the mounts of a sandbox, sorted by path.
func (c *Client) Mounts(ctx context.Context, idOrName string) ([]types.Mount, error) {
	list, err := fetch[types.MountList](ctx, c, request{path: sandboxPath(idOrName, "mounts")})
	return list.Mounts, err
}

// Unmount removes the mount at a path of a sandbox. Open files remain usable until they are closed.
func (c *Client) Unmount(ctx context.Context, idOrName, path string) error {
	return c.delete(ctx, sandboxPath(idOrName, "mounts")+"?"+url.Values{"path": {path}}.Encode())
}
