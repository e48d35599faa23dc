package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"time"
)

// restorePaths replaces the paths of a partial backup on the disk. Its steps leave the disk unchanged until the last one,
// which makes a new snapshot the base of the disk: the paths, as a layer above the present disk.
func (b *liveSandbox) restorePaths(ctx context.Context, backup Backup, force bool, progress func(BackupProgress)) error {
	if err := b.retrieve(ctx); err != nil {
		return err
	}
	s, err := b.downloadPaths(ctx, backup, progress)
	if err != nil {
		return err
	}
	ran, err := b.replacePaths(ctx, backup, s, force)
	if ran { // also after an error: the disk has its files
		_, werr := b.m.Wake(ctx, b.id)
		err = cmp.Or(err, werr)
	}
	return err
}

// downloadPaths downloads a partial backup for a temporary snapshot, which replacePaths completes.
func (b *liveSandbox) downloadPaths(ctx context.Context, backup Backup, progress func(BackupProgress)) (Snapshot, error) {
	if err := b.m.checkFits(backup.Usage); err != nil {
		return Snapshot{}, err
	}
	s, err := b.m.claimSnapshot(ctx, b, SnapshotRequest{temporary: true})
	if err != nil {
		return Snapshot{}, err
	}
	s.Usage, err = b.whileSpace(ctx, progress, func(ctx context.Context, progress func(BackupProgress)) (DiskUsage, error) {
		return b.m.deps.Backups.Download(ctx, backup, s.ID, progress)
	})
	if err != nil {
		return Snapshot{}, b.downloadFailed(ctx, s, err)
	}
	return s, nil
}

// replacePaths stops the sandbox, and bases its disk on the snapshot s that downloadPaths has begun. ran reports whether
// the sandbox was running. After an error, s is deleted, and the disk is unchanged.
func (b *liveSandbox) replacePaths(ctx context.Context, backup Backup, s Snapshot, force bool) (ran bool, err error) {
	start := time.Now()
	if err := b.checkIdle(ctx, force); err != nil {
		b.m.dropSnapshot(ctx, s)
		return false, err
	}
	if err := b.lockUsable(ctx); err != nil {
		b.m.dropSnapshot(ctx, s)
		return false, err
	}
	defer b.unlockTransition()
	how := modeRequested
	if force {
		how = modeForced
	}
	running := b.state() == StateRunning
	if err := b.stopLocked(ctx, how, ending{reason: ReasonRestored}, 0); err != nil {
		b.m.dropSnapshot(ctx, s)
		return false, err
	}
	if err := b.overlay(ctx, backup, &s); err != nil {
		b.m.dropSnapshot(ctx, s)
		return running, fullDisk(err)
	}
	before := b.sandbox()
	err = b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Snapshot, sb.Rebase = s.ID, true },
		func(sb *Sandbox) { sb.Snapshot, sb.Rebase = before.Snapshot, before.Rebase })
	if err == nil || b.undone(ctx) {
		b.m.deleteTemporary(ctx, s) // the sandbox keeps its files
	}
	if err == nil {
		b.emit(Event{Type: EventRestored, Backup: backup.ID, Bytes: s.Usage.Bytes, DurationMS: milliseconds(time.Since(start))})
		b.m.collectSoon()
	}
	return running, err
}

// overlay completes the snapshot s with the disk of the stopped sandbox below the downloaded paths. Needs the transition
// lock.
func (b *liveSandbox) overlay(ctx context.Context, backup Backup, s *Snapshot) error {
	below, err := b.diskSnapshot(ctx)
	if err != nil {
		return err
	}
	if below.Temporary {
		defer b.m.deleteTemporary(ctx, below) // disks that are based on it keep its files
	}
	if err := b.m.deps.Backups.Overlay(ctx, backup, s.ID, below.ID); err != nil {
		return err
	}
	done := *s
	sb := b.sandbox()
	done.Parent, done.Depth, done.Origin = below.ID, below.Depth+1, sb.template()
	done.Progress, done.Duration = snapshotDone, Duration(time.Since(s.CreatedAt))
	if err := b.m.putSnapshot(ctx, done); err != nil {
		return err
	}
	*s = done
	return nil
}

// diskSnapshot returns a snapshot of the disk of the stopped sandbox: its base if the disk has no changes, and a new
// temporary one otherwise. The base may be temporary and deleted already. Needs the transition lock.
func (b *liveSandbox) diskSnapshot(ctx context.Context) (Snapshot, error) {
	if sb := b.sandbox(); sb.Rebase && sb.Snapshot != "" {
		base, ok := b.m.snapshots.get(sb.Snapshot)
		if !ok {
			return Snapshot{}, fmt.Errorf("snapshot %q: %w", sb.Snapshot, ErrSnapshotNotFound)
		}
		if base.Depth < maxSnapshotDepth {
			base.Temporary = false // its owner deletes it
			return base, nil
		}
	}
	start := time.Now()
	s, err := b.m.claimSnapshot(ctx, b, SnapshotRequest{temporary: true})
	if err != nil {
		return Snapshot{}, err
	}
	how, err := b.captureHeld(ctx, &s)
	if err == nil {
		err = b.publish(ctx, &s, how, start)
	}
	if err != nil {
		b.m.dropSnapshot(ctx, s)
		return Snapshot{}, err
	}
	return s, nil
}
