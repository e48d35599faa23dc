package client

import (
	"context"
	"net/url"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// cursorAt is the cursor after the entry with that seq; 0 is the start of the list.
func cursorAt(seq uint64) url.Values { return url.Values{"cursor": {strconv.FormatUint(seq, 10)}} }

// Events returns all stored events of a sandbox with a higher seq, oldest first.
func (c *Client) Events(ctx context.Context, idOrName string, after uint64) ([]types.Event, error) {
	return fetchAll(ctx, c, request{path: sandboxPath(idOrName, "events"), query: cursorAt(after)},
		func(page types.EventList) ([]types.Event, string) { return page.Events, page.NextCursor })
}

// Follow yields all stored events with a higher seq and then new ones. It returns nil when
// the stream ends: the sandbox was destroyed or the node shuts down.
func (c *Client) Follow(ctx context.Context, idOrName string, after uint64, yield func(types.Event) error) error {
	return follow(ctx, c, request{path: sandboxPath(idOrName, "events"), query: cursorAt(after)}, yield)
}

// Feed returns the stored events of all sandboxes after a cursor; an empty cursor is the
// start. gap reports that events after the cursor are no longer stored.
func (c *Client) Feed(ctx context.Context, cursor string) (all []types.FeedEvent, gap bool, err error) {
	query := url.Values{}
	if cursor != "" {
		query.Set("cursor", cursor)
	}
	all, err = fetchAll(ctx, c, request{path: "/events", query: query}, func(page types.FeedPage) ([]types.FeedEvent, string) {
		gap = gap || page.Gap
		return page.Events, page.NextCursor
	})
	return all, gap, err
}

// FollowFeed yields the stored events of all sandboxes after a cursor and then new ones.
// missed, unless nil, is called when events in between are no longer stored. FollowFeed
// returns nil when the node shuts down.
func (c *Client) FollowFeed(ctx context.Context, cursor string, yield func(types.FeedEvent) error, missed func() error) error {
	var query url.Values
	if cursor != "" {
		query = url.Values{"cursor": {cursor}}
	}
	return c.stream(ctx, request{path: "/events", query: query}, func(m message) error {
		switch {
		case m.event != "gap":
			return yieldData(m, yield)
		case missed != nil:
			return missed()
		}
		return nil
	})
}
