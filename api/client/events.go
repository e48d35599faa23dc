package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
)

// eventPage is how many events are asked for at once, the most a node answers.
const eventPage = 1000

// Events returns all kept events of a sandbox with a higher seq, oldest first.
func (c *Client) Events(ctx context.Context, idOrName string, after uint64) ([]Event, error) {
	all := []Event{}
	for {
		var page struct {
			Events []Event `json:"events"`
			Next   uint64  `json:"next"`
		}
		query := url.Values{"after": {strconv.FormatUint(after, 10)}, "limit": {strconv.Itoa(eventPage)}}
		if _, err := c.call(ctx, request{method: http.MethodGet, path: sandboxPath(idOrName, "events"), query: query}, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Events...)
		if page.Next <= after {
			return all, nil
		}
		after = page.Next
	}
}

// Follow calls yield with all kept events with a higher seq and then with those
// that happen. It returns nil when the stream ends: the sandbox was destroyed or
// the node shuts down.
func (c *Client) Follow(ctx context.Context, idOrName string, after uint64, yield func(Event) error) error {
	stream, err := c.openStream(ctx, request{
		method: http.MethodGet, path: sandboxPath(idOrName, "events"),
		query: url.Values{"after": {strconv.FormatUint(after, 10)}},
	})
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.each(func(m message) error {
		var e Event
		if err := m.decode(&e); err != nil {
			return err
		}
		return yield(e)
	})
}

// Feed returns the kept events of all sandboxes after a cursor, all with an empty
// one. gap says that events between the cursor and the first one are not kept.
func (c *Client) Feed(ctx context.Context, after string) (all []FeedEvent, gap bool, err error) {
	all = []FeedEvent{}
	for {
		var page struct {
			Events []FeedEvent `json:"events"`
			Gap    bool        `json:"gap"`
			Next   string      `json:"next"`
		}
		query := url.Values{"limit": {strconv.Itoa(eventPage)}}
		if after != "" {
			query.Set("after", after)
		}
		if _, err := c.call(ctx, request{method: http.MethodGet, path: "/events", query: query}, &page); err != nil {
			return nil, false, err
		}
		all, gap = append(all, page.Events...), gap || page.Gap
		if page.Next == "" {
			return all, gap, nil
		}
		after = page.Next
	}
}

// FollowFeed calls yield with the kept events of all sandboxes after a cursor and
// then with those that happen. missed is called when some in between are not kept;
// it may be nil. FollowFeed returns nil when the node shuts down.
func (c *Client) FollowFeed(ctx context.Context, after string, yield func(FeedEvent) error, missed func() error) error {
	var query url.Values
	if after != "" {
		query = url.Values{"after": {after}}
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
		var e FeedEvent
		if err := m.decode(&e); err != nil {
			return err
		}
		return yield(e)
	})
}
