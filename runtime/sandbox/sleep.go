package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// diskLostMessage is the message of ConditionDiskLost, which stays until the next change of
// state.
const diskLostMessage = "its container was removed outside of doze: its files are lost, and it starts with the image's files"

// errNotIdle: the sandbox was used since the check of the idle rule.
var errNotIdle = errors.New("not idle")

// mode of a sleep or a stop: whether leases and holds prevent it.
type mode int

const (
	modeIdle      mode = iota // only when sleep_after or stop_after has passed
	modeRequested             // unless a lease is held; a sleep ends a hold
	modeForced                // although leases are held; a sleep ends a hold
	modeShutdown              // although leases are held; holds stay
	modePressure              // only one that is asleep, without a lease, a hold and a wake under way
)

// ending is why a sandbox stops.
type ending struct {
	reason  StateReason
	failure string // of the error that ended it; empty without one
	detail  string // the measurement that led to it, for people; may be empty
	// disk and diskLimit are the measurement and the limit of a stop because of disk usage.
	disk, diskLimit DiskUsage
}

// Sleep puts the sandbox to sleep and returns it. A sandbox whose memory does not persist
// is stopped. It does nothing to a sandbox that is asleep or stopped, and ends a
// hold. While a lease is held it returns ErrBusy.
func (m *Manager) Sleep(ctx context.Context, id ID) (Sandbox, error) {
	return m.sleep(ctx, id, modeRequested, ReasonRequested)
}

// ForceSleep is Sleep although leases are held: requests and commands that are
// under way pause, and continue with the next wake. Transfers of files and the input of
// commands fail when they have paused for a minute. In a sandbox that is stopped they end.
func (m *Manager) ForceSleep(ctx context.Context, id ID) (Sandbox, error) {
	return m.sleep(ctx, id, modeForced, ReasonForced)
}

func (m *Manager) sleep(ctx context.Context, id ID, how mode, reason StateReason) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error {
		if err := b.awaitSpares(ctx, how); err != nil {
			return err
		}
		sleep := func(ctx context.Context) error { return b.sleep(ctx, how, reason) }
		if b.view.Load().Persist == PersistMemory {
			return sleep(ctx)
		}
		return m.do(ctx, sleep) // the end of the caller's context does not interrupt a stop halfway
	})
}

const (
	// freezeWait bounds a freeze, which takes 70 µs. A process that waits for a disk
	// that does not respond cannot be frozen, and requests wait meanwhile.
	freezeWait = 5 * time.Second
	// trimWait bounds the trimming before it, which takes 2 ms, or some periods of the
	// CPU's quota (100 ms) in a sandbox that has used up its share.
	trimWait = 300 * time.Millisecond
)

// trim makes the guest return the memory that it does not need: asleep, it would hold it for
// days. A guest that does not do so in time is frozen nevertheless.
func (b *liveSandbox) trim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, trimWait)
	defer cancel()
	if err := b.guest.Trim(ctx); err != nil {
		b.m.log.Debug("failed to trim the memory of a guest", "sandbox", b.id, "error", err)
	}
}

// sleep is the only transition to StateAsleep, for the idle rule, the API and the node's
// shutdown. It checks that no lease is held and closes the sandbox in one atomic step;
// requests that arrive afterwards wait for the transition lock and wake it again.
//
// A sandbox whose memory does not persist is stopped instead, except by the node's shutdown:
// the next start resumes it.
func (b *liveSandbox) sleep(ctx context.Context, how mode, reason StateReason) error {
	if err := b.lockUsable(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.state() != StateRunning {
		if how == modeRequested || how == modeForced {
			b.endHold()
		}
		return nil
	}
	if how == modeIdle && b.idleIn() > 0 {
		return errNotIdle
	}
	if how != modeShutdown && b.view.Load().Persist != PersistMemory {
		return b.sleepStopped(ctx, how)
	}
	if err := b.close(how); err != nil {
		return err
	}
	if how != modeShutdown { // the next start of the node resumes it
		b.trim(ctx)
	}
	freezeCtx, cancel := context.WithTimeout(ctx, freezeWait)
	defer cancel()
	if err := b.m.deps.Freezer.Freeze(freezeCtx, b.id); err != nil {
		// It may be partly frozen: the caller's context ended, or an engine failed after
		// the freeze.
		err = &FreezeError{ID: b.id, Err: errors.Join(err, b.unfreeze(ctx))}
		if how == modeShutdown {
			return err // the next start of the node finds it running
		}
		return b.failed(ConditionSleepFailed, err)
	}
	if how == modeRequested || how == modeForced {
		b.endHold()
	}
	// A hold or an update during the freeze was acknowledged, and must count.
	idle := func() bool { return how != modeIdle || b.idleIn() <= 0 }
	if !b.setStateIf(idle, StateAsleep, reason) {
		if err := b.unfreeze(ctx); err != nil {
			return b.failed(ConditionSleepFailed, fmt.Errorf("thaw %s, which is in use: %w", b.id, err))
		}
		return errNotIdle
	}
	b.emit(Event{Type: EventSlept, Reason: reason})
	b.arm()
	return nil
}

// sleepStopped is the sleep of a sandbox whose memory does not persist. Needs the transition lock
// of a sandbox that runs.
func (b *liveSandbox) sleepStopped(ctx context.Context, how mode) error {
	reason := ReasonSlept
	if how == modeIdle {
		reason = ReasonIdle
	}
	if err := b.stopLocked(ctx, how, ending{reason: reason}, b.m.config().StopGrace); err != nil {
		return err
	}
	if how != modeIdle {
		b.endHold()
	}
	b.discardDisk(ctx)
	return nil
}

// close closes the sandbox to new leases. If one is held, it returns ErrBusy, except in
// modeForced and modeShutdown. Needs the transition lock.
func (b *liveSandbox) close(how mode) error {
	if how == modeForced || how == modeShutdown {
		b.closeNow()
		return nil
	}
	if !b.use.CompareAndSwap(0, -closedBias) {
		return b.busy()
	}
	return nil
}

func (b *liveSandbox) busy() error {
	if b.leases() == 1 {
		return fmt.Errorf("sandbox %s has 1 request in flight: %w", b, ErrBusy)
	}
	return fmt.Errorf("sandbox %s has %d requests in flight: %w", b, b.leases(), ErrBusy)
}

// unfreeze reverts a complete or partial freeze, also when ctx has ended, and opens the
// sandbox. Needs the transition lock.
func (b *liveSandbox) unfreeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deathWait)
	defer cancel()
	defer b.open(0)
	return b.m.deps.Freezer.Thaw(ctx, b.id)
}

// Stop ends all processes of the sandbox, keeps its disk, and returns it. It does nothing
// to a stopped sandbox. While a lease is held it returns ErrBusy.
func (m *Manager) Stop(ctx context.Context, id ID) (Sandbox, error) {
	return m.stop(ctx, id, modeRequested, ReasonRequested)
}

// ForceStop is Stop although leases are held: requests and commands that are
// under way end with the sandbox's processes.
func (m *Manager) ForceStop(ctx context.Context, id ID) (Sandbox, error) {
	return m.stop(ctx, id, modeForced, ReasonForced)
}

func (m *Manager) stop(ctx context.Context, id ID, how mode, reason StateReason) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error {
		if err := b.awaitSpares(ctx, how); err != nil {
			return err
		}
		// The end of the caller's context does not interrupt a stop halfway.
		return m.do(ctx, func(ctx context.Context) error { return b.stop(ctx, how, ending{reason: reason}) })
	})
}

// stopSlack is how long the engine may take to stop a container beyond the grace.
const stopSlack = 30 * time.Second

func (b *liveSandbox) stop(ctx context.Context, how mode, why ending) error {
	lockCtx, cancel := context.WithCancel(ctx)
	if how == modePressure { // another sandbox can be stopped while this one is, for example, copied
		lockCtx, cancel = context.WithTimeout(ctx, b.m.config().MemoryInterval)
	}
	err := b.lockUsable(lockCtx)
	cancel()
	if err != nil {
		return err
	}
	defer b.unlockTransition()
	// It may have been woken while this waited for the lock.
	if how == modeIdle && (b.state() != StateAsleep || b.stopIn() > 0) || how == modePressure && !b.unused() {
		return errNotIdle
	}
	if err := b.stopLocked(ctx, how, why, b.m.config().StopGrace); err != nil {
		return err
	}
	b.discardDisk(ctx)
	return nil
}

// stopLocked is the only transition to StateStopped that is not forced by the end of the
// container. Needs the transition lock.
func (b *liveSandbox) stopLocked(ctx context.Context, how mode, why ending, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+stopSlack)
	defer cancel()
	before := b.state()
	switch before {
	case StateRunning:
		if err := b.close(how); err != nil {
			return err
		}
	case StateAsleep:
		// A forced sleep paused the leases' requests; a stop would end them.
		if how == modeRequested && b.leases() > 0 {
			return b.busy()
		}
		b.interruptReclaim()
		// Its processes may end by themselves.
		if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil {
			return b.failed(ConditionStopFailed, fmt.Errorf("thaw %s to stop it: %w", b.id, err))
		}
	default:
		return nil
	}
	contexts := b.view.Load().Contexts
	err := b.m.deps.Engine.Stop(ctx, b.id, grace)
	if errors.Is(err, ErrNoContainer) {
		err, why = nil, ending{reason: ReasonContainerLost}
	}
	if err != nil {
		err = fmt.Errorf("stop %s: %w", b.id, err)
		// If it has stopped nevertheless, its watcher or the next wake finds out.
		if before == StateRunning {
			b.open(0)
			return b.failed(ConditionStopFailed, err)
		}
		return b.failed(ConditionStopFailed, errors.Join(err, b.refreeze(ctx)))
	}
	b.drainEvents(ctx)
	b.ignoreKernelEnds(contexts)
	b.ended(why)
	// It has stopped; on a full disk the journal writes that later.
	if err := b.save(ctx); err != nil && !errors.Is(err, ErrStoreFull) {
		return err
	}
	return nil
}

// endRun notes that the container has ended: all that ran in it is lost, and its disk is to be
// discarded unless it persists.
func (sb *Sandbox) endRun(reason StateReason) {
	sb.losePrograms(reason)
	sb.Rebase = sb.Rebase || sb.Persist == PersistNone
}

// discardDisk discards the disk of a stopped sandbox if it is marked so, to free its space. If it
// fails, the next start does it. Needs the transition lock.
func (b *liveSandbox) discardDisk(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stopSlack)
	defer cancel()
	if err := b.rebase(ctx); err != nil {
		b.m.log.Warn("failed to discard the disk of a stopped sandbox", "sandbox", b.id, "error", err)
	}
}

// refreeze reverts a thaw after a failure, also when ctx has ended. A sandbox that does not
// freeze becomes running. Needs the transition lock.
func (b *liveSandbox) refreeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deathWait)
	defer cancel()
	err := b.m.deps.Freezer.Freeze(ctx, b.id)
	if err == nil {
		return nil
	}
	b.setState(StateRunning, ReasonStopFailed)
	if !b.watched() {
		b.watch()
	}
	b.touch()
	b.open(0)
	b.armWoken()
	return fmt.Errorf("freeze %s again: %w", b.id, err)
}

// ended marks the sandbox as stopped: its container no longer runs. Needs the transition lock.
func (b *liveSandbox) ended(why ending) {
	b.closeNow()
	b.disconnect()
	b.endStart(b.startUp.Load())
	b.change(func(sb *Sandbox) { sb.endRun(why.reason) })
	b.setState(StateStopped, why.reason)
	b.arm() // it may expire
	b.emit(Event{Type: EventStopped, Reason: why.reason, Error: why.failure, Detail: why.detail, Disk: why.disk, DiskLimit: why.diskLimit})
}

// kill ends the container of a sandbox that is marked as stopped. After a failure runCheck
// tries again. Needs the transition lock.
func (b *liveSandbox) kill(ctx context.Context, grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace+deathWait)
	defer cancel()
	if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil && !errors.Is(err, ErrNotFound) {
		b.m.log.Warn("failed to thaw the container of a stopped sandbox", "sandbox", b.id, "error", err)
	}
	err := b.m.deps.Engine.Stop(ctx, b.id, grace)
	if errors.Is(err, ErrNoContainer) {
		err = nil
	}
	switch {
	case err != nil:
		b.failures.Add(1)
		b.m.log.Error("failed to end the container of a stopped sandbox", "sandbox", b.id, "error", err)
		if b.view.Load().Condition.Code == "" {
			b.setCondition(ConditionStopIncomplete, "it is stopped, but its container cannot be ended: "+err.Error())
		}
	default:
		b.endConditionOf(ConditionStopIncomplete)
	}
	b.leftover.Store(err != nil)
	b.arm()
}

// Hold keeps the sandbox awake until d from now, at most MaxHold; 0 ends a
// hold. A sandbox that sleeps is not woken by it.
func (m *Manager) Hold(ctx context.Context, id ID, d time.Duration) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error {
		if d < 0 || d > MaxHold {
			return &InvalidError{Field: "for", Reason: fmt.Sprintf("%s is out of range", d), Want: fmt.Sprintf(`use "0s" to end a hold, or up to %s`, MaxHold)}
		}
		return b.hold(ctx, d)
	})
}

func (b *liveSandbox) hold(ctx context.Context, d time.Duration) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	var before time.Time
	until := holdUntil(d)
	err := b.changeSaved(ctx,
		func(sb *Sandbox) { before, sb.HoldUntil = sb.HoldUntil, until },
		func(sb *Sandbox) {
			if sb.HoldUntil.Equal(until) { // else one from inside came meanwhile, or a sleep
				sb.HoldUntil = before
			}
		})
	if err == nil {
		b.emit(Event{Type: EventHeld, Until: until})
	}
	return err
}

// endHold ends a hold for a requested sleep.
func (b *liveSandbox) endHold() {
	if b.view.Load().HoldUntil.IsZero() {
		return
	}
	b.change(func(sb *Sandbox) { sb.HoldUntil = time.Time{} })
	b.m.journal.dirty(b)
}

// holdUntil is the end of a hold that begins now; zero when d is.
func holdUntil(d time.Duration) time.Time {
	if d == 0 {
		return time.Time{}
	}
	return time.Now().Add(d).UTC()
}
