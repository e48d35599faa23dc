package server

import (
	"bytes"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// maxWatchLog bounds the events of a watch in memory: 40,000 with short paths. A burst
	// of 10,000 new files, each also a modification, fits although no client reads it.
	maxWatchLog = 4 << 20
	// retainedWatchLog is how much of the events that were sent stays for clients that resume:
	// more than what sockets between the guest and a client hold.
	retainedWatchLog = 1 << 20
	// watchEventCost is the memory of an event beyond its paths.
	watchEventCost = 128
)

// watchLog keeps the last events of a watch, whose Seq is their number. The zero value is
// ready. It is not safe for concurrent use.
type watchLog struct {
	events []guest.WatchEvent
	unused int    // how many elements of the array of events were dropped
	last   uint64 // Seq of the newest event
	bytes  int    // of the events
	sent   uint64 // Seq of the newest event that was read
}

// first returns the Seq of the oldest event.
func (l *watchLog) first() uint64 { return l.last + 1 - uint64(len(l.events)) }

func costOf(ev *guest.WatchEvent) int { return watchEventCost + len(ev.Path) + len(ev.From) }

// add appends an event, whose Seq it sets. A repeated modification that no client knows yet
// is one event. It drops the oldest event when the log is full.
func (l *watchLog) add(ev guest.WatchEvent) {
	if n := len(l.events); n > 0 && l.sent < l.last && (ev.Type == guest.WatchModify || ev.Type == guest.WatchAttrib) {
		if newest := &l.events[n-1]; newest.Type == ev.Type && bytes.Equal(newest.Path, ev.Path) {
			return
		}
	}
	l.last++
	ev.Seq = l.last
	l.events = append(l.events, ev)
	l.bytes += costOf(&ev)
	for l.bytes > maxWatchLog {
		l.drop()
	}
}

func (l *watchLog) drop() {
	l.bytes -= costOf(&l.events[0])
	l.events[0] = guest.WatchEvent{}
	l.events = l.events[1:]
	if l.unused++; l.unused > len(l.events)/4 {
		l.compact()
	}
}

// compact copies the events to an array of exactly their size, and their paths to another. After
// a burst, the old array is too large, and each remaining path keeps a page of garbage in memory.
func (l *watchLog) compact() {
	size := 0
	for _, ev := range l.events {
		size += len(ev.Path) + len(ev.From)
	}
	paths := make([]byte, 0, size)
	move := func(path []byte) []byte {
		paths = append(paths, path...)
		return paths[len(paths)-len(path):]
	}
	l.events, l.unused = append(make([]guest.WatchEvent, 0, len(l.events)), l.events...), 0
	for i := range l.events {
		ev := &l.events[i]
		ev.Path, ev.From = move(ev.Path), move(ev.From)
	}
}

// release drops events up to a Seq, as long as more than retainedWatchLog is stored.
func (l *watchLog) release(upTo uint64) {
	for l.bytes > retainedWatchLog && l.first() <= upTo {
		l.drop()
	}
}

// maxBatch bounds the paths of the events that are read together, so that they fit into a
// line of guest.MaxFrame bytes, where paths are in base64.
const maxBatch = guest.MaxFrame / 2

// read appends the events after a Seq to batch, as many as fit into one line and at least one
// if there is any. If events were dropped, the first is an overflow with their number.
func (l *watchLog) read(after uint64, batch []guest.WatchEvent) []guest.WatchEvent {
	if first := l.first(); after+1 < first {
		batch = append(batch, guest.WatchEvent{Seq: first - 1, Type: guest.WatchOverflow, Reason: guest.WatchSlowClient, Dropped: first - 1 - after})
		after = first - 1
	}
	size := 0
	for _, ev := range l.events[after+1-l.first():] {
		if size += costOf(&ev); size > maxBatch && len(batch) > 0 {
			break
		}
		batch = append(batch, ev)
	}
	if n := len(batch); n > 0 {
		l.sent = max(l.sent, batch[n-1].Seq)
	}
	return batch
}
