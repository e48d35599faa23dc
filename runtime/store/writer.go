package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
)

// maxQueue bounds the queued writes. If the queue is full, callers wait for it.
const maxQueue = 1024

// maxGroup bounds the writes of one transaction.
const maxGroup = 256

// write is one entry of the writer's queue: a record or document, some
// events, or nothing, which is a barrier.
type write struct {
	key    []byte // of a record or document
	value  []byte // nil deletes it
	events []encodedEvent
	// done receives the outcome. It has a capacity of one, and is nil if no caller waits.
	done chan error
}

// durable reports whether the write must be on the disk before done is sent.
func (w *write) durable() bool { return w.key != nil }

// cost returns an upper bound of the write's bytes in Badger's log. Every event may evict
// an older one.
func (w *write) cost() int64 {
	var n int64
	if w.key != nil {
		n += int64(len(w.key)+len(w.value)) + entryOverhead
	}
	for _, e := range w.events {
		n += int64(2*len(e.key)+len(e.value)) + 2*entryOverhead
	}
	return n
}

// writeAndWait queues w and returns its outcome. ctx bounds only the wait for the queue: a
// queued write is made in any case, so the caller must learn its outcome.
func (s *Badger) writeAndWait(ctx context.Context, w *write) error {
	w.done = make(chan error, 1)
	if err := s.enqueue(ctx, w); err != nil {
		return err
	}
	return <-w.done
}

func (s *Badger) enqueue(ctx context.Context, w *write) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return errClosed
	}
	select {
	case s.queue <- w:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// writer makes all changes, in the order of the queue. It combines the queued writes into
// one transaction, which Badger writes to a single log, and syncs that log once: a record
// alone takes 0.28 ms, and 64 concurrent callers reach 39,000 records per second.
func (s *Badger) writer() {
	defer close(s.done)
	t := timeline{oldest: make(map[sandbox.ID]uint64)}
	for first := range s.queue {
		group, next := s.collect(first)
		s.commit(&t, group)
		if next != nil {
			s.commit(&t, []*write{next})
		}
	}
}

// collect returns first and the writes that are queued behind it, as far as they fit into
// one transaction. next is a write that was dequeued but did not fit, or nil.
func (s *Badger) collect(first *write) (group []*write, next *write) {
	group = append(group, first)
	cost := first.cost()
	for len(group) < maxGroup {
		select {
		case w, open := <-s.queue:
			if !open {
				return group, nil
			}
			cost += w.cost()
			// Badger refuses a transaction of 15 % of the memtable.
			if cost > s.reserve.memTable/8 {
				return group, w
			}
			group = append(group, w)
		default:
			return group, nil
		}
	}
	return group, nil
}

// commit writes the group and sends the outcome to all waiting callers.
func (s *Badger) commit(t *timeline, group []*write) {
	err := s.tryCommit(t, group)
	// Deletes alone may still fit.
	if errors.Is(err, sandbox.ErrStoreFull) && len(group) > 1 {
		for _, w := range group {
			s.commit(t, []*write{w})
		}
		return
	}
	if err != nil {
		clear(t.oldest) // it may be past events that are still stored
	}
	for _, w := range group {
		s.unwritten.Add(-int64(len(w.events)))
		if w.done != nil {
			w.done <- err
		} else if err != nil {
			s.log.Warn("failed to store events", "sandbox", w.events[0].id, "events", len(w.events), "error", err)
		}
	}
}

func (s *Badger) tryCommit(t *timeline, group []*write) error {
	var cost int64
	durable, onlyDeletes, changes := false, true, false
	for _, w := range group {
		cost += w.cost()
		durable = durable || w.durable()
		changes = changes || w.durable() || len(w.events) > 0
		onlyDeletes = onlyDeletes && w.value == nil && len(w.events) == 0
	}
	if !changes {
		return nil
	}
	if durable {
		cost += commitCost
	}
	if err := s.reserve.admit(cost, onlyDeletes); err != nil {
		return err
	}
	if s.stuck.Load() { // a new transaction would wait for the stuck one
		return ErrStuck
	}
	txn := s.db.NewTransaction(true)
	defer txn.Discard()
	for _, w := range group {
		if err := apply(t, txn, w); err != nil {
			return fmt.Errorf("write to the store: %w", err)
		}
	}
	var commits uint64
	if durable {
		commits = s.commits.Add(1)
		value, err := encode("count of commits", commits, s.maxRecord)
		if err != nil {
			return err
		}
		if err := txn.Set(commitsKey, value); err != nil {
			return fmt.Errorf("write to the store: %w", err)
		}
	}
	if err := s.commitTxn(txn); err != nil {
		return fmt.Errorf("write to the store: %w", err)
	}
	if rotated := s.reserve.written(cost); rotated {
		s.noteTable()
	}
	if !durable {
		return nil
	}
	if err := s.db.Sync(); err != nil {
		return fmt.Errorf("sync the store: %w", err)
	}
	if f := s.witness.Load(); f != nil {
		(*f)(commits)
	}
	return nil
}

// commitCost is an upper bound of the bytes of the count of commits in Badger's log.
const commitCost = entryOverhead + 32

// commitTxn is txn.Commit, but returns ErrStuck after stuckAfter instead of waiting
// indefinitely for a disk that accepts no tables. tryCommit then returns ErrStuck immediately
// until Badger finishes that commit.
func (s *Badger) commitTxn(txn *badger.Txn) error {
	committed := make(chan error, 1)
	s.stuck.Store(true)
	txn.CommitWith(func(err error) {
		s.stuck.Store(false)
		committed <- err
	})
	timeout := time.NewTimer(s.stuckAfter)
	defer timeout.Stop()
	select {
	case err := <-committed:
		return err
	case <-timeout.C:
		return ErrStuck
	}
}

func apply(t *timeline, txn *badger.Txn, w *write) error {
	switch {
	case w.key != nil && w.value != nil:
		return txn.Set(w.key, w.value)
	case w.key != nil:
		return txn.Delete(w.key)
	}
	for _, e := range w.events {
		if err := t.append(txn, e); err != nil {
			return err
		}
	}
	return nil
}
