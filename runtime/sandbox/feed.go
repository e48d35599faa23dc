package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
)

// feedSize is how many events of all sandboxes the node keeps in memory for readers of the
// feed. In a burst in which each of 20,000 sandboxes wakes and sleeps, a reader misses some
// and gets ErrFeedGap.
const feedSize = 4096

// ErrFeedGap means that events between the cursor and the next event are no longer
// retained, or that the cursor is from an earlier run of the node. The reader continues with
// the oldest retained event; the missed ones are in the sandboxes' timelines.
var ErrFeedGap = errors.New("events before the oldest retained one were missed")

// FeedEvent is an event of any sandbox.
type FeedEvent struct {
	Event
	Name   string // of the sandbox at that time
	Owner  string
	Cursor string // for Feed, to continue after this event
}

// feed retains the newest events of all sandboxes in the order in which they happened.
type feed struct {
	run string // of this node process; cursors begin with it

	mu      sync.Mutex
	ring    []FeedEvent // event n is at n % feedSize
	next    uint64      // number of the next event
	changed chan struct{}
	closed  bool
}

func newFeed() *feed {
	return &feed{run: strings.ToLower(rand.Text()[:8]), changed: make(chan struct{})}
}

func (f *feed) cursor(n uint64) string { return f.run + "-" + strconv.FormatUint(n, 10) }

func (f *feed) add(ev FeedEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ev.Cursor = f.cursor(f.next)
	if len(f.ring) < feedSize {
		f.ring = append(f.ring, ev)
	} else {
		f.ring[f.next%feedSize] = ev
	}
	f.next++
	f.notifyLocked()
}

func (f *feed) notifyLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// close ends all readers.
func (f *feed) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.notifyLocked()
}

// FeedReader reads the events of one owner's sandboxes. It is not safe for
// concurrent use. It holds nothing of the node, so that it needs no closing.
type FeedReader struct {
	feed  *feed
	owner string
	next  uint64
	gap   bool
}

// Feed returns a reader of the events of all sandboxes of an owner, from the oldest retained
// one or, with a cursor, from the one after that. The newest 4,096 events of the node since
// it started are retained, in memory. Errors: *InvalidError when the cursor is malformed.
func (m *Manager) Feed(owner, cursor string) (*FeedReader, error) {
	r := &FeedReader{feed: m.feed, owner: owner}
	if cursor == "" {
		m.feed.mu.Lock()
		r.next = m.feed.next - uint64(len(m.feed.ring))
		m.feed.mu.Unlock()
		return r, nil
	}
	run, number, ok := strings.Cut(cursor, "-")
	n, err := strconv.ParseUint(number, 10, 63)
	if !ok || err != nil || run == "" {
		return nil, &InvalidError{Field: "cursor", Reason: fmt.Sprintf("%q is not a cursor of this feed", clip(cursor)), Want: "send the cursor of the last event, or leave it out"}
	}
	r.next = n + 1
	r.gap = run != m.feed.run
	return r, nil
}

// Next returns the next event and waits for it. Errors: ErrFeedGap once for each
// gap, ErrClosed when the node ends, or ctx.Err().
func (r *FeedReader) Next(ctx context.Context) (FeedEvent, error) {
	for {
		ev, changed, err := r.poll()
		if changed == nil {
			return ev, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return FeedEvent{}, ctx.Err()
		}
	}
}

// Poll is Next without waiting: ok is false when there is no further event yet.
func (r *FeedReader) Poll() (ev FeedEvent, ok bool, err error) {
	ev, changed, err := r.poll()
	return ev, changed == nil && err == nil, err
}

// poll returns the next event, or an error, or the channel that is closed when
// there may be one.
func (r *FeedReader) poll() (FeedEvent, <-chan struct{}, error) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	oldest := f.next - uint64(len(f.ring))
	if r.gap || r.next < oldest || r.next > f.next {
		r.gap, r.next = false, oldest
		return FeedEvent{}, nil, ErrFeedGap
	}
	for ; r.next < f.next; r.next++ {
		if ev := f.ring[r.next%feedSize]; ev.Owner == r.owner {
			r.next++
			return ev, nil, nil
		}
	}
	if f.closed {
		return FeedEvent{}, nil, ErrClosed
	}
	return FeedEvent{}, f.changed, nil
}
