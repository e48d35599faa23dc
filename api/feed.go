package api

import (
	"context"
	"errors"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type feedInput struct {
	Exchange
	After       string `query:"after" maxLength:"64" doc:"Only events after the one with this cursor; all kept ones when missing"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"At most this many; a stream has no limit"`
	LastEventID string `header:"Last-Event-ID" maxLength:"64" doc:"Of a stream: go on after this event; wins over after"`
}

// FeedEvent is an event of any of the owner's sandboxes.
type FeedEvent struct {
	sandbox.Event
	SandboxName string `json:"sandbox_name" doc:"The sandbox's name when it happened"`
	Cursor      string `json:"cursor" doc:"Send it as after, or as Last-Event-ID, to go on after this event"`
}

// FeedPage is a part of the feed.
type FeedPage struct {
	Events []FeedEvent `json:"events" nullable:"false"`
	Gap    bool        `json:"gap,omitempty" doc:"Events between after and the first one here are no longer kept; the sandboxes' own timelines have them"`
	Next   string      `json:"next,omitempty" doc:"What to send as after for the next page; missing on the last"`
}

// FeedGap is sent when a stream has missed events.
type FeedGap struct {
	Detail string `json:"detail"`
}

func (a *API) registerFeed() {
	page := answerJSON[FeedPage](a, "A page of events, or with Accept: text/event-stream all of them and those to come")
	kinds := map[string]reflect.Type{"gap": reflect.TypeFor[FeedGap](), "error": reflect.TypeFor[problem.Problem]()}
	for _, kind := range eventTypes {
		kinds[string(kind)] = reflect.TypeFor[FeedEvent]()
	}
	page.Content[eventStreamType] = eventSchema(a, kinds)
	register(a, route{
		method: http.MethodGet, path: "/events", id: "list-all-events", tag: "events",
		summary: "The events of all sandboxes, oldest first",
		description: "The newest 4,096 of the node, kept in memory since it started. Wakes nothing. As a stream it first sends those after the cursor, " +
			"then each event as it happens; an event `gap` says that some were missed. Each sandbox's own timeline keeps more.",
		codes:   []problem.Code{problem.StreamLimitExceeded},
		answers: map[int]*huma.Response{http.StatusOK: page},
	}, a.feed)
}

func (a *API) feed(ctx context.Context, in *feedInput) (*huma.StreamResponse, error) {
	after, location := in.After, "query.after"
	if in.LastEventID != "" {
		after, location = in.LastEventID, "header.Last-Event-ID"
	}
	reader, err := a.sandboxes.Feed(ownerOf(ctx), after)
	if bad := (*sandbox.InvalidError)(nil); errors.As(err, &bad) {
		return nil, invalid(location, bad.Reason, bad.Want)
	}
	if err != nil {
		return nil, err
	}
	if wantsEvents(in.r) {
		if err := a.streams.enter(ctx, 1); err != nil {
			return nil, err
		}
		return &huma.StreamResponse{Body: func(huma.Context) { a.streamFeed(in, reader) }}, nil
	}
	page := FeedPage{Events: []FeedEvent{}}
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
			page.Next = page.Events[in.Limit-1].Cursor
			return jsonResponse(in.Exchange, page), nil
		}
		page.Events = append(page.Events, feedEvent(ev))
	}
}

func jsonResponse(x Exchange, body any) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(huma.Context) { writeJSON(x.w, http.StatusOK, body) }}
}

func feedEvent(ev sandbox.FeedEvent) FeedEvent {
	return FeedEvent{Event: ev.Event, SandboxName: ev.Name, Cursor: ev.Cursor}
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
			err = s.send("gap", "", FeedGap{Detail: "events were missed; the sandboxes' own timelines have them"})
		case err != nil:
			s.fail(err)
		default:
			err = s.send(string(ev.Type), ev.Cursor, feedEvent(ev))
		}
		if err != nil {
			return
		}
	}
}
