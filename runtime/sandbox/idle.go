package sandbox

import (
	"context"
	"errors"
	"time"
)

// cpuSample is the CPU time of a sandbox at a moment.
type cpuSample struct {
	at   time.Time
	used time.Duration
}

const (
	// Reading the CPU time costs about 20 µs. Four checks in the idle time
	// find work that happens in bursts; at most every minCheck and at least
	// every maxCheck.
	checksPerIdle = 4
	minCheck      = 250 * time.Millisecond
	maxCheck      = 15 * time.Second
	// retryBase is the pause after a failed sleep, stop or attachment. It doubles with
	// each failure in a row, up to retryMax: requests wait during an attempted freeze.
	retryBase = 5 * time.Second
)

// retryIn is the pause after the last failure.
func (b *liveSandbox) retryIn() time.Duration {
	return min(retryBase<<min(max(b.failures.Load()-1, 0), 10), retryMax)
}

// idleIn is how long the sandbox must stay unused until it sleeps; 0 or less means now.
func (b *liveSandbox) idleIn() time.Duration {
	sb := b.view.Load()
	if sb.SleepAfter == 0 {
		return maxCheck
	}
	if b.leases() > 0 || b.startUp.Load() != nil {
		return time.Duration(sb.SleepAfter)
	}
	left := time.Until(time.Unix(0, b.lastActive.Load()).Add(time.Duration(sb.SleepAfter)))
	if left > time.Duration(sb.SleepAfter) { // the clock was set back
		b.touch()
	}
	return max(left, time.Until(sb.HoldUntil))
}

// nextCheck is when runCheck has something to do in the sandbox's present state: it may be
// idle, asleep for reclaim_after or stop_after, stopped while its container runs on, detached
// from the Uplink, without a bucket, or expired. If ok is false it needs no check.
func (b *liveSandbox) nextCheck() (d time.Duration, ok bool) {
	d, ok = b.nextCheckOfState()
	if again := b.retryIn(); (b.cutOff.Load() || b.lacksMounts()) && (!ok || d > again) {
		d, ok = again, true
	}
	if left, expires := b.expiresIn(); expires {
		left = min(max(left, 0), maxExpiryTimer)
		if !ok || left < d {
			return left, true
		}
	}
	return d, ok
}

func (b *liveSandbox) nextCheckOfState() (d time.Duration, ok bool) {
	sb := b.view.Load()
	switch {
	case sb.State == StateRunning:
		every := maxCheck
		if sb.SleepAfter != 0 {
			every = min(max(time.Duration(sb.SleepAfter)/checksPerIdle, minCheck), maxCheck)
		}
		if left := b.idleIn(); left > 0 {
			return min(every, left), true
		}
		return minCheck, true
	case sb.State == StateAsleep:
		d, ok = b.reclaimIn()
		if left := b.stopIn(); sb.StopAfter != 0 && (!ok || left < d) {
			d, ok = left, true
		}
		return max(d, 0), ok
	case sb.State == StateStopped && b.leftover.Load():
		return b.retryIn(), true
	case sb.State == StateStopped:
		if left, due := b.archiveIn(); due {
			return max(left, minCheck), true
		}
	}
	return 0, false
}

// runCheck is called by the timer. It is not bound to a state, so that a timer that was set
// just before the state changed does what the new state needs.
func (b *liveSandbox) runCheck(ctx context.Context) {
	err := b.doDue(ctx, b.state())
	switch {
	case err == nil, errors.Is(err, errNotIdle), errors.Is(err, ErrBusy):
		if !b.leftover.Load() && !b.cutOff.Load() && !b.lacksMounts() {
			b.failures.Store(0)
		}
		b.arm()
	case !errors.Is(err, ErrDestroyed) && ctx.Err() == nil:
		b.m.log.Error("failed to run the periodic check, trying again", "sandbox", b.id, "state", b.state(), "error", err)
		b.failures.Add(1)
		b.armIn(b.retryIn())
	}
}

// doDue performs the due work of a state. If the sandbox has left that state by the time
// that it has the transition lock, it does nothing.
func (b *liveSandbox) doDue(ctx context.Context, state State) error {
	if b.expired() {
		return b.expire(ctx)
	}
	if b.cutOff.Load() {
		if err := b.lockedIf(ctx, b.cutOff.Load, func() { b.noteAttached(b.attach(ctx)) }); err != nil {
			return err
		}
	}
	if b.lacksMounts() {
		if err := b.lockedIf(ctx, b.lacksMounts, func() { b.noteRemounted(b.remount(ctx)) }); err != nil {
			return err
		}
	}
	switch state {
	case StateRunning:
		if b.trustsOthers() {
			runs := func() bool { return b.state() == StateRunning }
			if err := b.lockedIf(ctx, runs, func() { b.trustUplink(ctx) }); err != nil {
				return err
			}
		}
		// The first sample alone does not show whether it works.
		if first := b.noteCPU(ctx); !first && b.idleIn() <= 0 {
			return b.sleep(ctx, modeIdle, ReasonIdle)
		}
	case StateAsleep:
		if left, due := b.reclaimIn(); due && left <= 0 {
			b.m.reclaimLater(b)
		}
		return b.stop(ctx, modeIdle, ending{reason: ReasonStopAfter})
	case StateStopped:
		left := func() bool { return b.state() == StateStopped && b.leftover.Load() }
		if err := b.lockedIf(ctx, left, func() { b.kill(ctx, 0) }); err != nil {
			return err
		}
		if left, due := b.archiveIn(); due && left <= 0 {
			return b.archive(ctx, ReasonArchiveAfter, func(BackupProgress) {})
		}
	}
	return nil
}

// noteCPU counts the sandbox as used if it used the CPU since the last sample. It reports
// whether this sample was the first since it began to run.
func (b *liveSandbox) noteCPU(ctx context.Context) (first bool) {
	used, err := b.m.deps.Freezer.CPUTime(ctx, b.id)
	if err != nil {
		b.m.log.Warn("failed to read the CPU time of a sandbox", "sandbox", b.id, "error", err)
		return false
	}
	now := time.Now()
	b.mu.Lock()
	before := b.cpu
	b.cpu = cpuSample{at: now, used: used}
	b.mu.Unlock()
	if before.at.IsZero() {
		return true
	}
	if float64(used-before.used) > b.m.config().IdleCPU*float64(now.Sub(before.at)) {
		b.touch()
	}
	return false
}

// stopIn is how long a sleeping sandbox has until stop_after; 0 or less means now.
func (b *liveSandbox) stopIn() time.Duration {
	sb := b.view.Load()
	if sb.StopAfter == 0 {
		return maxCheck
	}
	return time.Until(sb.StateSince.Add(time.Duration(sb.StopAfter)))
}

// arm sets the sandbox's one timer for its next check.
func (b *liveSandbox) arm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Read under mu, which guards the view, so that the last of several concurrent calls
	// sees the newest state.
	d, ok := b.nextCheck()
	b.armLocked(d, ok)
}

// armWoken is arm for a sandbox that has just begun to run.
func (b *liveSandbox) armWoken() {
	b.mu.Lock()
	b.cpu = cpuSample{}
	b.mu.Unlock()
	b.arm()
}

// armIn sets the timer for a check d from now in any state.
func (b *liveSandbox) armIn(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armLocked(d, true)
}

func (b *liveSandbox) armLocked(d time.Duration, ok bool) {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
	if ok && !b.gone {
		b.timer = time.AfterFunc(d, func() { b.m.spawn(b.runCheck) })
	}
}

func (b *liveSandbox) disarm() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armLocked(0, false)
}
