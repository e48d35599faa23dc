package sandbox

import (
	"context"
	"time"
)

// listenerBuffer is how many events a reader may be behind. The channel of a reader that is
// further behind is closed; it reads the timeline again.
const listenerBuffer = 256

// maxErrorText bounds the error of an event and a condition, which may quote a guest.
const maxErrorText = 1000

// emit adds an event to the timeline and sends it to the subscribers.
func (b *liveSandbox) emit(ev Event) {
	ev.Error = cutText(ev.Error, maxErrorText)
	b.eventMu.Lock()
	defer b.eventMu.Unlock()
	if !b.seqLoaded { // the first since the node started
		seq, err := b.m.deps.Store.LastSeq(context.Background(), b.id)
		if err != nil {
			// With a Seq that is in use it would replace another event.
			b.m.log.Error("failed to read a timeline, dropping an event", "sandbox", b.id, "type", ev.Type, "error", err)
			return
		}
		b.seq, b.seqLoaded = seq, true
	}
	b.seq++
	ev.Seq, ev.Time, ev.Sandbox = b.seq, time.Now().UTC(), b.id
	b.m.journal.append(ev)
	sb := b.view.Load()
	b.m.feed.add(FeedEvent{Event: ev, Name: sb.Name, Owner: sb.Owner})
	if line, ok := b.lifeLine(ev); ok {
		b.m.journal.log(line)
	}
	for events := range b.listeners {
		select {
		case events <- ev:
		default:
			delete(b.listeners, events)
			close(events)
		}
	}
}

// dropListeners ends all subscriptions.
func (b *liveSandbox) dropListeners() {
	b.eventMu.Lock()
	defer b.eventMu.Unlock()
	for events := range b.listeners {
		close(events)
	}
	clear(b.listeners)
}

// Subscribe returns a channel of the events from now on and a function that
// ends the subscription. The channel is closed when the reader is 256 events
// behind, when the sandbox is destroyed and when the Manager closes.
func (m *Manager) Subscribe(id ID) (<-chan Event, func(), error) {
	b, err := m.live(id)
	if err != nil {
		return nil, nil, err
	}
	events := make(chan Event, listenerBuffer)
	b.eventMu.Lock()
	if b.isGone() {
		close(events)
	} else {
		b.listeners[events] = struct{}{}
	}
	b.eventMu.Unlock()
	return events, func() {
		b.eventMu.Lock()
		defer b.eventMu.Unlock()
		if _, ok := b.listeners[events]; ok {
			delete(b.listeners, events)
			close(events)
		}
	}, nil
}

// Events returns up to limit events with Seq > after, oldest first.
func (m *Manager) Events(ctx context.Context, id ID, after uint64, limit int) ([]Event, error) {
	if _, err := m.live(id); err != nil {
		return nil, err
	}
	m.journal.flush(ctx)
	return m.deps.Store.Events(ctx, id, after, limit)
}
