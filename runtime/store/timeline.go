package store

import (
	"context"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
)

// maxEvent bounds one event, in bytes. The largest are about processes with a very long
// command line.
const maxEvent = 64 << 10

// maxAppend bounds the events of one write, which is one transaction.
const maxAppend = 256

type encodedEvent struct {
	id      sandbox.ID
	seq     uint64
	key     []byte
	value   []byte
	expires time.Time
}

// AppendEvents implements sandbox.Store. It returns when the events are in the writer's
// queue, and does not wait for the disk. If one event is refused, none is stored.
func (s *Badger) AppendEvents(ctx context.Context, events []sandbox.Event) error {
	encoded := make([]encodedEvent, 0, len(events))
	for _, e := range events {
		if err := checkID(e.Sandbox); err != nil {
			return err
		}
		expires := e.Time.Add(sandbox.EventRetention)
		if !expires.After(time.Now()) {
			continue
		}
		value, err := encodeEvent(e, min(maxEvent, s.maxRecord))
		if err != nil {
			return err
		}
		encoded = append(encoded, encodedEvent{id: e.Sandbox, seq: e.Seq, key: eventKey(e.Sandbox, e.Seq), value: value, expires: expires})
	}
	if len(encoded) == 0 {
		return ctx.Err()
	}
	// The writer checks this too, but its error would not reach the caller.
	if err := s.reserve.check(); err != nil {
		return err
	}
	for _, w := range split(encoded, s.reserve.memTable/8) {
		s.unwritten.Add(int64(len(w.events)))
		if err := s.enqueue(ctx, w); err != nil {
			s.unwritten.Add(-int64(len(w.events)))
			return err
		}
	}
	return nil
}

// encodeEvent omits the command line of the process from an event that would be too large
// with it.
func encodeEvent(e sandbox.Event, limit int) ([]byte, error) {
	value, err := encode("event", e, limit)
	if err == nil || e.Process == nil {
		return value, err
	}
	brief := *e.Process
	brief.Command, brief.Argv = "", nil
	e.Process = &brief
	return encode("event", e, limit)
}

// split groups events into writes that each fit into a transaction of maxCost.
func split(events []encodedEvent, maxCost int64) []*write {
	var writes []*write
	w := &write{}
	for _, e := range events {
		one := write{events: []encodedEvent{e}}
		if len(w.events) == maxAppend || len(w.events) > 0 && w.cost()+one.cost() > maxCost {
			writes = append(writes, w)
			w = &write{}
		}
		w.events = append(w.events, e)
	}
	return append(writes, w)
}

// Events implements sandbox.Store.
func (s *Badger) Events(ctx context.Context, id sandbox.ID, after uint64, limit int) ([]sandbox.Event, error) {
	if err := s.catchUp(ctx); err != nil {
		return nil, err
	}
	var events []sandbox.Event
	err := s.view(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: eventPrefix(id), PrefetchValues: true, PrefetchSize: min(max(limit, 1), 100)})
		defer it.Close()
		for it.Seek(eventKey(id, after)); it.Valid() && len(events) < limit; it.Next() {
			item := it.Item()
			if eventSeq(id, item.Key()) <= after {
				continue
			}
			var e sandbox.Event
			if err := item.Value(func(v []byte) error { return decode(v, &e) }); err != nil {
				// A timeline with a gap is better than none.
				s.log.Warn("ignoring unreadable event", "sandbox", id, "seq", eventSeq(id, item.Key()), "error", err)
				continue
			}
			events = append(events, e)
		}
		return nil
	})
	return events, err
}

// LastSeq implements sandbox.Store.
func (s *Badger) LastSeq(ctx context.Context, id sandbox.ID) (uint64, error) {
	if err := s.catchUp(ctx); err != nil {
		return 0, err
	}
	var seq uint64
	err := s.view(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: eventPrefix(id), Reverse: true})
		defer it.Close()
		if it.Seek(lastEventKey(id)); it.Valid() {
			seq = eventSeq(id, it.Item().Key())
		}
		return nil
	})
	return seq, err
}

// catchUp waits until all events that were appended before are written.
func (s *Badger) catchUp(ctx context.Context) error {
	if s.unwritten.Load() == 0 {
		return ctx.Err()
	}
	return s.writeAndWait(ctx, &write{})
}

// timeline bounds the events of each sandbox to sandbox.MaxEvents. It belongs to the writer.
type timeline struct {
	// oldest caches a lower bound of the stored seqs, which saves an iterator per event.
	// Entries may be dropped at any time.
	oldest map[sandbox.ID]uint64
}

// maxOldest bounds the memory of a timeline to about 4 MB.
const maxOldest = 50_000

// append adds e and removes the events that are older than the newest MaxEvents.
func (t *timeline) append(txn *badger.Txn, e encodedEvent) error {
	entry := badger.NewEntry(e.key, e.value)
	entry.ExpiresAt = uint64(e.expires.Unix())
	if err := txn.SetEntry(entry); err != nil {
		return err
	}
	oldest, known := t.oldest[e.id]
	if !known {
		oldest = firstSeq(txn, e.id, 0, e.seq)
	}
	oldest = min(oldest, e.seq)
	if e.seq >= sandbox.MaxEvents {
		keep := e.seq - sandbox.MaxEvents + 1
		for oldest < keep {
			if err := txn.Delete(eventKey(e.id, oldest)); err != nil {
				return err
			}
			if oldest++; oldest < keep {
				oldest = firstSeq(txn, e.id, oldest, e.seq)
			}
		}
	}
	if len(t.oldest) >= maxOldest {
		clear(t.oldest)
	}
	t.oldest[e.id] = oldest
	return nil
}

// firstSeq returns the first stored seq of id that is at least from, or none if there is
// none.
func firstSeq(txn *badger.Txn, id sandbox.ID, from, none uint64) uint64 {
	it := txn.NewIterator(badger.IteratorOptions{Prefix: eventPrefix(id)})
	defer it.Close()
	if it.Seek(eventKey(id, from)); it.Valid() {
		return eventSeq(id, it.Item().Key())
	}
	return none
}
