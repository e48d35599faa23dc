package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// eventPage is how many events one read of the store returns.
const eventPage = 500

// pageOfEvents describes the response of routes for events.
const pageOfEvents = "A page of events, or with Accept: text/event-stream all of them and then new ones"

type eventsInput struct {
	SandboxPath
	Exchange
	PageQuery
}

func (a *API) registerEvents() {
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/events", id: "list-events", tag: "events",
		summary: "List the events of a sandbox, oldest first",
		description: "Never wakes the sandbox. A stream sends the stored events first, and then new ones, each once; " +
			"resume it with Last-Event-ID. The stream ends when the sandbox is destroyed.",
		codes:     []problem.Code{problem.StreamLimitExceeded},
		responses: map[int]*huma.Response{http.StatusOK: responseJSON[types.EventList](a, pageOfEvents)},
		events:    eventsOf[types.EventType](types.Event{}),
	}, withSandbox(a, a.events))
}

func (a *API) events(ctx context.Context, in *eventsInput, sb sandbox.Sandbox) (*huma.StreamResponse, error) {
	after, err := in.after()
	if err != nil {
		return nil, err
	}
	if wantsEvents(in.r) {
		if after, err = a.lastKnown(ctx, sb.ID, after); err != nil {
			return nil, err
		}
		return a.respondEvents(ctx, in.Exchange, func(s *eventStream) {
			t := timeline{sandboxes: a.cfg.Sandboxes, id: sb.ID, last: after, send: func(ev sandbox.Event) error {
				return s.send(string(ev.Type), formatID(ev.Seq), eventOf(ev))
			}}
			if err := t.follow(s.ctx); err != nil {
				s.fail(err)
			}
		})
	}
	// One more than requested shows whether there is a next page.
	events, err := a.cfg.Sandboxes.Events(ctx, sb.ID, after, in.Limit+1)
	if err != nil {
		return nil, err
	}
	events, next := page(in.PageQuery, events, func(e sandbox.Event) uint64 { return e.Seq })
	return jsonResponse(in.Exchange, types.EventList{Events: listOf(events, eventOf), NextCursor: next}), nil
}

// lastKnown returns the seq after which a stream resumes: the client's, or the last
// event's if the node was killed before it had stored the client's. Otherwise new events
// would be skipped until they have passed the client's.
func (a *API) lastKnown(ctx context.Context, id sandbox.ID, after uint64) (uint64, error) {
	if after == 0 {
		return 0, nil
	}
	if events, err := a.cfg.Sandboxes.Events(ctx, id, after-1, 1); err != nil || len(events) > 0 {
		return after, err
	}
	var last uint64
	for {
		events, err := a.cfg.Sandboxes.Events(ctx, id, last, eventPage)
		if err != nil || len(events) == 0 {
			return last, err
		}
		last = events[len(events)-1].Seq
	}
}

// timeline sends the events of a sandbox, each once and in order: the stored ones first,
// and then new ones.
type timeline struct {
	sandboxes eventSource
	id        sandbox.ID
	last      uint64 // Seq of the last event sent
	send      func(sandbox.Event) error
}

// eventSource is a sandbox.Manager, or events in an order that a test chooses.
type eventSource interface {
	ByID(sandbox.ID) (sandbox.Sandbox, bool)
	Events(ctx context.Context, id sandbox.ID, after uint64, limit int) ([]sandbox.Event, error)
	Subscribe(sandbox.ID) (<-chan sandbox.Event, func(), error)
}

// follow returns nil when the sandbox is destroyed or the node shuts down.
func (t *timeline) follow(ctx context.Context) error {
	for {
		// Subscribing before reading leaves no gap; Seq shows duplicates.
		events, cancel, err := t.sandboxes.Subscribe(t.id)
		if err != nil {
			return nil
		}
		before := t.last
		err = t.replay(ctx)
		if err == nil {
			err = t.listen(ctx, events)
		}
		cancel()
		if err != nil {
			return err
		}
		// The channel was closed. If it carried events, this reader may have been too
		// slow: the next iteration reads the events that it missed.
		if t.last == before {
			return nil
		}
	}
}

// replay sends the stored events after last.
func (t *timeline) replay(ctx context.Context) error {
	for {
		events, err := t.sandboxes.Events(ctx, t.id, t.last, eventPage)
		if err != nil {
			if _, ok := t.sandboxes.ByID(t.id); !ok {
				return nil // destroyed meanwhile; its last events are in the channel
			}
			return err
		}
		for _, ev := range events {
			if err := t.pass(ev); err != nil {
				return err
			}
		}
		if len(events) < eventPage {
			return nil
		}
	}
}

// listen sends new events until the channel is closed.
func (t *timeline) listen(ctx context.Context, events <-chan sandbox.Event) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case ev, ok := <-events:
			if !ok {
				return nil
			}
			if err := t.pass(ev); err != nil {
				return err
			}
		}
	}
}

// pass sends an event unless it was sent already.
func (t *timeline) pass(ev sandbox.Event) error {
	if ev.Seq <= t.last {
		return nil
	}
	if err := t.send(ev); err != nil {
		return err
	}
	t.last = ev.Seq
	return nil
}
