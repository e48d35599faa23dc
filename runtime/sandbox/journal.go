package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// journalEvery is how long an unacknowledged change may stay in memory.
	journalEvery = 250 * time.Millisecond
	// journalCapacity bounds the events that wait for a disk that refuses
	// them; the oldest are dropped, and counted in the log.
	journalCapacity = 20_000
	// journalRetry is the pause after a write that failed, as on a full disk.
	journalRetry = 2 * time.Second
	// journalSaves records are written concurrently: concurrent writes share one sync,
	// and a node that ends may have thousands.
	journalSaves = 64
)

// journal writes in the background: events, and records whose state can be determined
// again after a crash. A wake therefore never waits for the disk.
type journal struct {
	store  Store
	logger *slog.Logger
	wake   chan struct{} // holds one element when there is something to write

	mu        sync.Mutex
	events    []Event
	dropped   int
	sandboxes map[*liveSandbox]struct{}
	// lines for the node's log are queued too: a wake does not wait for the log either.
	lines []slog.Record

	writing sync.Mutex // one flush at a time, so that events keep their order
}

func newJournal(store Store, log *slog.Logger) *journal {
	return &journal{store: store, logger: log, wake: make(chan struct{}, 1), sandboxes: map[*liveSandbox]struct{}{}}
}

func (j *journal) append(ev Event) {
	j.mu.Lock()
	j.events = append(j.events, ev)
	j.trimLocked()
	j.mu.Unlock()
	j.signal()
}

// log writes a line to the node's log soon. Lines beyond journalCapacity are dropped.
func (j *journal) log(line slog.Record) {
	j.mu.Lock()
	if len(j.lines) < journalCapacity {
		j.lines = append(j.lines, line)
	}
	j.mu.Unlock()
	j.signal()
}

// trimLocked drops the oldest events beyond journalCapacity.
func (j *journal) trimLocked() {
	if over := len(j.events) - journalCapacity; over > 0 {
		j.events = j.events[over:]
		j.dropped += over
	}
}

// dirty queues the record of b for writing.
func (j *journal) dirty(b *liveSandbox) {
	j.mu.Lock()
	j.sandboxes[b] = struct{}{}
	j.mu.Unlock()
	j.signal()
}

func (j *journal) signal() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// run writes until ctx ends; the Manager owns its goroutine and flushes at last.
func (j *journal) run(ctx context.Context) {
	for {
		select {
		case <-j.wake:
			every := journalEvery
			if j.flush(ctx) != nil {
				every = journalRetry
			}
			if pause(ctx, every) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// flush writes all that is queued. It queues again what the disk refuses, which run
// retries.
func (j *journal) flush(ctx context.Context) error {
	j.writing.Lock()
	defer j.writing.Unlock()
	j.mu.Lock()
	events, sandboxes, dropped, lines := j.events, j.sandboxes, j.dropped, j.lines
	j.events, j.sandboxes, j.dropped, j.lines = nil, map[*liveSandbox]struct{}{}, 0, nil
	j.mu.Unlock()
	logLines(j.logger, lines)
	if dropped > 0 {
		j.logger.Error("failed to write events, the oldest were dropped", "count", dropped)
	}
	var errs []error
	if len(events) > 0 {
		if err := j.write(ctx, events); err != nil {
			errs = append(errs, err)
			j.mu.Lock()
			j.events = append(events, j.events...)
			j.trimLocked()
			j.mu.Unlock()
		}
	}
	errs = append(errs, j.save(ctx, sandboxes))
	err := errors.Join(errs...)
	if err != nil {
		j.signal()
		if ctx.Err() == nil {
			j.logger.Error("failed to write events and records, trying again", "error", err)
		}
	}
	return err
}

// save writes records, and queues those again that the disk refuses. It returns one of
// the errors, which are all alike and may be thousands. A record that the store refuses with
// *InvalidError, and would always refuse, is written again after its next change only: otherwise it
// would delay all others.
func (j *journal) save(ctx context.Context, sandboxes map[*liveSandbox]struct{}) error {
	var saves errgroup.Group
	saves.SetLimit(journalSaves)
	for b := range sandboxes {
		saves.Go(func() error {
			err := b.save(ctx)
			if _, invalid := errors.AsType[*InvalidError](err); invalid {
				j.logger.Error("failed to write a record, which the store refuses", "sandbox", b.id, "error", err)
				return nil
			}
			if err != nil {
				j.mu.Lock()
				defer j.mu.Unlock()
				j.sandboxes[b] = struct{}{}
			}
			return err
		})
	}
	return saves.Wait()
}

// write appends events. It drops one that the store refuses with *InvalidError and would
// always refuse: the other timelines wait behind it.
func (j *journal) write(ctx context.Context, events []Event) error {
	err := j.store.AppendEvents(ctx, events)
	if _, invalid := errors.AsType[*InvalidError](err); !invalid {
		return err
	}
	if len(events) == 1 {
		j.logger.Error("failed to write an event, which was dropped", "sandbox", events[0].Sandbox, "type", events[0].Type, "error", err)
		return nil
	}
	half := len(events) / 2
	return errors.Join(j.write(ctx, events[:half]), j.write(ctx, events[half:]))
}
