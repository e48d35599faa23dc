package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// wake is one wake in flight, shared by its waiters.
type wake struct {
	cause   Cause
	end     context.CancelCauseFunc
	done    chan struct{}
	waiters int  // guarded by liveSandbox.mu; each gets a lease when the wake succeeds
	cold    bool // guarded by liveSandbox.mu; a waiter permits a cold start
	// Valid once done is closed:
	info WakeInfo
	err  error
}

// await joins the wake in flight, or starts one, and waits for it. Without cold it returns
// ErrNotRunning for a stopped sandbox.
func (b *liveSandbox) await(ctx context.Context, cause Cause, cold bool) (*Lease, error) {
	if n := b.m.waiting.Add(1); n > int64(b.m.config().MaxWaiters) {
		b.m.waiting.Add(-1)
		return nil, ErrTooManyWaiters
	}
	defer b.m.waiting.Add(-1)
	for {
		lease, err := b.awaitOne(ctx, cause, cold)
		// A waiter that permits a cold start may join just after the wake has decided
		// against one.
		if !cold || !errors.Is(err, ErrNotRunning) {
			return lease, err
		}
	}
}

// awaitOne is await for one wake.
func (b *liveSandbox) awaitOne(ctx context.Context, cause Cause, cold bool) (*Lease, error) {
	b.mu.Lock()
	if b.gone {
		b.mu.Unlock()
		return nil, fmt.Errorf("sandbox %s: %w", b, ErrDestroyed)
	}
	if b.tryAcquire() { // it woke meanwhile
		b.mu.Unlock()
		return &Lease{b: b}, nil
	}
	w := b.wake
	if w == nil {
		wakeCtx, end := context.WithCancelCause(b.m.ctx)
		w = &wake{cause: cause, end: end, done: make(chan struct{})}
		if !b.m.spawn(func(context.Context) { b.runWake(wakeCtx, w) }) {
			end(nil)
			b.mu.Unlock()
			return nil, ErrClosed
		}
		b.wake = w
	}
	if w.waiters >= b.m.config().MaxWaitersPerSandbox {
		b.mu.Unlock()
		return nil, ErrTooManyWaiters
	}
	w.waiters++
	w.cold = w.cold || cold
	b.mu.Unlock()

	select {
	case <-w.done:
	case <-ctx.Done():
		if b.abandon(w) {
			return nil, ctx.Err()
		}
	}
	if w.err != nil {
		return nil, w.err
	}
	return &Lease{b: b, wake: w.info}, nil
}

// waking reports whether a wake is in flight.
func (b *liveSandbox) waking() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.wake != nil
}

// abandon removes a waiter from a wake. It returns false when the wake has ended meanwhile,
// so that the waiter has its lease or error already.
func (b *liveSandbox) abandon(w *wake) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.wake != w {
		return false
	}
	w.waiters--
	return true
}

// runWake wakes the sandbox for all waiters of w. The goroutine belongs to the
// Manager, which waits for it on Close.
func (b *liveSandbox) runWake(ctx context.Context, w *wake) {
	defer w.end(nil)
	ctx, cancel := context.WithTimeout(ctx, b.m.config().WakeTimeout)
	defer cancel()
	start := time.Now()

	err := b.retrieveFor(ctx, w)
	if err == nil {
		err = b.lockTransition(ctx)
	}
	var kind WakeKind
	if err == nil {
		defer b.unlockTransition()
		kind, err = b.wakeUp(ctx, w)
	}
	info := WakeInfo{Kind: kind, Took: time.Since(start)}
	err = b.wakeError(ctx, err)
	// Before the waiters go on: their clients find the wake in the timeline.
	switch {
	case errors.Is(err, ErrDestroyed), errors.Is(err, ErrClosed), errors.Is(err, ErrNotRunning):
	case err != nil:
		b.m.metrics.wakeFailures.Inc()
		b.emit(Event{Type: EventWakeFailed, Cause: w.cause, Error: err.Error()})
		b.failed(ConditionWakeFailed, err)
	case kind != WakeNone:
		b.m.metrics.woke(kind, w.cause, info.Took)
		b.emit(Event{Type: EventWoke, Kind: kind, Cause: w.cause, DurationMS: milliseconds(info.Took)})
	}

	b.mu.Lock()
	b.wake = nil
	w.info, w.err = info, err
	if err == nil {
		// The waiters get their leases here, under mu, so that the sandbox cannot sleep
		// between the wake and their requests.
		b.open(w.waiters)
		b.touch()
	}
	close(w.done)
	b.mu.Unlock()
	if err == nil {
		b.armWoken()
	}
	if err == nil && kind == WakeCold {
		b.startSpares(b.view.Load().Warm)
	}
}

// wakeError returns the error for the waiters: the cause of a canceled ctx, or a *WakeError.
func (b *liveSandbox) wakeError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && (errors.Is(cause, ErrDestroyed) || errors.Is(cause, ErrClosed)) {
		return fmt.Errorf("sandbox %s: %w", b, cause)
	}
	if _, done := errors.AsType[*WakeError](err); err == nil || done || errors.Is(err, ErrDestroyed) || errors.Is(err, ErrClosed) || errors.Is(err, ErrNotRunning) {
		return err
	}
	return &WakeError{ID: b.id, Err: err}
}

// wakeUp brings the sandbox to StateRunning from any state, as far as the waiters of w
// permit. Needs the transition lock.
func (b *liveSandbox) wakeUp(ctx context.Context, w *wake) (WakeKind, error) {
	if b.isGone() {
		return WakeNone, fmt.Errorf("sandbox %s: %w", b, ErrDestroyed)
	}
	switch state := b.state(); state {
	case StateRunning:
		return WakeNone, nil
	case StateAsleep:
		err := b.thaw(ctx)
		if err == nil {
			return WakeWarm, nil
		}
		if errors.Is(err, errUnusable) {
			if b.m.ctx.Err() != nil { // the node closes; its next start decides
				return WakeNone, errors.Join(err, b.refreeze(ctx))
			}
			b.stopUnusable(ctx, err)
			return b.startFor(ctx, w)
		}
		// Its container or cgroup may have vanished while it slept.
		b.m.log.Warn("failed to thaw a sandbox, inspecting its container", "sandbox", b.id, "error", err)
		c, inspectErr := b.m.deps.Engine.Inspect(ctx, b.id)
		if inspectErr == nil && (c.State == ContainerRunning || c.State == ContainerPaused) {
			return WakeNone, err
		}
		if inspectErr != nil && !errors.Is(inspectErr, ErrNoContainer) {
			return WakeNone, errors.Join(err, inspectErr)
		}
		if inspectErr != nil {
			b.ended(ending{reason: ReasonContainerLost})
		} else {
			b.ended(ending{reason: ReasonContainerExited, failure: "its container ended while asleep"})
		}
		return b.startFor(ctx, w)
	case StateStopped:
		return b.startFor(ctx, w)
	case StateArchived: // just now
		return WakeNone, b.notRunning()
	default:
		return WakeNone, fmt.Errorf("it is %s, from which it cannot wake", state)
	}
}

// retrieveFor downloads the disk of an archived sandbox, if a waiter of w permits a cold start.
func (b *liveSandbox) retrieveFor(ctx context.Context, w *wake) error {
	if b.state() != StateArchived {
		return nil
	}
	b.mu.Lock()
	cold := w.cold
	b.mu.Unlock()
	if !cold {
		return b.notRunning()
	}
	return b.retrieve(ctx)
}

// startFor is the cold wake, if a waiter of w permits it. Needs the transition lock.
func (b *liveSandbox) startFor(ctx context.Context, w *wake) (WakeKind, error) {
	b.mu.Lock()
	cold := w.cold
	b.mu.Unlock()
	if !cold {
		return WakeNone, b.notRunning()
	}
	return WakeCold, b.coldStart(ctx)
}

// errUnusable: a sandbox that was adopted asleep must be started again, because its guest
// does not respond to this node or is of another version.
var errUnusable = errors.New("its guest cannot be used")

// thaw is the warm wake.
func (b *liveSandbox) thaw(ctx context.Context) error {
	if err := b.remount(ctx); err != nil { // its programs must not run without the buckets
		return err
	}
	if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil {
		return fmt.Errorf("thaw %s: %w", b.id, err)
	}
	if !b.watched() { // adopted asleep from an earlier run of the node
		// Enough time must be left for a cold start.
		if err := b.adoptGuest(ctx, min(deathWait, b.m.config().WakeTimeout/4)); err != nil {
			return fmt.Errorf("%w: %w", errUnusable, err)
		}
		return nil
	}
	b.setState(StateRunning, "")
	return nil
}

// coldStart starts the container, waits for its guest and starts the declared processes.
// After an error the sandbox is stopped.
func (b *liveSandbox) coldStart(ctx context.Context) error {
	ranOn := b.leftover.Load() // its processes may be running
	err := b.start(ctx)
	if err == nil {
		err = b.mountAll(ctx)
	}
	if err == nil && ranOn {
		err = b.startMissing(ctx)
	}
	if err != nil {
		err = &WakeError{ID: b.id, Err: fullDisk(err), LastLog: b.lastLog(ctx)}
		b.disconnect()
		b.kill(ctx, 0)
		return err
	}
	b.setState(StateRunning, "")
	if b.diskLost {
		b.diskLost = false
		b.setCondition(ConditionDiskLost, diskLostMessage)
	}
	b.trustUplink(ctx)
	if !ranOn {
		b.startDeclared(ctx, b.view.Load().Declared)
	}
	return nil
}

// lastLog is Manager.LastLog, also when ctx has ended.
func (b *liveSandbox) lastLog(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	return b.m.LastLog(ctx, b.id)
}

// limits returns the limits of the sandbox's size. If the size is no longer configured, the
// sandbox keeps its last limits.
func (b *liveSandbox) limits() Limits {
	sb := b.view.Load()
	if limits, ok := b.m.config().Sizes[sb.Size]; ok {
		return limits
	}
	return sb.Limits
}

// start starts the container and returns when its guest responds.
func (b *liveSandbox) start(ctx context.Context) error {
	sb := b.sandbox()
	limits := b.limits()
	parent, err := b.m.deps.Freezer.Prepare(b.id, limits)
	if err != nil {
		return fmt.Errorf("prepare its cgroup: %w", err)
	}
	if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil {
		return fmt.Errorf("thaw its cgroup: %w", err)
	}
	if err := b.m.makeRunDir(b.id); err != nil {
		return fmt.Errorf("create its run folder: %w", err)
	}
	if err := b.rebase(ctx); err != nil {
		return err
	}
	c, err := b.m.deps.Engine.Start(ctx, b.id, limits)
	if errors.Is(err, ErrNoContainer) {
		// New, or removed outside of doze: then its files are lost.
		if lost := !sb.StartedAt.IsZero(); lost {
			if sb.StateReason != ReasonContainerLost {
				b.emit(Event{Type: EventStopped, Reason: ReasonContainerLost})
			}
			b.m.log.Error("container was removed outside of doze, making it again", "sandbox", b.id)
			b.emit(Event{Type: EventDiskLost, Error: diskLostMessage})
			b.diskLost = true
		}
		if err := b.createContainer(ctx, b.m.containerSpec(sb, parent)); err != nil {
			return fmt.Errorf("create its container: %w", err)
		}
		c, err = b.m.deps.Engine.Start(ctx, b.id, limits)
	}
	if err != nil {
		return fmt.Errorf("start its container: %w", err)
	}
	b.leftover.Store(false)
	b.pid.Store(int64(c.PID))
	b.change(func(sb *Sandbox) { sb.beginRun(limits) })
	b.beginDiskRun()
	// While the guest starts.
	if err := b.attach(ctx); err != nil {
		return err
	}
	if err := b.awaitGuest(ctx); err != nil {
		return err
	}
	b.watch()
	return nil
}

// createContainer creates the container, whose disk survives a loss of power.
func (b *liveSandbox) createContainer(ctx context.Context, spec ContainerSpec) error {
	if err := b.m.deps.Engine.Create(ctx, spec); err != nil {
		return fullDisk(err)
	}
	if err := b.m.deps.Disks.Sync(ctx, b.id); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopSlack)
		defer cancel()
		return fullDisk(errors.Join(err, b.m.deps.Engine.Remove(ctx, b.id))) // the next start would find it and not sync it
	}
	b.emptyDisk()
	return nil
}

// awaitGuest waits until the guest responds with the right protocol. It returns immediately
// when the container exits.
func (b *liveSandbox) awaitGuest(ctx context.Context) error {
	lastInspect := time.Now()
	for attempt := 0; ; attempt++ {
		helloCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
		hello, err := b.guest.Hello(helloCtx)
		cancel()
		if err == nil {
			b.noteTrust(hello.Trust)
			return nil
		}
		if _, wrong := errors.AsType[*guest.VersionError](err); wrong {
			return err
		}
		if time.Since(lastInspect) > 50*time.Millisecond {
			c, inspectErr := b.m.deps.Engine.Inspect(ctx, b.id)
			if inspectErr == nil && c.State == ContainerExited {
				return fmt.Errorf("its container exited with code %d", c.ExitCode)
			}
			if errors.Is(inspectErr, ErrNoContainer) {
				return inspectErr
			}
			lastInspect = time.Now()
		}
		if pause(ctx, helloPause(attempt)) != nil {
			return fmt.Errorf("its guest did not respond: %w", err)
		}
	}
}

// helloPause: the guest listens a few milliseconds after the container's start.
func helloPause(attempt int) time.Duration {
	if attempt < 40 {
		return time.Millisecond
	}
	return 10 * time.Millisecond
}

// pause waits d, or less when ctx ends, whose error it then returns.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Wake wakes the sandbox and returns it running. When ctx ends first, the wake goes on.
func (m *Manager) Wake(ctx context.Context, id ID) (Sandbox, error) {
	lease, err := m.Acquire(ctx, id, CauseRequested)
	if err != nil {
		return Sandbox{}, err
	}
	defer lease.Release()
	return lease.Sandbox(), nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
