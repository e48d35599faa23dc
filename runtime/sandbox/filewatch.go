package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// stoppedWait is how long the state of a sandbox may take to follow the end of its guest: a
// guest ends before its container does.
const stoppedWait = deathWait + stopSlack

// StoppedError: a sandbox was stopped or destroyed, and what its guest had in memory is lost.
type StoppedError struct {
	State  State       // StateStopped or StateDestroyed
	Reason StateReason // empty if it is unknown
}

func (e *StoppedError) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("the sandbox is %s", e.State)
	}
	return fmt.Sprintf("the sandbox is %s (%s)", e.State, e.Reason)
}

// FileWatch is a watch of files in a sandbox. It does not keep the sandbox awake: while that
// sleeps nothing changes, and Next waits.
type FileWatch struct {
	b      *liveSandbox
	run    time.Time // StartedAt of the sandbox
	stream *guest.WatchStream
}

// WatchFiles wakes the sandbox and begins a watch. To resume one, by spec.Since, it does not wake a
// sleeping sandbox but waits until it runs. Errors: *StoppedError when the sandbox of a watch
// to resume is stopped, *guest.Error, and the errors of Acquire.
func (m *Manager) WatchFiles(ctx context.Context, id ID, spec guest.WatchSpec) (*FileWatch, error) {
	acquire := m.Acquire
	if spec.Since != (guest.WatchCursor{}) {
		acquire = m.awaitRunning
	}
	lease, err := acquire(ctx, id, CauseFiles)
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	run := lease.b.view.Load().StartedAt
	stream, err := lease.b.guest.Watch(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &FileWatch{b: lease.b, run: run, stream: stream}, nil
}

// Started describes the beginning of the watch.
func (w *FileWatch) Started() guest.WatchStarted { return w.stream.Started }

// Next waits for the next events; see guest.WatchStream. When the sandbox ends it returns
// *StoppedError. The end of ctx ends the watch.
func (w *FileWatch) Next(ctx context.Context) ([]guest.WatchEvent, error) {
	defer context.AfterFunc(ctx, func() { w.stream.Close() })()
	events, err := w.stream.Next()
	switch {
	case err == nil:
		return events, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case !errors.Is(err, guest.ErrLost):
		return nil, err
	}
	waitCtx, cancel := context.WithTimeout(ctx, stoppedWait)
	defer cancel()
	stopped := w.b.awaitState(waitCtx, func(sb *Sandbox) error {
		if !sb.StartedAt.Equal(w.run) { // and was started again
			return &StoppedError{State: StateStopped}
		}
		return stoppedError(sb)
	})
	if _, ok := errors.AsType[*StoppedError](stopped); ok || ctx.Err() != nil || errors.Is(stopped, ErrClosed) {
		return nil, stopped
	}
	return nil, err
}

// Close ends the stream. The guest keeps the watch for some time, so that it can be resumed.
func (w *FileWatch) Close() error { return w.stream.Close() }

// stoppedError returns *StoppedError for a sandbox that does not run and will not by itself.
func stoppedError(sb *Sandbox) error {
	if sb.State == StateStopped || sb.State == StateArchived || sb.State == StateDestroyed {
		return &StoppedError{State: sb.State, Reason: sb.StateReason}
	}
	return nil
}

// awaitRunning is Acquire that waits while the sandbox sleeps, in place of waking it. It returns
// *StoppedError for a stopped one.
func (m *Manager) awaitRunning(ctx context.Context, id ID, cause Cause) (lease *Lease, err error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	acquired := errors.New("acquired")
	err = b.awaitState(ctx, func(sb *Sandbox) error {
		if sb.State != StateRunning && !b.waking() {
			return stoppedError(sb)
		}
		lease, err = b.await(ctx, cause, false)
		_, failed := errors.AsType[*WakeError](err)
		switch {
		case err == nil:
			return acquired
		case failed, errors.Is(err, ErrNotRunning):
			return stoppedError(b.view.Load()) // or it sleeps again
		}
		return err
	})
	if err == acquired {
		err = nil
	}
	return lease, err
}

// awaitState calls decide, at first and whenever the state may have changed, until it returns
// an error, and returns that. Other errors: the cause of the end of ctx, ErrClosed.
func (b *liveSandbox) awaitState(ctx context.Context, decide func(*Sandbox) error) error {
	for {
		events, cancel, err := b.m.Subscribe(b.id)
		if errors.Is(err, ErrNotFound) || err == nil && b.isGone() {
			err = &StoppedError{State: StateDestroyed, Reason: b.view.Load().StateReason}
		}
		if err != nil {
			return err
		}
		err = b.decideAtEvents(ctx, events, decide)
		cancel()
		if err != nil {
			return err
		}
	}
}

// decideAtEvents returns nil when events is closed.
func (b *liveSandbox) decideAtEvents(ctx context.Context, events <-chan Event, decide func(*Sandbox) error) error {
	for open := true; open; {
		if err := decide(b.view.Load()); err != nil {
			return err
		}
		select {
		case _, open = <-events:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
