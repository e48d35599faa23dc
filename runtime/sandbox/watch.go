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
	// respond, or its container to end, before it is killed.
	deathWait = 10 * time.Second
	// drainTimeout bounds the reading of the events that a guest left in its stream when
	// it ended; guestEventsBurst of them take no time.
	drainTimeout = 2 * time.Second
	// A guest may break its event stream this often before the node probes it
	// more slowly.
	breaksPerSecond = 1
	breaksBurst     = 5
)

// watch begins to follow the guest's events. The end of the stream shows that the container
// ended. Needs the transition lock.
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

// drainEvents waits until the watcher has read the last events of a guest: how its processes
// ended. The end of the container ends the stream.
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
	// The stream begins with the processes that the guest knows. An earlier reader may have missed
	// others.
	if err := b.loseForgotten(ctx); err != nil {
		b.m.log.Warn("failed to list the processes of a guest", "sandbox", b.id, "error", err)
	}
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
	case ev.Type == guest.EventTerminal && ev.Terminal != nil:
		b.noteTerminal(*ev.Terminal)
	case ev.Type == guest.EventTerminals:
		terminals.forgetExcept(b, ev.Terminals)
	case ev.Type == guest.EventSession && ev.Session != nil:
		b.noteSession(*ev.Session)
	case ev.Type == guest.EventSessions:
		sessions.forgetExcept(b, ev.Sessions)
	case ev.Type == guest.EventPorts:
		b.noteListening(ev.Ports)
	case ev.Type == guest.EventHold:
		// No caller waits until it is on disk, and a sandbox could cause any number of
		// syncs.
		until := holdUntil(ev.Hold) // the client refuses one beyond MaxHold
		b.change(func(sb *Sandbox) { sb.HoldUntil = until })
		b.m.journal.dirty(b)
		b.emit(Event{Type: EventHeld, Until: until})
	}
}

// afterStreamEnd determines whether the guest is alive. watched ends when another caller has
// dealt with the end of that run of the guest.
func (b *liveSandbox) afterStreamEnd(ctx, watched context.Context) {
	// A guest that breaks its streams on purpose would keep the engine busy.
	if b.breaks.Wait(watched) != nil || b.lockTransition(watched) != nil {
		return
	}
	state := b.state()
	switch {
	case watched.Err() != nil || b.isGone(): // the present watcher belongs to another run
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

// probeGuest determines whether a running guest is alive. Requests that arrive meanwhile
// wait, and wake it again if it died. Needs the transition lock.
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
				return // the next start of the node decides
			}
			b.m.log.Error("failed to reach a guest, killing it", "sandbox", b.id, "error", helloErr)
			b.ended(ending{reason: ReasonGuestUnresponsive, failure: fmt.Sprintf("its guest did not respond: %v", helloErr)})
			b.kill(ctx, 0)
			return
		}
	}
}

// awaitContainerEnd polls for a while whether the container of a sleeping sandbox has
// ended: frozen, its guest cannot respond. It releases the transition lock between two
// polls; a wake in between contacts the guest itself, because it has no watcher.
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

// foundEnded reports whether the container has ended, and then marks the sandbox as
// stopped. Needs the transition lock.
func (b *liveSandbox) foundEnded(ctx context.Context) bool {
	c, err := b.m.deps.Engine.Inspect(ctx, b.id)
	switch {
	case err == nil && c.State != ContainerRunning && c.State != ContainerPaused:
		b.ended(ending{reason: ReasonContainerExited, failure: fmt.Sprintf("its container exited with code %d", c.ExitCode)})
		b.kill(ctx, 0)
		return true
	case errors.Is(err, ErrNoContainer):
		b.ended(ending{reason: ReasonContainerLost})
		return true
	}
	return false
}
