package api

import (
	"context"
	"errors"
	"net/http"
	"reflect"

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
	page := responseJSON[types.FeedPage](a, "A page of events, or with Accept: text/event-stream all of them and then new ones")
	kinds := map[string]reflect.Type{"gap": reflect.TypeFor[types.FeedGap](), "error": reflect.TypeFor[problem.Problem]()}
	for _, kind := range types.EventType("").Values() {
		kinds[string(kind)] = reflect.TypeFor[types.FeedEvent]()
	}
	page.Content[eventStreamType] = eventSchema(a, kinds)
	register(a, route{
		method: http.MethodGet, path: "/events", id: "list-all-events", tag: "events",
		summary: "List the events of all sandboxes, oldest first",
		description: "The latest 4,096 events since the node started, from memory. Never wakes a sandbox. A stream sends the events after the cursor first, " +
			"and then new ones; an event `gap` reports that some were missed. The timeline of each sandbox has more.",
		codes:     []problem.Code{problem.StreamLimitExceeded},
		responses: map[int]*huma.Response{http.StatusOK: page},
	}, a.feed)
}

func (a *API) feed(ctx context.Context, in *feedInput) (*huma.StreamResponse, error) {
	cursor, location := in.Cursor, "query.cursor"
	if in.LastEventID != "" {
		cursor, location = in.LastEventID, "header.Last-Event-ID"
	}
	reader, err := a.sandboxes.Feed(ownerOf(ctx), cursor)
	if bad := (*sandbox.InvalidError)(nil); errors.As(err, &bad) {
		return nil, invalid(location, bad.Reason, bad.Want)
	}
	if err != nil {
		return nil, err
	}
	if wantsEvents(in.r) {
		if err := a.streams.acquire(ctx, 1); err != nil {
			return nil, err
		}
		return &huma.StreamResponse{Body: func(huma.Context) { a.streamFeed(in, reader) }}, nil
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

func jsonResponse(x Exchange, body any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(huma.Context) { writeJSON(x.w, http.StatusOK, body) }}
}

func (a *API) streamFeed(in *feedInput, reader *sandbox.FeedReader) {
	s := a.openStream(in.Exchange, SandboxPath{})
	defer s.close()
	if in.r.Method == http.MethodHead {
		return
	}
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
