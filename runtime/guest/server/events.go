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
	subs map[*subscriber]bool // nil after close
}

// subscriber is one reader. Its queue is closed when it was dropped.
type subscriber struct {
	first []guest.Event
	queue chan guest.Event
}

func newHub() *hub { return &hub{subs: map[*subscriber]bool{}} }

func (h *hub) subscribe(first []guest.Event) *subscriber {
	sub := &subscriber{first: first, queue: make(chan guest.Event, maxQueued)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs == nil {
		close(sub.queue)
	} else {
		h.subs[sub] = true
	}
	return sub
}

func (h *hub) unsubscribe(sub *subscriber) {
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
		case sub.queue <- ev:
		default:
			delete(h.subs, sub)
			close(sub.queue)
		}
	}
	return len(h.subs)
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for sub := range h.subs {
		close(sub.queue)
	}
	h.subs = nil
}

func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request) error {
	sub := s.procs.subscribe()
	defer s.events.unsubscribe(sub)
	rc := http.NewResponseController(w)
	lines := json.NewEncoder(w)
	w.Header().Set("Content-Type", "application/x-ndjson")
	for _, ev := range sub.first {
		if lines.Encode(ev) != nil {
			return nil
		}
	}
	sub.first = nil
	for rc.Flush() == nil {
		select {
		case ev, ok := <-sub.queue:
			if !ok || lines.Encode(ev) != nil {
				return nil
			}
		case <-r.Context().Done():
			return nil
		}
	}
	return nil
}
