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

// Create returns the sandbox when it runs, and whether it was made by this call.
// The creation goes on when ctx ends; the same call joins it.
func (c *Client) Create(ctx context.Context, req types.CreateSandboxRequest) (sb types.Sandbox, created bool, err error) {
	status, err := c.call(ctx, request{method: http.MethodPost, path: "/sandbox", body: req}, &sb)
	return sb, status == http.StatusCreated, err
}

// Filter of a list. What is empty does not filter.
type Filter struct {
	State  types.State
	Labels []string // "key=value"
	Usage  bool     // with what each uses of the machine
}

// listPage is how many sandboxes are asked for at once, the most a node answers.
const listPage = 1000

// List returns all sandboxes that the filter lets through, without env and
// processes.
func (c *Client) List(ctx context.Context, filter Filter) ([]types.Sandbox, error) {
	all := []types.Sandbox{}
	query := url.Values{"limit": {strconv.Itoa(listPage)}}
	if filter.State != "" {
		query.Set("state", string(filter.State))
	}
	if filter.Usage {
		query.Set("usage", "true")
	}
	if len(filter.Labels) > 0 {
		query["label"] = slices.Clone(filter.Labels)
	}
	for {
		var page types.SandboxList
		if _, err := c.call(ctx, request{method: http.MethodGet, path: "/sandbox", query: query}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Sandboxes...)
		if page.NextCursor == "" || len(page.Sandboxes) == 0 {
			return all, nil
		}
		query.Set("cursor", page.NextCursor)
	}
}

// Get returns one sandbox and wakes nothing.
func (c *Client) Get(ctx context.Context, idOrName string) (sb types.Sandbox, err error) {
	_, err = c.call(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName)}, &sb)
	return sb, err
}

// Update changes a sandbox and wakes nothing.
func (c *Client) Update(ctx context.Context, idOrName string, req types.UpdateSandboxRequest) (sb types.Sandbox, err error) {
	_, err = c.call(ctx, request{method: http.MethodPatch, path: sandboxPath(idOrName), body: req}, &sb)
	return sb, err
}

// Delete destroys a sandbox with its files.
func (c *Client) Delete(ctx context.Context, idOrName string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: sandboxPath(idOrName)}, nil)
	return err
}

// Sleep returns the sandbox when it sleeps.
func (c *Client) Sleep(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "sleep", nil, nil)
}

// ForceSleep is Sleep although requests, commands or transfers are under way: they
// pause until the next wake.
func (c *Client) ForceSleep(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "sleep", url.Values{"force": {"true"}}, nil)
}

// Wake returns the sandbox when it runs.
func (c *Client) Wake(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "wake", nil, nil)
}

// Stop returns the sandbox when its processes have ended.
func (c *Client) Stop(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "stop", nil, nil)
}

// ForceStop is Stop although requests, commands or transfers are under way, which
// end with the sandbox's processes.
func (c *Client) ForceStop(ctx context.Context, idOrName string) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "stop", url.Values{"force": {"true"}}, nil)
}

// Hold keeps the sandbox from sleeping by itself for that long; 0 ends a hold.
func (c *Client) Hold(ctx context.Context, idOrName string, d time.Duration) (types.Sandbox, error) {
	return c.move(ctx, idOrName, "hold", nil, types.HoldRequest{Duration: types.Duration(d)})
}

func (c *Client) move(ctx context.Context, idOrName, what string, query url.Values, body any) (sb types.Sandbox, err error) {
	_, err = c.call(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, what), query: query, body: body}, &sb)
	return sb, err
}

// Node returns what the node says of itself.
func (c *Client) Node(ctx context.Context) (node types.Node, err error) {
	_, err = c.call(ctx, request{method: http.MethodGet, path: "/node"}, &node)
	return node, err
}

// Adopt makes a container in quarantine a sandbox again. An empty name is the one
// that it had last.
func (c *Client) Adopt(ctx context.Context, id, name string) (sb types.Sandbox, err error) {
	body := types.AdoptRequest{Name: name}
	_, err = c.call(ctx, request{method: http.MethodPost, path: "/node/quarantine/" + url.PathEscape(id) + "/adopt", body: body}, &sb)
	return sb, err
}

// DeleteQuarantined removes a container in quarantine with its files.
func (c *Client) DeleteQuarantined(ctx context.Context, id string) error {
	_, err := c.call(ctx, request{method: http.MethodDelete, path: "/node/quarantine/" + url.PathEscape(id)}, nil)
	return err
}
