package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Archive moves the disk of a sandbox to the object store, frees the space on the node, and returns the sandbox in
// StateArchived. Its next wake downloads the disk. A sandbox that runs or is asleep is stopped first: while a lease
// is held, Archive returns ErrBusy unless force is true. An archived sandbox stays as it is. When ctx ends first, the
// archival goes on. progress is as for Backup.
//
// Errors: the errors of Backup and Stop. Then the sandbox is stopped at most, and its disk is on the node. It is not
// stopped if the object store fails at the beginning. If it is woken during the upload, Archive returns ErrBusy.
func (m *Manager) Archive(ctx context.Context, id ID, force bool, progress func(BackupProgress)) (Sandbox, error) {
	if m.deps.Backups == nil {
		return Sandbox{}, ErrNoObjectStore
	}
	how, reason := modeRequested, ReasonRequested
	if force {
		how, reason = modeForced, ReasonForced
	}
	progress, detach := detachable(progress)
	defer detach()
	return m.on(id, func(b *liveSandbox) error {
		if err := b.awaitSpares(ctx, how); err != nil {
			return err
		}
		return m.do(ctx, func(ctx context.Context) error {
			if state := b.state(); state != StateArchived {
				if state != StateStopped { // an object store that fails is to stop no programs
					if _, err := m.deps.Backups.List(ctx, b.view.Load().Owner); err != nil {
						return err
					}
				}
				if err := b.stop(ctx, how, ending{reason: reason}); err != nil {
					return err
				}
			}
			return b.archive(ctx, reason, progress)
		})
	})
}

// archive moves the disk of a stopped sandbox to the object store.
func (b *liveSandbox) archive(ctx context.Context, reason StateReason, progress func(BackupProgress)) error {
	if !b.backingUp.CompareAndSwap(false, true) {
		return fmt.Errorf("a backup of %s is in progress: %w", b, ErrBusy)
	}
	defer b.backingUp.Store(false)
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	before := b.sandbox()
	switch before.State {
	case StateArchived:
		return nil
	case StateStopped:
	default:
		return fmt.Errorf("sandbox %s is %s: %w", b, before.State, ErrBusy)
	}
	id := BackupID(NewID())
	// Before the upload: if the node dies, its next start deletes the backup.
	err := b.changeSaved(ctx, func(sb *Sandbox) { sb.addStale(id) }, func(sb *Sandbox) { sb.removeStale(id) })
	if err != nil {
		return err
	}
	backup, disk, err := b.backUp(ctx, id, BackupSelection{}, progress)
	if err == nil {
		err = b.enterArchived(ctx, before, backup, disk, reason)
	}
	if err != nil {
		if b.undone(ctx) {
			b.deleteArchive(id)
		}
		b.emit(Event{Type: EventBackupFailed, Error: err.Error()})
	}
	return err
}

// enterArchived archives a stopped sandbox whose backup is of the snapshot disk, unless the sandbox has been used since
// it was as in before.
func (b *liveSandbox) enterArchived(ctx context.Context, before Sandbox, backup Backup, disk SnapshotID, reason StateReason) error {
	if err := b.lockUsable(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	now := b.sandbox()
	moved := now.Rebase && now.Snapshot == disk
	copied := !now.Rebase && now.Snapshot == before.Snapshot
	if now.State != StateStopped || !now.StateSince.Equal(before.StateSince) || b.leftover.Load() || !moved && !copied {
		return fmt.Errorf("sandbox %s has been used: %w", b, ErrBusy)
	}
	archived := backup
	archived.Origin = Sandbox{Image: backup.Origin.Image, ImageRef: backup.Origin.ImageRef} // the rest is in this record
	err := b.changeSaved(ctx,
		func(sb *Sandbox) {
			sb.State, sb.StateReason, sb.StateSince = StateArchived, reason, time.Now().UTC()
			sb.Archived, sb.Snapshot, sb.Rebase = &archived, "", true
			sb.removeStale(backup.ID)
		},
		func(sb *Sandbox) {
			sb.State, sb.StateReason, sb.StateSince = now.State, now.StateReason, now.StateSince
			sb.Archived, sb.Snapshot, sb.Rebase = nil, now.Snapshot, now.Rebase
			sb.addStale(backup.ID)
		})
	if err != nil {
		return err
	}
	b.emit(Event{Type: EventArchived, Reason: reason, Backup: backup.ID, Bytes: backup.Usage.Bytes, Stored: backup.Stored, DurationMS: milliseconds(time.Duration(backup.Duration))})
	b.removeContainer(ctx)
	b.emptyDisk()
	b.arm() // it may expire
	b.m.collectSoon()
	return nil
}

// undone reports whether the store has the present record after a change that failed. Otherwise the store may have the
// changed record, whose snapshot or backup must stay: a snapshot until it expires.
func (b *liveSandbox) undone(ctx context.Context) bool {
	return b.save(context.WithoutCancel(ctx)) == nil
}

// removeContainer removes the container of an archived sandbox. After a failure, the next start of the node removes
// it. Needs the transition lock.
func (b *liveSandbox) removeContainer(ctx context.Context) {
	err := b.m.deps.Disks.Discard(ctx, b.id)
	if err == nil || errors.Is(err, ErrNoContainer) {
		err = b.m.deps.Engine.Remove(ctx, b.id)
	}
	if err != nil {
		b.m.log.Warn("failed to remove the container of an archived sandbox; the next start of the node removes it", "sandbox", b.id, "error", err)
	}
}

func (sb *Sandbox) addStale(id BackupID) {
	sb.StaleArchives = append(slices.Clone(sb.StaleArchives), id)
}

func (sb *Sandbox) removeStale(id BackupID) {
	sb.StaleArchives = slices.DeleteFunc(slices.Clone(sb.StaleArchives), func(other BackupID) bool { return other == id })
}

// deleteArchive deletes one of the sandbox's StaleArchives in the background. After a failure, the next start of the node
// tries again.
func (b *liveSandbox) deleteArchive(id BackupID) {
	b.m.spawn(func(ctx context.Context) {
		if err := b.m.deps.Backups.Delete(ctx, []BackupID{id}); err != nil {
			b.m.log.Warn("failed to delete the backup of an archive that is not needed any more", "sandbox", b.id, "backup", id, "error", err)
			return
		}
		b.change(func(sb *Sandbox) { sb.removeStale(id) })
		b.m.journal.dirty(b)
	})
}

// archives returns the backups that are only of use to the sandbox; none if the node has no object store.
func (b *liveSandbox) archives() []BackupID {
	sb := b.view.Load()
	if b.m.deps.Backups == nil {
		return nil
	}
	archives := slices.Clone(sb.StaleArchives)
	if sb.Archived != nil {
		archives = append(archives, sb.Archived.ID)
	}
	return archives
}

// deleteArchivesLater deletes, in the background, the archives of a destroyed sandbox and then its record, which is the only
// reference to them. After a failure it tries again, also after the next start of the node.
func (b *liveSandbox) deleteArchivesLater(archives []BackupID) {
	try := func(ctx context.Context) error {
		if err := b.m.deps.Backups.Delete(ctx, archives); err != nil {
			return err
		}
		return b.removeRecord(ctx)
	}
	b.m.spawn(func(ctx context.Context) {
		if err := try(ctx); err != nil {
			b.m.retry(OperationDeleteArchive, b.id, err, try)
		}
	})
}

// deleteStaleArchives deletes, at start, the backups of archives that the last run of the node did not finish or delete.
func (m *Manager) deleteStaleArchives(sandboxes map[ID]*liveSandbox) {
	for _, b := range sandboxes {
		for _, id := range b.view.Load().StaleArchives {
			switch {
			case m.deps.Restored: // it may have become the sandbox's disk since
				b.change(func(sb *Sandbox) { sb.removeStale(id) })
				m.journal.dirty(b)
			case m.deps.Backups != nil && !b.toRemove():
				b.deleteArchive(id)
			}
		}
	}
}

// archives reports whether the disk of an archived sandbox is in the backup only.
func (m *Manager) archives(id BackupID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, b := range m.sandboxes {
		if archived := b.view.Load().Archived; archived != nil && archived.ID == id {
			return true
		}
	}
	return false
}

// retrieval is the download of an archived disk, shared by its callers.
type retrieval struct {
	end  context.CancelCauseFunc
	done chan struct{}
	err  error // valid once done is closed
}

// retrieve downloads the disk of an archived sandbox, which is stopped then; it does nothing in other states. Callers
// share one download, which goes on when ctx ends.
func (b *liveSandbox) retrieve(ctx context.Context) error {
	b.mu.Lock()
	r := b.retrieval
	switch {
	case r != nil:
	case b.gone || b.view.Load().State != StateArchived:
		b.mu.Unlock()
		return nil
	default:
		r = &retrieval{done: make(chan struct{})}
		var running context.Context
		running, r.end = context.WithCancelCause(b.m.ctx)
		started := b.m.spawn(func(context.Context) {
			defer r.end(nil)
			err := b.unarchive(running)
			b.mu.Lock()
			defer b.mu.Unlock()
			b.retrieval, r.err = nil, err
			close(r.done)
		})
		if !started {
			r.end(nil)
			b.mu.Unlock()
			return ErrClosed
		}
		b.retrieval = r
	}
	b.mu.Unlock()
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("the disk of %s is being downloaded from the object store: %w", b, ctx.Err())
	}
}

// unarchive downloads the disk of an archived sandbox, and makes it a stopped one.
func (b *liveSandbox) unarchive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, backupTimeout)
	defer cancel()
	start := time.Now()
	before := b.sandbox()
	if before.Archived == nil {
		return nil
	}
	if b.m.deps.Backups == nil {
		return ErrNoObjectStore
	}
	s, err := b.download(ctx, *before.Archived, false, func(BackupProgress) {})
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, ErrDestroyed) {
			return fmt.Errorf("sandbox %s: %w", b, cause)
		}
		return err
	}
	if err := b.lockUsable(ctx); err != nil {
		b.m.deleteTemporary(ctx, s)
		return err
	}
	defer b.unlockTransition()
	now := b.sandbox()
	if now.State != StateArchived || now.Archived == nil || now.Archived.ID != before.Archived.ID {
		b.m.deleteTemporary(ctx, s)
		return nil // its disk has been replaced meanwhile
	}
	err = b.changeSaved(ctx,
		func(sb *Sandbox) {
			sb.State, sb.StateReason, sb.StateSince = StateStopped, ReasonRetrieved, time.Now().UTC()
			sb.Archived, sb.Snapshot, sb.Rebase = nil, s.ID, true
			sb.addStale(before.Archived.ID)
		},
		func(sb *Sandbox) {
			sb.State, sb.StateReason, sb.StateSince = now.State, now.StateReason, now.StateSince
			sb.Archived, sb.Snapshot, sb.Rebase = now.Archived, now.Snapshot, now.Rebase
			sb.removeStale(before.Archived.ID)
		})
	if err != nil {
		if b.undone(ctx) {
			b.m.deleteTemporary(ctx, s)
		}
		return err
	}
	b.m.deleteTemporary(ctx, s) // the sandbox keeps its files
	b.emit(Event{Type: EventRetrieved, Backup: before.Archived.ID, Bytes: before.Archived.Usage.Bytes, DurationMS: milliseconds(time.Since(start))})
	b.deleteArchive(before.Archived.ID)
	b.arm()
	return nil
}

// archiveIn is how long a stopped sandbox has until archive_after; 0 or less means now.
func (b *liveSandbox) archiveIn() (d time.Duration, due bool) {
	sb := b.view.Load()
	if sb.ArchiveAfter == 0 || b.m.deps.Backups == nil || sb.State != StateStopped || b.backingUp.Load() {
		return 0, false
	}
	return time.Until(sb.StateSince.Add(time.Duration(sb.ArchiveAfter))), true
}
