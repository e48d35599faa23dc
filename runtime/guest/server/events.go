package server

import (
	"encoding/json"
	"net/http"
	"sync"

	"github.com/doze-run/doze/runtime/guest"
)

// maxQueued events wait for a reader. One that lets more come together is
// dropped; when it comes back it gets every process again.
const maxQueued = 1024

// hub hands events to the readers of event streams.
type hub struct {
	mu   sync.Mutex
	subs map[subscriber]bool // nil after close
	// followed: a reader has subscribed before, and may have been dropped.
	followed bool
}

// subscriber is the queue of one reader. It is closed when the reader was dropped.
type subscriber chan guest.Event

func newHub() *hub { return &hub{subs: map[subscriber]bool{}} }

// subscribe adds a reader, which first gets the events first, and again if it is not the
// first reader.
func (h *hub) subscribe(first []guest.Event, again ...guest.Event) subscriber {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.followed {
		first = append(first, again...)
	}
	h.followed = true
	sub := make(subscriber, maxQueued+len(first))
	for _, ev := range first {
		sub <- ev
	}
	if h.subs == nil {
		close(sub)
	} else {
		h.subs[sub] = true
	}
	return sub
}

func (h *hub) unsubscribe(sub subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, sub)
}

// send queues an event for every reader and returns how many there are.
func (h *hub) send(ev guest.Event) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	for sub := range h.subs {
		select {
		case sub <- ev:
		default:
			delete(h.subs, sub)
			close(sub)
		}
	}
	return len(h.subs)
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for sub := range h.subs {
		close(sub)
	}
	h.subs = nil
}

func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request) error {
	sub := s.procs.subscribe()
	defer s.events.unsubscribe(sub)
	rc := http.NewResponseController(w)
	lines := json.NewEncoder(w)
	w.Header().Set("Content-Type", "application/x-ndjson")
	for {
		if len(sub) == 0 && rc.Flush() != nil { // once for the events that wait together
			return nil
		}
		select {
		case ev, ok := <-sub:
			if !ok || lines.Encode(ev) != nil {
				return nil
			}
		case <-r.Context().Done():
			return nil
		}
	}
}
