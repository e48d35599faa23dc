package client

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/doze-run/doze/api/types"
)

// Create returns the sandbox when it runs, and whether this call created it. The creation
// continues when ctx ends; the same call joins it.
func (c *Client) Create(ctx context.Context, req types.CreateSandboxRequest) (sb types.Sandbox, created bool, err error) {
	status, err := c.call(ctx, request{method: http.MethodPost, path: "/sandbox", body: req}, &sb)
	return sb, status == http.StatusCreated, err
}

// Filter of a list. Empty fields match all.
type Filter struct {
	State  types.State
	Labels []string // "key=value"
	Usage  bool     // include CPU time and memory
}

// List returns all sandboxes that match the filter, without env and processes.
func (c *Client) List(ctx context.Context, filter Filter) ([]types.Sandbox, error) {
	query := url.Values{}
	if filter.State != "" {
		query.Set("state", string(filter.State))
	}
	if filter.Usage {
		query.Set("usage", "true")
	}
	if len(filter.Labels) > 0 {
		query["label"] = slices.Clone(filter.Labels)
	}
	return fetchAll(ctx, c, request{path: "/sandbox", query: query},
		func(page types.SandboxList) ([]types.Sandbox, string) { return page.Sandboxes, page.NextCursor })
}

// Get returns one sandbox. It never wakes it.
func (c *Client) Get(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return fetch[types.Sandbox](ctx, c, request{path: sandboxPath(idOrName)})
}

// Update changes a sandbox. It never wakes it.
func (c *Client) Update(ctx context.Context, idOrName string, req types.UpdateSandboxRequest) (types.Sandbox, error) {
	return fetch[types.Sandbox](ctx, c, request{method: http.MethodPatch, path: sandboxPath(idOrName), body: req})
}

// Delete destroys a sandbox with its files.
func (c *Client) Delete(ctx context.Context, idOrName string) error {
	return c.delete(ctx, sandboxPath(idOrName))
}

// Sleep returns the sandbox when it sleeps.
func (c *Client) Sleep(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "sleep", nil, nil)
}

// ForceSleep is Sleep even if requests, commands or transfers are in progress: they are
// paused until the next wake.
func (c *Client) ForceSleep(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "sleep", url.Values{"force": {"true"}}, nil)
}

// Wake returns the sandbox when it runs.
func (c *Client) Wake(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "wake", nil, nil)
}

// Stop returns the sandbox when its processes have ended.
func (c *Client) Stop(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "stop", nil, nil)
}

// ForceStop is Stop even if requests, commands or transfers are in progress: they end with
// the sandbox's processes.
func (c *Client) ForceStop(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "stop", url.Values{"force": {"true"}}, nil)
}

// Archive moves the disk of a sandbox to the node's object store, and returns the sandbox. Without
// force it fails while requests, commands or transfers are in progress. If progress is not nil, it is
// called with the progress that the node reports. If ctx ends first, the archival continues.
func (c *Client) Archive(ctx context.Context, idOrName string, force bool, progress func(types.BackupProgress)) (types.Sandbox, error) {
	r := request{method: http.MethodPost, path: sandboxPath(idOrName, "archive"), body: types.ArchiveSandboxRequest{Stream: progress != nil}}
	if force {
		r.query = url.Values{"force": {"true"}}
	}
	return fetchProgress[types.Sandbox](ctx, c, r, progress)
}

// Hold keeps the sandbox from sleeping when it is idle, for a duration; 0 ends a hold.
func (c *Client) Hold(ctx context.Context, idOrName string, d time.Duration) (types.Sandbox, error) {
	return c.transition(ctx, idOrName, "hold", nil, types.HoldRequest{Duration: types.Duration(d)})
}

func (c *Client) transition(ctx context.Context, idOrName, route string, query url.Values, body any) (types.Sandbox, error) {
	return fetch[types.Sandbox](ctx, c, request{method: http.MethodPost, path: sandboxPath(idOrName, route), query: query, body: body})
}

// Node returns the state of the node.
func (c *Client) Node(ctx context.Context) (types.Node, error) {
	return fetch[types.Node](ctx, c, request{path: "/node"})
}

// DiskUsage returns the disk usage of the node, with up to limit of the sandboxes with the largest disks; 0
// is the node's default.
func (c *Client) DiskUsage(ctx context.Context, limit int) (types.NodeDiskUsage, error) {
	r := request{path: "/node/df"}
	if limit != 0 {
		r.query = url.Values{"max_sandboxes": {strconv.Itoa(limit)}}
	}
	return fetch[types.NodeDiskUsage](ctx, c, r)
}

// Adopt adopts a sandbox from quarantine. An empty name is its last name.
func (c *Client) Adopt(ctx context.Context, id, name string) (types.Sandbox, error) {
	body := types.AdoptRequest{Name: name}
	return fetch[types.Sandbox](ctx, c, request{method: http.MethodPost, path: "/node/quarantine/" + url.PathEscape(id) + "/adopt", body: body})
}

// DeleteQuarantined removes a sandbox in quarantine with its files.
func (c *Client) DeleteQuarantined(ctx context.Context, id string) error {
	return c.delete(ctx, "/node/quarantine/"+url.PathEscape(id))
}

// Environment returns the environment of the commands of a sandbox, beyond the image's. It never
// wakes the sandbox.
func (c *Client) Environment(ctx context.Context, idOrName string) (map[string]string, error) {
	env, err := fetch[types.Environment](ctx, c, request{path: sandboxPath(idOrName, "env")})
	return env.Env, err
}

// UpdateEnvironment sets variables for later commands, processes, terminals and sessions of a
// sandbox, removes those that are nil, and returns all of them. It never wakes the sandbox.
func (c *Client) UpdateEnvironment(ctx context.Context, idOrName string, changes map[string]*string) (map[string]string, error) {
	env, err := fetch[types.Environment](ctx, c, request{method: http.MethodPatch, path: sandboxPath(idOrName, "env"), body: types.UpdateEnvironmentRequest{Env: changes}})
	return env.Env, err
}
