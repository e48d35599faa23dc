package client

import (
	"context"
	"errors"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// WatchOptions select what a watch reports.
type WatchOptions struct {
	NotRecursive bool
	// Include are patterns of the files to report; none: all.
	Include []string
	// Exclude are patterns of what is not watched. nil: the node's default, which is .git and
	// node_modules; empty: nothing.
	Exclude []string
	// After is the cursor of the last message of an earlier stream, to continue after it.
	After string
}

// Change is one message of a watch. Exactly one field is set.
type Change struct {
	Watching *types.WatchStarted  `json:"watching,omitempty"`
	Event    *types.FileEvent     `json:"event,omitempty"`
	Overflow *types.WatchOverflow `json:"overflow,omitempty"`
	Stopped  *types.WatchStopped  `json:"stopped,omitempty"`
}

// Cursor is the position after the message, for WatchOptions.After. Stopped has none.
func (c Change) Cursor() string {
	switch {
	case c.Watching != nil:
		return c.Watching.Cursor
	case c.Event != nil:
		return c.Event.Cursor
	case c.Overflow != nil:
		return c.Overflow.Cursor
	}
	return ""
}

// Watch wakes the sandbox and yields the changes of a directory or file, Watching first. It
// returns nil after Stopped, or the error with which yield ends it. When the connection or
// the node is lost it returns another error; then call it again with the last cursor.
func (c *Client) Watch(ctx context.Context, idOrName, path string, o WatchOptions, yield func(Change) error) error {
	query := pathQuery(path)
	query["include"] = o.Include
	if o.NotRecursive {
		query.Set("recursive", strconv.FormatBool(false))
	}
	if query["exclude"] = o.Exclude; o.Exclude != nil && len(o.Exclude) == 0 {
		query["exclude"] = []string{""}
	}
	r := request{path: sandboxPath(idOrName, "files", "watch"), query: query}
	if o.After != "" {
		r.header = http.Header{"Last-Event-Id": {o.After}}
	}
	stopped := false
	err := c.stream(ctx, r, func(m message) (err error) {
		var change Change
		switch m.event {
		case "watching":
			change.Watching, err = decodeNew[types.WatchStarted](m)
		case "event":
			change.Event, err = decodeNew[types.FileEvent](m)
		case "overflow":
			change.Overflow, err = decodeNew[types.WatchOverflow](m)
		case "stopped":
			change.Stopped, err = decodeNew[types.WatchStopped](m)
			stopped = true
		default:
			return nil
		}
		if err != nil {
			return err
		}
		return yield(change)
	})
	if err == nil && !stopped {
		err = errors.New("the stream ended before the watch did")
	}
	return err
}

func decodeNew[T any](m message) (*T, error) {
	data, err := decode[T](m)
	return &data, err
}
