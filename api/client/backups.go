package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/doze-run/doze/api/types"
)

// CreateBackup backs up the disk of a sandbox in any state to the node's object store, without waking
// the sandbox. If progress is not nil, it is called with the progress that the node reports. If ctx
// ends first, the backup continues.
func (c *Client) CreateBackup(ctx context.Context, idOrName string, req types.CreateBackupRequest, progress func(types.BackupProgress)) (types.Backup, error) {
	req.Stream = progress != nil
	return fetchProgress[types.Backup](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, "backup"), body: req}, progress)
}

// Backups returns the backups of a sandbox, or all backups if idOrName is empty, newest first.
func (c *Client) Backups(ctx context.Context, idOrName string) ([]types.Backup, error) {
	path := "/backups"
	if idOrName != "" {
		path = sandboxPath(idOrName, "backups")
	}
	return fetchAll(ctx, c, request{path: path, query: url.Values{}},
		func(page types.BackupList) ([]types.Backup, string) { return page.Backups, page.NextCursor })
}

// Backup returns the backup with this id.
func (c *Client) Backup(ctx context.Context, id string) (types.Backup, error) {
	return fetch[types.Backup](ctx, c, request{path: "/backups/" + url.PathEscape(id)})
}

// DeleteBackup deletes the backup with this id.
func (c *Client) DeleteBackup(ctx context.Context, id string) error {
	return c.delete(ctx, "/backups/"+url.PathEscape(id))
}

// RestoreBackup is like Restore, but restores the backup req.BackupID, which may be of another sandbox.
// If progress is not nil, it is called with the progress that the node reports. If ctx ends first, the
// restore continues.
func (c *Client) RestoreBackup(ctx context.Context, idOrName string, req types.RestoreRequest, force bool, progress func(types.BackupProgress)) (types.Sandbox, error) {
	req.Stream = progress != nil
	return fetchProgress[types.Sandbox](ctx, c, restoreRequest(idOrName, req, force), progress)
}
