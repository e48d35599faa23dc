package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// A sandbox that has exceeded its disk limit can start again, so that files can be deleted. In
	// that run it may add a tenth of the limit, or this slack if it is larger. Each further stop
	// halves that, down to the minimum slack.
	diskSlack       = 64 << 20
	leastDiskSlack  = 1 << 20
	filesSlack      = 1000
	leastFilesSlack = 100
	// measureLimit is the timeout of a measurement. A million files take 5 to 15 s.
	measureLimit = time.Minute
	// A wake waits at most this long for the measurement after a stop.
	stopMeasureLimit = 20 * time.Second
	// failedMeasurementPause is the delay before the node tries again to measure or stop a sandbox
	// after a failure.
	failedMeasurementPause = 10 * time.Second
)

// exceeds reports whether the usage exceeds a limit. A zero in the limit means no limit.
func (u DiskUsage) exceeds(limit DiskUsage) bool {
	return limit.Bytes > 0 && u.Bytes > limit.Bytes || limit.Entries > 0 && u.Entries > limit.Entries
}

func (u DiskUsage) plus(v DiskUsage) DiskUsage {
	return DiskUsage{u.Bytes + v.Bytes, u.Entries + v.Entries}
}

func (u DiskUsage) minus(v DiskUsage) DiskUsage {
	return DiskUsage{u.Bytes - v.Bytes, u.Entries - v.Entries}
}

// disk returns the disk limit as a DiskUsage.
func (l Limits) disk() DiskUsage { return DiskUsage{l.Disk, l.Files} }

// beginRun notes that the container has started.
func (sb *Sandbox) beginRun(limits Limits) {
	sb.StartedAt, sb.Limits = time.Now().UTC(), limits
	sb.DiskAllowance = DiskUsage{
		Bytes:   allowance(limits.Disk, sb.Disk.Bytes, sb.DiskStops, diskSlack, leastDiskSlack),
		Entries: allowance(limits.Files, sb.Disk.Entries, sb.DiskStops, filesSlack, leastFilesSlack),
	}
}

// allowance returns the maximum usage of a sandbox in its next run, given its usage now and how often
// it was stopped because of its disk limit.
func allowance(limit, usage int64, stops int, slack, least int64) int64 {
	if limit == 0 || usage < limit || usage == limit && stops == 0 {
		return limit
	}
	return usage + max(max(limit/10, slack)>>min(max(stops-1, 0), 62), least)
}

// noteDisk records a measurement, unless the sandbox has started again or has another disk since.
func (b *liveSandbox) noteDisk(usage DiskUsage, run int) {
	if b.noteDiskOf(usage, run) {
		b.m.journal.dirty(b)
	}
}

func (b *liveSandbox) noteDiskOf(usage DiskUsage, run int) (changed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	sb := b.view.Load()
	within := !usage.exceeds(sb.Limits.disk())
	if run != b.disk.run || sb.Disk == usage && (!within || sb.DiskStops == 0 && sb.DiskAllowance == sb.Limits.disk()) {
		return false
	}
	b.changeLocked(func(sb *Sandbox) {
		sb.Disk = usage
		if within {
			sb.DiskStops, sb.DiskAllowance = 0, sb.Limits.disk()
		}
	})
	return true
}

// emptyDisk records that the disk of the sandbox is empty: its container is new, or a snapshot has its files.
func (b *liveSandbox) emptyDisk() {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.disk = diskState{run: b.disk.run + 1, measured: now, counted: now}
	b.changeLocked(func(sb *Sandbox) { sb.Disk, sb.DiskStops = DiskUsage{}, 0 })
}

// beginDiskRun schedules the next measurement for when the sandbox may exceed its new allowance.
func (b *liveSandbox) beginDiskRun() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk.run++
	if sb := b.view.Load(); b.disk.bound.exceeds(sb.DiskAllowance) {
		b.disk.bound = sb.Disk
	}
}

// measureDisk measures the disk up to a limit, 0 for none, and lowers the upper bound if the result is
// complete. It returns errUnmeasurable (wrapped) if the sandbox's programs prevent the measurement, and
// errNotIdle if the sandbox has started again or has another disk since.
func (b *liveSandbox) measureDisk(ctx context.Context, limit DiskUsage) (usage DiskUsage, run int, err error) {
	b.mu.Lock()
	before, run := b.disk.bound, b.disk.run
	b.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, measureLimit)
	defer cancel()
	usage, err = b.m.deps.Disks.Usage(limited, b.id, int(b.pid.Load()), limit)
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	switch {
	case run != b.disk.run:
		err = errNotIdle
	case err == nil && usage.exceeds(limit):
	case err == nil:
		grown := b.disk.bound.minus(before) // during the measurement
		b.disk = diskState{run: run, bound: usage.plus(grown), measured: now, counted: now, changed: grown != (DiskUsage{})}
	case ctx.Err() != nil:
	case errors.Is(err, ErrTooDeep), limited.Err() != nil:
		err = fmt.Errorf("%w: %w", errUnmeasurable, err)
		b.disk.measured = now // others are measured before the next attempt
		fallthrough
	default:
		b.disk.notBefore = now.Add(failedMeasurementPause)
	}
	return usage, run, err
}

// errUnmeasurable means that a sandbox's programs prevent the measurement of its disk.
var errUnmeasurable = errors.New("its disk cannot be measured")

// enforceDisk measures the disk of a running sandbox, and stops the sandbox if it exceeds its
// allowance. The end of calm, which is derived from ctx, interrupts the measurement but not the stop.
func (b *liveSandbox) enforceDisk(ctx, calm context.Context) {
	sb := b.view.Load()
	may := sb.DiskAllowance
	usage, run, err := b.measureDisk(calm, may)
	switch {
	case err == nil && !usage.exceeds(may):
		b.noteDisk(usage, run)
		return
	case err == nil:
	case calm.Err() != nil, errors.Is(err, ErrNoContainer), errors.Is(err, errNotIdle):
		return
	case !errors.Is(err, errUnmeasurable) || !b.mayExceed(may):
		b.m.log.Warn("failed to measure the disk of a sandbox, trying again", "sandbox", b.id, "error", err)
		return
	}
	why := ending{reason: ReasonDiskLimit, disk: usage, diskLimit: may}
	switch {
	case err != nil:
		why.disk = DiskUsage{}
		why.detail = fmt.Sprintf("the sandbox may use more than its limit of %s, and its disk cannot be measured: %v", may, err)
	case may != sb.Limits.disk():
		why.detail = fmt.Sprintf("the sandbox used %s of disk; the limit of size %s is %s, raised to %s for this run so that files can be deleted", usage, sb.Size, sb.Limits.disk(), may)
	default:
		why.detail = fmt.Sprintf("the sandbox used %s of disk; the limit of size %s is %s", usage, sb.Size, may)
	}
	b.stopForDisk(ctx, calm, run, why)
}

// remeasureDisk measures the disk of a sandbox that does not run. Its next run enforces the limits.
func (b *liveSandbox) remeasureDisk(calm context.Context) {
	usage, run, err := b.measureDisk(calm, DiskUsage{})
	switch {
	case err == nil:
		b.noteDisk(usage, run)
	case calm.Err() != nil, errors.Is(err, errNotIdle):
	case errors.Is(err, ErrNoContainer):
		b.mu.Lock()
		defer b.mu.Unlock()
		b.disk.changed = false // until its next run
	default:
		b.m.log.Warn("failed to measure the disk of a sandbox, trying again", "sandbox", b.id, "error", err)
	}
}

// String describes a usage, or a limit.
func (u DiskUsage) String() string {
	switch {
	case u.Entries == 0:
		return bytesText(u.Bytes)
	case u.Bytes == 0:
		return fmt.Sprintf("%d files", u.Entries)
	}
	return fmt.Sprintf("%s in %d files", bytesText(u.Bytes), u.Entries)
}

// mayExceed reports whether the upper bound of the sandbox's usage exceeds the limit.
func (b *liveSandbox) mayExceed(limit DiskUsage) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.disk.bound.exceeds(limit)
}

// stopForDisk kills the sandbox even if leases are held. It does not allow a grace period, in which
// the sandbox's programs would continue to write. run is of the measurement that is the reason. It
// reports whether it stopped the sandbox.
func (b *liveSandbox) stopForDisk(ctx, calm context.Context, run int, why ending) (stopped bool) {
	err := b.killForDisk(ctx, calm, run, why)
	switch {
	case err == nil:
		b.m.metrics.diskStops.WithLabelValues(string(why.reason)).Inc()
		b.m.log.Warn("sandbox stopped because of its disk usage", "sandbox", b.id, "reason", why.reason, "detail", why.detail)
		return true
	case errors.Is(err, errNotIdle), errors.Is(err, ErrDestroyed), ctx.Err() != nil:
		return false // that run of the sandbox has ended, or the node ends
	}
	b.m.log.Error("failed to stop a sandbox because of its disk, trying again", "sandbox", b.id, "error", err)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk.notBefore = time.Now().Add(failedMeasurementPause)
	return false
}

func (b *liveSandbox) killForDisk(ctx, calm context.Context, run int, why ending) error {
	lockCtx, cancel := context.WithTimeout(ctx, freezeWait) // do not delay the measurement of other sandboxes
	defer cancel()
	if err := b.lockUsable(lockCtx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.state() != StateRunning || b.diskRun() != run {
		return errNotIdle
	}
	if err := b.stopLocked(ctx, modeForced, why, 0); err != nil {
		return err
	}
	b.discardDisk(ctx)
	if why.reason == ReasonDiskLimit && b.view.Load().Persist != PersistNone {
		b.noteExceeded(calm, why.disk, why.diskLimit)
	}
	return nil
}

func (b *liveSandbox) diskRun() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.disk.run
}

// noteExceeded measures and records the full usage of a stopped sandbox: the measurement that stopped
// it ended at the limit. The next wake waits for it, because the allowance depends on the usage. The
// caller must hold the transition lock. A sandbox whose disk cannot be measured counts as having used
// its allowance: otherwise each start would give it that again.
func (b *liveSandbox) noteExceeded(ctx context.Context, atLeast, allowed DiskUsage) {
	ctx, cancel := context.WithTimeout(ctx, stopMeasureLimit)
	defer cancel()
	known := b.view.Load().Disk
	usage := DiskUsage{max(known.Bytes, allowed.Bytes), max(known.Entries, allowed.Entries)}
	if atLeast != (DiskUsage{}) { // otherwise the disk cannot be measured
		var err error
		if usage, _, err = b.measureDisk(ctx, DiskUsage{}); err != nil {
			b.m.log.Warn("failed to measure the disk of a stopped sandbox", "sandbox", b.id, "error", err)
			usage = atLeast
		}
	}
	b.change(func(sb *Sandbox) { sb.Disk, sb.DiskStops = usage, sb.DiskStops+1 })
	b.m.journal.dirty(b)
}
