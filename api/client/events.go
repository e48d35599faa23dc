package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/doze-run/doze/api/types"
)

// eventPage is how many events are asked for at once, the most a node answers.
const eventPage = 1000

// cursorAt is the cursor after the entry with that seq; 0 is the start of the list.
func cursorAt(seq uint64) string { return strconv.FormatUint(seq, 10) }

// Events returns all kept events of a sandbox with a higher seq, oldest first.
func (c *Client) Events(ctx context.Context, idOrName string, after uint64) ([]types.Event, error) {
	all, cursor := []types.Event{}, cursorAt(after)
	for {
		var page types.EventList
		query := url.Values{"cursor": {cursor}, "limit": {strconv.Itoa(eventPage)}}
		if _, err := c.call(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName, "events"), query: query}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Events...)
		if page.NextCursor == "" || page.NextCursor == cursor {
			return all, nil
		}
		cursor = page.NextCursor
	}
}

// Follow calls yield with all kept events with a higher seq and then with those
// that happen. It returns nil when the stream ends: the sandbox was destroyed or
// the node shuts down.
func (c *Client) Follow(ctx context.Context, idOrName string, after uint64, yield func(types.Event) error) error {
	stream, err := c.openStream(ctx, request{
		method: http.MethodGet, path: sandboxPath(idOrName, "events"),
		query: url.Values{"cursor": {cursorAt(after)}},
	})
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		var e types.Event
		if err := m.decode(&e); err != nil {
			return err
		}
		return yield(e)
	})
}

// Feed returns the kept events of all sandboxes after a cursor, all with an empty
// one. gap says that events between the cursor and the first one are not kept.
func (c *Client) Feed(ctx context.Context, cursor string) (all []types.FeedEvent, gap bool, err error) {
	all = []types.FeedEvent{}
	for {
		var page types.FeedPage
		query := url.Values{"limit": {strconv.Itoa(eventPage)}}
		if cursor != "" {
			query.Set("cursor", cursor)
		}
		if _, err := c.call(ctx, request{method: http.MethodGet, path: "/events", query: query}, &page); err != nil {
			return nil, false, err
		}
		all, gap = append(all, page.Events...), gap || page.Gap
		if page.NextCursor == "" || page.NextCursor == cursor {
			return all, gap, nil
		}
		cursor = page.NextCursor
	}
}

// FollowFeed calls yield with the kept events of all sandboxes after a cursor and
// then with those that happen. missed is called when some in between are not kept;
// it may be nil. FollowFeed returns nil when the node shuts down.
func (c *Client) FollowFeed(ctx context.Context, cursor string, yield func(types.FeedEvent) error, missed func() error) error {
	var query url.Values
	if cursor != "" {
		query = url.Values{"cursor": {cursor}}
	}
	stream, err := c.openStream(ctx, request{method: http.MethodGet, path: "/events", query: query})
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		if m.event == "gap" {
			if missed == nil {
				return nil
			}
			return missed()
		}
		var e types.FeedEvent
		if err := m.decode(&e); err != nil {
			return err
		}
		return yield(e)
	})
}
