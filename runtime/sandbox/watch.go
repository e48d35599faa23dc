package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// A guest that floods its event stream is slowed down by back-pressure.
	guestEventsPerSecond = 200
	guestEventsBurst     = 600
	// deathWait is how long a guest that broke its event stream may take to
	// answer or its container to be seen ended, before it is killed.
	deathWait = 10 * time.Second
	// lastWords bounds the reading of what a guest left in its event stream when
	// it ended; guestEventsBurst of them take no time.
	drainTimeout = 2 * time.Second
	// A guest may break its event stream this often before the node is slower
	// to ask after it.
	breaksPerSecond = 1
	breaksBurst     = 5
)

// watch begins to follow the guest's events, of which the end of the stream is
// the most important: it says that the container died. Needs the turn.
func (b *liveSandbox) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	drained := make(chan struct{})
	b.mu.Lock()
	b.endWatch, b.drained = cancel, drained
	b.mu.Unlock()
	if !b.m.spawn(func(managerCtx context.Context) {
		stop := context.AfterFunc(managerCtx, cancel)
		defer stop()
		defer cancel()
		err := b.follow(ctx)
		close(drained)
		if ctx.Err() != nil {
			return
		}
		b.m.log.Info("event stream of the guest ended", "sandbox", b.id, "error", err)
		b.afterStreamEnd(managerCtx, ctx)
	}) {
		cancel()
		close(drained)
	}
}

// hearOut waits until the watcher has read what a guest said on its way out: how
// its processes ended. The end of the container ends the stream.
func (b *liveSandbox) drainEvents(ctx context.Context) {
	b.mu.Lock()
	drained := b.drained
	watched := b.endWatch != nil
	b.mu.Unlock()
	if !watched {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	select {
	case <-drained:
	case <-ctx.Done():
	}
}

func (b *liveSandbox) watched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.endWatch != nil
}

func (b *liveSandbox) unwatch() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.endWatch != nil {
		b.endWatch()
		b.endWatch = nil
	}
}

func (b *liveSandbox) follow(ctx context.Context) error {
	stream, err := b.guest.Events(ctx)
	if err != nil {
		return err
	}
	defer stream.Close()
	limit := rate.NewLimiter(guestEventsPerSecond, guestEventsBurst)
	for {
		ev, err := stream.Next()
		if err != nil {
			return err
		}
		if err := limit.Wait(ctx); err != nil {
			return err
		}
		b.onGuestEvent(ev)
	}
}

func (b *liveSandbox) onGuestEvent(ev guest.Event) {
	switch {
	case ev.Type == guest.EventProcess && ev.Process != nil:
		b.noteProcess(*ev.Process)
	case ev.Type == guest.EventHold:
		// Nobody waits for it to be on disk, and a sandbox could make the disk
		// sync as often as it likes.
		until := holdUntil(ev.Hold) // the client refuses one beyond MaxHold
		b.change(func(sb *Sandbox) { sb.HoldUntil = until })
		b.m.journal.dirty(b)
		b.emit(Event{Type: EventHeld, Until: until})
	}
}

// afterStreamEnd finds out what became of the guest. watched ends when the run
// of the guest that was watched has been dealt with.
func (b *liveSandbox) afterStreamEnd(ctx, watched context.Context) {
	// A guest that breaks its streams on purpose would keep the engine busy.
	if b.breaks.Wait(watched) != nil || b.lockTransition(watched) != nil {
		return
	}
	state := b.state()
	switch {
	case watched.Err() != nil || b.isGone(): // it is another run's watcher that would be ended
	case state == StateRunning:
		b.unwatch()
		b.probeGuest(ctx)
	case state == StateAsleep:
		b.unwatch()
	}
	b.unlockTransition()
	if state == StateAsleep {
		b.awaitContainerEnd(ctx)
	}
}

// askAfter decides whether a guest that runs is alive. Requests that arrive
// meanwhile wait, and wake it again if it died. Needs the turn.
func (b *liveSandbox) probeGuest(ctx context.Context) {
	b.closeNow()
	ctx, cancel := context.WithTimeout(ctx, deathWait)
	defer cancel()
	for !b.foundEnded(ctx) {
		helloCtx, cancelHello := context.WithTimeout(ctx, time.Second)
		_, helloErr := b.guest.Hello(helloCtx)
		cancelHello()
		if helloErr == nil {
			b.watch()
			b.open(0)
			return
		}
		if pause(ctx, 20*time.Millisecond) != nil {
			if b.m.ctx.Err() != nil {
				return // the next node looks again
			}
			b.m.log.Error("the guest neither answers nor ended: killing it", "sandbox", b.id, "error", helloErr)
			b.ended(ReasonGuestUnresponsive, fmt.Sprintf("its guest did not respond: %v", helloErr))
			b.kill(ctx, 0)
			return
		}
	}
}

// awaitDeath looks for a while whether the container of a sleeping sandbox has
// ended: frozen, its guest cannot answer. Between two looks others have their
// turn; a wake among them greets the guest itself, as nobody watches it.
func (b *liveSandbox) awaitContainerEnd(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, deathWait)
	defer cancel()
	for b.lockTransition(ctx) == nil {
		settled := b.isGone() || b.state() != StateAsleep || b.watched() || b.foundEnded(ctx)
		b.unlockTransition()
		if settled || pause(ctx, 50*time.Millisecond) != nil {
			return
		}
	}
}

// foundEnded notes that the container has ended, if the engine says so. Needs the turn.
func (b *liveSandbox) foundEnded(ctx context.Context) bool {
	c, err := b.m.engine.Inspect(ctx, b.id)
	switch {
	case err == nil && c.State != ContainerRunning && c.State != ContainerPaused:
		b.ended(ReasonContainerExited, fmt.Sprintf("its container exited with code %d", c.ExitCode))
		b.kill(ctx, 0)
		return true
	case errors.Is(err, ErrNoContainer):
		b.ended(ReasonContainerLost, "")
		return true
	}
	return false
}
