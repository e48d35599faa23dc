package api

import (
	"context"
	"errors"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type feedInput struct {
	Exchange
	Cursor      string `query:"cursor" maxLength:"64" doc:"Only events after this one: next_cursor of the previous page, or the cursor of an event. Default: all retained events"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of events; a stream has no limit"`
	LastEventID string `header:"Last-Event-ID" maxLength:"64" doc:"Of a stream: id of the event after which it resumes; takes precedence over cursor"`
}

func (a *API) registerFeed() {
	kinds := eventsOf[types.EventType](types.FeedEvent{})
	kinds["gap"] = types.FeedGap{}
	register(a, route{
		method: http.MethodGet, path: "/events", id: "list-all-events", tag: "events",
		summary: "List the events of all sandboxes, oldest first",
		description: "The latest 4,096 events since the node started, from memory. Never wakes a sandbox. A stream sends the events after the cursor first, " +
			"and then new ones; an event `gap` reports that some were missed. The timeline of each sandbox has more.",
		codes:     []problem.Code{problem.StreamLimitExceeded},
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.FeedPage](a, pageOfEvents)},
		events:    kinds,
	}, a.feed)
}

func (a *API) feed(ctx context.Context, in *feedInput) (*huma.StreamResponse, error) {
	cursor, location := in.Cursor, "query.cursor"
	if in.LastEventID != "" {
		cursor, location = in.LastEventID, "header.Last-Event-ID"
	}
	reader, err := a.cfg.Sandboxes.Feed(ownerOf(ctx), cursor)
	if bad, ok := errors.AsType[*sandbox.InvalidError](err); ok {
		return nil, invalid(location, bad.Reason, bad.Want)
	}
	if err != nil {
		return nil, err
	}
	if wantsEvents(in.r) {
		return a.respondEvents(ctx, in.Exchange, func(s *eventStream) { sendFeed(s, reader) })
	}
	page := types.FeedPage{Events: []types.FeedEvent{}}
	for {
		ev, ok, err := reader.Poll()
		switch {
		case errors.Is(err, sandbox.ErrFeedGap):
			page.Gap = true
			continue
		case err != nil:
			return nil, err
		case !ok:
			return jsonResponse(in.Exchange, page), nil
		case len(page.Events) == in.Limit:
			page.NextCursor = page.Events[in.Limit-1].Cursor
			return jsonResponse(in.Exchange, page), nil
		}
		page.Events = append(page.Events, feedEventOf(ev))
	}
}

func sendFeed(s *eventStream, reader *sandbox.FeedReader) {
	for {
		ev, err := reader.Next(s.ctx)
		switch {
		case errors.Is(err, sandbox.ErrFeedGap):
			err = s.send("gap", "", types.FeedGap{Detail: "events were missed; the timelines of the sandboxes have them"})
		case err != nil:
			s.fail(err)
		default:
			err = s.send(string(ev.Type), ev.Cursor, feedEventOf(ev))
		}
		if err != nil {
			return
		}
	}
}
