package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	// A sandbox that has exceeded the limit of its disk starts again, so that files can be deleted.
	// In that run it may add a tenth of the limit, or this if that is more, and after each
	// further stop half as much, but no less than the least.
	diskSlack       = 64 << 20
	leastDiskSlack  = 1 << 20
	filesSlack      = 1000
	leastFilesSlack = 100
	// measureLimit bounds one measurement. A million files take 5 to 15 s.
	measureLimit = time.Minute
	// A wake waits for the measurement after a stop, and not longer than this.
	stopMeasureLimit = 20 * time.Second
	// failedMeasurementPause is the time until a sandbox that could not be measured or stopped is
	// tried again.
	failedMeasurementPause = 10 * time.Second
)

// exceeds reports whether the usage is more than a limit, whose zeros are none.
func (u DiskUsage) exceeds(limit DiskUsage) bool {
	return limit.Bytes > 0 && u.Bytes > limit.Bytes || limit.Entries > 0 && u.Entries > limit.Entries
}

func (u DiskUsage) plus(v DiskUsage) DiskUsage {
	return DiskUsage{u.Bytes + v.Bytes, u.Entries + v.Entries}
}

func (u DiskUsage) minus(v DiskUsage) DiskUsage {
	return DiskUsage{u.Bytes - v.Bytes, u.Entries - v.Entries}
}

// disk is the limit of the disk, as a usage.
func (l Limits) disk() DiskUsage { return DiskUsage{l.Disk, l.Files} }

// beginRun notes that the container has started.
func (sb *Sandbox) beginRun(limits Limits) {
	sb.StartedAt, sb.Limits = time.Now().UTC(), limits
	sb.DiskAllowance = DiskUsage{
		Bytes:   allowance(limits.Disk, sb.Disk.Bytes, sb.DiskStops, diskSlack, leastDiskSlack),
		Entries: allowance(limits.Files, sb.Disk.Entries, sb.DiskStops, filesSlack, leastFilesSlack),
	}
}

// allowance is the most that a sandbox with this usage may have in a run, after a number of stops
// because of its disk.
func allowance(limit, usage int64, stops int, slack, least int64) int64 {
	if limit == 0 || usage <= limit {
		return limit
	}
	return usage + max(max(limit/10, slack)>>min(max(stops-1, 0), 62), least)
}

// noteDisk notes a measurement.
func (b *liveSandbox) noteDisk(usage DiskUsage) {
	sb := b.view.Load()
	within := !usage.exceeds(sb.Limits.disk())
	if sb.Disk == usage && (!within || sb.DiskStops == 0 && sb.DiskAllowance == sb.Limits.disk()) {
		return
	}
	b.change(func(sb *Sandbox) {
		sb.Disk = usage
		if within {
			sb.DiskStops, sb.DiskAllowance = 0, sb.Limits.disk()
		}
	})
	b.m.journal.dirty(b)
}

// emptyDisk notes that the sandbox has a new container, whose disk is empty.
func (b *liveSandbox) emptyDisk() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk = diskState{measured: time.Now()}
	b.changeLocked(func(sb *Sandbox) { sb.Disk, sb.DiskStops = DiskUsage{}, 0 })
}

// beginDiskRun makes the next measurement due when the sandbox may have exceeded its new allowance.
func (b *liveSandbox) beginDiskRun() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if sb := b.view.Load(); b.disk.bound.exceeds(sb.DiskAllowance) {
		b.disk.bound = sb.Disk
	}
}

// measureDisk measures the disk up to a limit, 0 for none, and notes the result if it is complete.
// If the disk cannot be measured whatever the node does, it returns errUnmeasurable.
func (b *liveSandbox) measureDisk(ctx context.Context, limit DiskUsage) (usage DiskUsage, err error) {
	b.mu.Lock()
	before := b.disk.bound
	b.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, measureLimit)
	defer cancel()
	usage, err = b.m.deps.Disks.Usage(limited, b.id, int(b.pid.Load()), limit)
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	switch {
	case err == nil && usage.exceeds(limit):
	case err == nil:
		grown := b.disk.bound.minus(before) // during the measurement
		b.disk = diskState{bound: usage.plus(grown), measured: now}
	case ctx.Err() != nil:
	case errors.Is(err, ErrTooDeep), limited.Err() != nil:
		err = fmt.Errorf("%w: %w", errUnmeasurable, err)
		fallthrough
	default:
		b.disk.notBefore = now.Add(failedMeasurementPause)
	}
	return usage, err
}

// errUnmeasurable: the programs of a sandbox prevent the measurement of its disk.
var errUnmeasurable = errors.New("its disk cannot be measured")

// enforceDisk measures the disk of a running sandbox, and stops the sandbox if it exceeds its
// allowance.
func (b *liveSandbox) enforceDisk(ctx context.Context) {
	sb := b.view.Load()
	may := sb.DiskAllowance
	usage, err := b.measureDisk(ctx, may)
	switch {
	case err == nil && !usage.exceeds(may):
		b.noteDisk(usage)
		return
	case err == nil:
	case ctx.Err() != nil, errors.Is(err, ErrNoContainer):
		return
	case !errors.Is(err, errUnmeasurable) || !b.mayExceed(may):
		b.m.log.Warn("failed to measure the disk of a sandbox, trying again", "sandbox", b.id, "error", err)
		return
	}
	why := ending{reason: ReasonDiskLimit, disk: usage, diskLimit: may}
	switch {
	case err != nil:
		why.disk = DiskUsage{}
		why.detail = fmt.Sprintf("it may have more than %s, and its disk cannot be measured: %v", may, err)
	case may != sb.Limits.disk():
		why.detail = fmt.Sprintf("it had %s on its disk; the limit of size %s is %s, and this run could have %s to delete some", usage, sb.Size, sb.Limits.disk(), may)
	default:
		why.detail = fmt.Sprintf("it had %s on its disk; the limit of size %s is %s", usage, sb.Size, may)
	}
	b.stopForDisk(ctx, why)
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

// mayExceed reports whether the sandbox could have written more than a limit.
func (b *liveSandbox) mayExceed(limit DiskUsage) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.disk.bound.exceeds(limit)
}

// stopForDisk kills the sandbox, although leases are held: in the time to end by themselves its
// programs would write on.
func (b *liveSandbox) stopForDisk(ctx context.Context, why ending) {
	err := b.killForDisk(ctx, why)
	switch {
	case err == nil:
		b.m.metrics.diskStops.WithLabelValues(string(why.reason)).Inc()
		b.m.log.Warn("stopped a sandbox because of its disk", "sandbox", b.id, "reason", why.reason, "detail", why.detail)
		return
	case errors.Is(err, errNotIdle), errors.Is(err, ErrDestroyed), ctx.Err() != nil:
		return // it does not run any more
	}
	b.m.log.Error("failed to stop a sandbox because of its disk, trying again", "sandbox", b.id, "error", err)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk.notBefore = time.Now().Add(failedMeasurementPause)
}

func (b *liveSandbox) killForDisk(ctx context.Context, why ending) error {
	lockCtx, cancel := context.WithTimeout(ctx, freezeWait) // others are measured meanwhile
	defer cancel()
	if err := b.lockUsable(lockCtx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.state() != StateRunning {
		return errNotIdle
	}
	if err := b.stopLocked(ctx, modeForced, why, 0); err != nil {
		return err
	}
	b.discardDisk(ctx)
	if why.reason == ReasonDiskLimit && b.view.Load().Persist != PersistNone {
		b.noteExceeded(ctx, why.disk)
	}
	return nil
}

// noteExceeded notes how much the sandbox has, after a stop at a usage for which the counting
// stopped. The next wake waits for it, because its allowance depends on it. Needs the transition
// lock.
func (b *liveSandbox) noteExceeded(ctx context.Context, atLeast DiskUsage) {
	ctx, cancel := context.WithTimeout(ctx, stopMeasureLimit)
	defer cancel()
	usage := b.view.Load().Disk
	if atLeast != (DiskUsage{}) { // else it cannot be measured
		var err error
		if usage, err = b.measureDisk(ctx, DiskUsage{}); err != nil {
			b.m.log.Warn("failed to measure the disk of a stopped sandbox", "sandbox", b.id, "error", err)
			usage = atLeast
		}
	}
	b.change(func(sb *Sandbox) { sb.Disk, sb.DiskStops = usage, sb.DiskStops+1 })
	b.m.journal.dirty(b)
}
