package guest

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

// EventStream is the stream of the guest's events.
type EventStream struct {
	response *response
	lines    *bufio.Scanner
}

// Events opens the guest's event stream. It first has every process that the guest knows, so
// that a caller whose earlier stream was lost misses at most how often a process was
// restarted in between.
func (c *Client) Events(ctx context.Context) (*EventStream, error) {
	a, err := c.send(ctx, request{method: http.MethodGet, route: RouteEvents, dedicated: true})
	if err != nil {
		return nil, err
	}
	return &EventStream{response: a, lines: newLines(a)}, nil
}

// maxEventIDs bounds the ids of one EventTerminals or EventSessions: twice as many as a guest has.
const maxEventIDs = 288

// Next waits for the next event. The stream has no end of its own: when the
// guest goes away, or drops a reader that is too slow, Next returns ErrLost.
func (s *EventStream) Next() (Event, error) {
	if !s.lines.Scan() {
		return Event{}, cmp.Or(s.lines.Err(), ErrLost)
	}
	var ev Event
	if err := json.Unmarshal(s.lines.Bytes(), &ev); err != nil {
		return Event{}, fmt.Errorf("guest sent an unusable event: %w", err)
	}
	switch {
	case ev.Type == EventProcess && ev.Process != nil:
		return ev, ev.Process.check()
	case ev.Type == EventTerminal && ev.Terminal != nil:
		return ev, ev.Terminal.check()
	case ev.Type == EventSession && ev.Session != nil:
		return ev, ev.Session.validate()
	case ev.Type == EventTerminals && len(ev.Terminals) <= maxEventIDs:
		return ev, nil
	case ev.Type == EventSessions && len(ev.Sessions) <= maxEventIDs:
		return ev, nil
	case ev.Type == EventPorts:
		return ev, checkListening(ev.Ports)
	case ev.Type == EventHold && ev.Hold >= 0 && ev.Hold <= MaxHold:
		return ev, nil
	}
	return Event{}, fmt.Errorf("guest sent an unusable event of type %q", Shorten(string(ev.Type), 20))
}

// Close ends the stream. It may be called more than once and while Next waits.
func (s *EventStream) Close() error { return s.response.Close() }
