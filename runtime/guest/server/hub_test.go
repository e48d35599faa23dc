package server

import (
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

// received reads what is queued, and reports whether the stream ends after it.
func (s subscriber) received() (events int, ended bool) {
	for {
		select {
		case _, ok := <-s:
			if !ok {
				return events, true
			}
			events++
		default:
			return events, false
		}
	}
}

func TestSlowReaderOfEventsIsDroppedAndNoOther(t *testing.T) {
	h := newHub()
	slow, other := h.subscribe(nil), h.subscribe(nil)
	for n := range maxQueued {
		if readers := h.send(guest.Event{Type: guest.EventHold}); readers != 2 {
			t.Fatalf("event %d has %d readers", n, readers)
		}
	}
	if n, ended := other.received(); n != maxQueued || ended {
		t.Errorf("the reader got %d events, ended: %v", n, ended)
	}
	if readers := h.send(guest.Event{Type: guest.EventHold}); readers != 1 {
		t.Errorf("one event more has %d readers, want 1", readers)
	}
	if n, ended := slow.received(); n != maxQueued || !ended {
		t.Errorf("the slow reader got %d events, ended: %v", n, ended)
	}
	if n, ended := other.received(); n != 1 || ended {
		t.Errorf("the reader got %d events more, ended: %v", n, ended)
	}
	h.unsubscribe(slow) // its stream ends
	h.unsubscribe(other)
	if readers := h.send(guest.Event{Type: guest.EventHold}); readers != 0 {
		t.Errorf("without readers an event has %d", readers)
	}
}

func TestStreamsOfEventsEndWhenTheGuestEnds(t *testing.T) {
	h := newHub()
	before := h.subscribe(nil)
	h.send(guest.Event{Type: guest.EventHold})
	h.close()
	if n, ended := before.received(); n != 1 || !ended {
		t.Errorf("the reader got %d events, ended: %v", n, ended)
	}
	if n, ended := h.subscribe(nil).received(); n != 0 || !ended {
		t.Errorf("a reader who comes later got %d events, ended: %v", n, ended)
	}
	if readers := h.send(guest.Event{Type: guest.EventHold}); readers != 0 {
		t.Errorf("a later event has %d readers", readers)
	}
}
