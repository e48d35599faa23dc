package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// A pathsSource is a partial backup or a partial snapshot to restore.
type pathsSource struct {
	paths []string
	usage DiskUsage
	kind  string // "backup" or "snapshot"
	event Event  // the beginning of the event of the restore
	// fetch prepares the files for Disks.Overlay to create a snapshot.
	fetch func(context.Context, SnapshotID) (DiskUsage, error)
}

// pathsOfBackup returns a partial backup as the source of a restore.
func (b *liveSandbox) pathsOfBackup(backup Backup, progress func(BackupProgress)) pathsSource {
	return pathsSource{
		paths: backup.Paths, usage: backup.Usage, kind: "backup", event: Event{Backup: backup.ID},
		fetch: func(ctx context.Context, to SnapshotID) (DiskUsage, error) {
			return b.whileSpace(ctx, progress, func(ctx context.Context, progress func(BackupProgress)) (DiskUsage, error) {
				return b.m.deps.Backups.Download(ctx, backup, to, progress)
			})
		},
	}
}

// restorePartial replaces the paths of a partial snapshot on the disk.
func (b *liveSandbox) restorePartial(ctx context.Context, of Snapshot, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout) // an archived disk is downloaded
	defer cancel()
	s, err := b.m.pinSnapshot(of.Owner, of.ID)
	if err != nil {
		return err
	}
	defer b.m.unpinSnapshot(s.ID)
	if err := b.checkIdle(ctx, force); err != nil { // before the copy
		return err
	}
	return b.restorePaths(ctx, pathsSource{
		paths: s.Paths, usage: s.Usage, kind: "snapshot", event: Event{Snapshot: s.ID},
		fetch: func(ctx context.Context, to SnapshotID) (DiskUsage, error) { return b.stage(ctx, s.ID, to) },
	}, force)
}

// spaceCheck is how often the node checks its free space during the copy of a partial snapshot, which has no progress.
const spaceCheck = 250 * time.Millisecond

// stage copies the files of a partial snapshot. It stops when the node gets short of space.
func (b *liveSandbox) stage(ctx context.Context, from, to SnapshotID) (DiskUsage, error) {
	ignore := func(BackupProgress) {}
	return b.whileSpace(ctx, ignore, func(ctx context.Context, check func(BackupProgress)) (DiskUsage, error) {
		ended := make(chan struct{})
		var checks sync.WaitGroup
		checks.Go(func() {
			every := time.NewTicker(spaceCheck)
			defer every.Stop()
			for {
				select {
				case <-ended:
					return
				case <-every.C:
					check(BackupProgress{})
				}
			}
		})
		defer checks.Wait()
		defer close(ended)
		return b.m.deps.Disks.Stage(ctx, from, to)
	})
}

// restorePaths replaces the paths of a partial backup or snapshot on the disk. Its steps leave the disk unchanged until
// the last one, which makes a new snapshot the base of the disk: the paths, as a layer above the present disk.
func (b *liveSandbox) restorePaths(ctx context.Context, from pathsSource, force bool) error {
	if err := b.retrieve(ctx); err != nil {
		return err
	}
	s, err := b.fetchPaths(ctx, from)
	if err != nil {
		return err
	}
	ran, err := b.replacePaths(ctx, from, s, force)
	if ran { // also after an error: the disk has its files
		_, werr := b.m.Wake(ctx, b.id)
		err = cmp.Or(err, werr)
	}
	return err
}

// fetchPaths begins a temporary snapshot with the files of a source, which replacePaths completes.
func (b *liveSandbox) fetchPaths(ctx context.Context, from pathsSource) (Snapshot, error) {
	if err := b.m.checkFits(from.kind, from.usage); err != nil {
		return Snapshot{}, err
	}
	s, err := b.m.claimSnapshot(ctx, b, SnapshotRequest{temporary: true})
	if err != nil {
		return Snapshot{}, err
	}
	if s.Usage, err = from.fetch(ctx, s.ID); err != nil {
		return Snapshot{}, b.downloadFailed(ctx, s, err)
	}
	return s, nil
}

// replacePaths stops the sandbox, and bases its disk on the snapshot s that fetchPaths has begun. ran reports whether
// the sandbox was running. After an error, s is deleted, and the disk is unchanged.
func (b *liveSandbox) replacePaths(ctx context.Context, from pathsSource, s Snapshot, force bool) (ran bool, err error) {
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
	if err := b.overlay(ctx, from, &s); err != nil {
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
		ev := from.event
		ev.Type, ev.Bytes, ev.DurationMS = EventRestored, s.Usage.Bytes, milliseconds(time.Since(start))
		b.emit(ev)
		b.m.collectSoon()
	}
	return running, err
}

// overlay completes the snapshot s with the disk of the stopped sandbox below the fetched paths. Needs the transition
// lock.
func (b *liveSandbox) overlay(ctx context.Context, from pathsSource, s *Snapshot) error {
	below, err := b.diskSnapshot(ctx)
	if err != nil {
		return err
	}
	if below.Temporary {
		defer b.m.deleteTemporary(ctx, below) // disks that are based on it keep its files
	}
	err = b.m.deps.Disks.Overlay(ctx, s.ID, below.ID, from.paths)
	if errors.Is(err, ErrNotFolder) {
		return &InvalidError{Field: from.kind + "_id", Reason: fmt.Sprintf("a folder of the %s is another kind of entry in the sandbox: %s", from.kind, err),
			Want: "remove or rename that entry, or restore into another sandbox"}
	}
	if err != nil {
		return fmt.Errorf("restore the paths of a %s: %w", from.kind, err)
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
