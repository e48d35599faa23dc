package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// dropSnapshot removes what a failed snapshot has left, or lets collect do it later. One that
// may have the files of its sandbox stays; the next start of the sandbox or of the node completes it.
func (m *Manager) dropSnapshot(ctx context.Context, s Snapshot) {
	ctx = context.WithoutCancel(ctx)
	if s.Progress == snapshotMoving {
		m.log.Error("failed to complete a snapshot, which may have the files of its sandbox; the next start of the sandbox or of the node does", "snapshot", s.ID, "sandbox", s.Sandbox)
		return
	}
	s.Progress = snapshotDeleted
	err := m.putSnapshot(ctx, s)
	if errors.Is(err, ErrStoreFull) {
		// The store accepts the deletion of the record even so. Until then the record is of an incomplete snapshot, which a
		// start of the node drops, too.
		m.snapshots.show(s)
	} else if err != nil {
		m.log.Warn("failed to drop an incomplete snapshot, the next start of the node does", "snapshot", s.ID, "error", err)
		return
	}
	m.collect(ctx)
}

// collectSoon removes deleted snapshots in the background.
func (m *Manager) collectSoon() { m.spawn(m.collect) }

// collectAfterwards is collectSoon when the present change of state has ended, because a start must not wait for locks of
// Podman's storage.
func (b *liveSandbox) collectAfterwards() {
	b.m.spawn(func(ctx context.Context) {
		if b.lockTransition(ctx) != nil { // the node stops
			return
		}
		b.unlockTransition()
		b.m.collect(ctx)
	})
}

// collect removes the files of deleted snapshots that no disk is based on. If other
// snapshots are based on it, Podman's storage retains its files until the last of these is removed.
func (m *Manager) collect(ctx context.Context) {
	m.snapshots.collecting.Lock()
	defer m.snapshots.collecting.Unlock()
	unused := m.unusedSnapshots()
	children := m.snapshots.children()
	for _, s := range unused {
		if ctx.Err() != nil {
			return
		}
		err := m.deps.Disks.Delete(ctx, s.ID)
		if errors.Is(err, ErrSnapshotInUse) {
			continue
		}
		if err == nil {
			err = m.forgetSnapshot(ctx, s, children)
		}
		if err != nil {
			m.log.Warn("failed to remove the files of a deleted snapshot, trying again later", "snapshot", s.ID, "error", err)
		}
	}
	m.forgetLayers(ctx, children)
}

// forgetSnapshot removes the record of a snapshot that Disks does not have any more. If others are based
// on it, the record becomes a layer.
func (m *Manager) forgetSnapshot(ctx context.Context, s Snapshot, children map[SnapshotID]int) error {
	if children[s.ID] > 0 && m.layers() < maxLayers {
		return m.putSnapshot(ctx, Snapshot{ID: s.ID, Owner: s.Owner, Sandbox: s.Sandbox, Parent: s.Parent, Depth: s.Depth, CreatedAt: s.CreatedAt, Usage: s.Usage, Progress: snapshotLayer})
	}
	if err := m.deps.Store.DeleteSnapshot(ctx, s.ID); err != nil {
		return err
	}
	m.snapshots.forget(s.ID)
	children[s.Parent]--
	return nil
}

func (m *Manager) layers() int {
	m.snapshots.mu.Lock()
	defer m.snapshots.mu.Unlock()
	return m.snapshots.countOf(snapshotLayer)
}

// forgetLayers removes the records of layers that no snapshot is based on any more.
func (m *Manager) forgetLayers(ctx context.Context, children map[SnapshotID]int) {
	layers := m.snapshots.where(func(s Snapshot) bool { return s.Progress == snapshotLayer })
	slices.SortFunc(layers, newestFirst) // a layer can be based on an older one
	for _, s := range layers {
		if children[s.ID] > 0 {
			continue
		}
		if err := m.forgetSnapshot(ctx, s, children); err != nil {
			m.log.Warn("failed to remove the record of a deleted snapshot, trying again later", "snapshot", s.ID, "error", err)
			return
		}
	}
}

// unusedSnapshots returns the deleted snapshots that no disk is based on and that no export reads,
// newest first, because a snapshot can be based on an older one. No new disk can be based on them.
func (m *Manager) unusedSnapshots() []Snapshot {
	m.snapshots.changing.Lock()
	defer m.snapshots.changing.Unlock()
	deleted := m.snapshots.where(func(s Snapshot) bool { return s.Progress == snapshotDeleted && m.snapshots.pins[s.ID] == 0 })
	unused := slices.DeleteFunc(deleted, func(s Snapshot) bool { return m.bases(s.ID) })
	slices.SortFunc(unused, newestFirst)
	return unused
}

// bases reports whether the disk of a sandbox begins as the snapshot, also when its container
// has not been created from it yet.
func (m *Manager) bases(id SnapshotID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, b := range m.sandboxes {
		if b.view.Load().Snapshot == id {
			return true
		}
	}
	return false
}

// prune deletes all but the newest keep of the sandbox's snapshots without a name that have these paths; 0 deletes none.
func (m *Manager) prune(ctx context.Context, id ID, paths []string, keep int) {
	if keep == 0 {
		return
	}
	old := m.snapshots.where(func(s Snapshot) bool {
		return s.Sandbox == id && s.Name == "" && s.Progress == snapshotDone && !s.Temporary && samePaths(s.Paths, paths)
	})
	slices.SortFunc(old, newestFirst)
	m.expireSnapshots(ctx, old[min(keep, len(old)):])
}

func (m *Manager) expireSnapshots(ctx context.Context, list []Snapshot) {
	for _, s := range list {
		if err := m.deleteSnapshotFor(ctx, s.Owner, s.ID, ReasonRetention); err != nil && !errors.Is(err, ErrSnapshotNotFound) {
			m.log.Warn("failed to delete an old snapshot", "snapshot", s.ID, "error", err)
		}
	}
}

// maintainSnapshots deletes snapshots that have reached their age, and retries what deleteTemporary and collect could not
// remove, until ctx ends. The Manager owns its goroutine.
func (m *Manager) maintainSnapshots(ctx context.Context) {
	for {
		now := time.Now()
		m.expireSnapshots(ctx, m.snapshots.where(func(s Snapshot) bool {
			return s.Progress == snapshotDone && !s.ExpiresAt.IsZero() && now.After(s.ExpiresAt)
		}))
		for _, s := range m.snapshots.where(func(s Snapshot) bool {
			_, unwanted := m.snapshots.unwanted[s.ID]
			return unwanted
		}) {
			m.deleteTemporary(ctx, s)
		}
		m.collect(ctx)
		if pause(ctx, m.config().SnapshotInterval) != nil {
			return
		}
	}
}

// measureSnapshot completes the record of a snapshot whose files were not counted.
func (m *Manager) measureSnapshot(ctx context.Context, id SnapshotID) {
	usage, err := m.deps.Disks.Measure(ctx, "", id)
	if _, known := m.snapshots.get(id); !known {
		return
	}
	if err != nil {
		m.log.Warn("failed to measure a snapshot", "snapshot", id, "error", err)
		return
	}
	m.snapshots.collecting.Lock() // prevents removal of its record
	defer m.snapshots.collecting.Unlock()
	m.snapshots.changing.Lock() // prevents changes of its record
	defer m.snapshots.changing.Unlock()
	s, ok := m.snapshots.get(id)
	if !ok || s.Progress == snapshotCopying || s.Progress == snapshotMoving {
		return
	}
	s.Usage = usage
	if err := m.putSnapshot(ctx, s); err != nil {
		m.log.Warn("failed to write the usage of a snapshot", "snapshot", id, "error", err)
	}
}

// preserveNewerDisks forgets, in a restored, older copy of the store, that disks are to be
// discarded: that may have happened since, and then they have newer files. An empty one is what
// a move has left.
func (m *Manager) preserveNewerDisks(ctx context.Context, sandboxes map[ID]*liveSandbox) error {
	for id, b := range sandboxes {
		if !m.deps.Restored || !b.view.Load().Rebase {
			continue
		}
		usage, err := m.deps.Disks.Measure(ctx, id, "")
		if err != nil && !errors.Is(err, ErrNoContainer) {
			return err
		}
		if err == nil && b.state() == StateArchived {
			b.change(func(sb *Sandbox) {
				sb.State, sb.StateReason, sb.StateSince = StateStopped, ReasonRecovered, time.Now().UTC()
				sb.Archived, sb.Rebase = nil, false
			})
			m.journal.dirty(b)
			m.log.Warn("kept the disk of a sandbox that was archived: the data of the node is older", "sandbox", id)
			continue
		}
		if usage.Entries > 1 {
			b.change(func(sb *Sandbox) { sb.Rebase = false })
			m.journal.dirty(b)
			m.log.Warn("kept the disk of a sandbox that was to be restored from a snapshot: the data of the node is older", "sandbox", id)
		}
	}
	return nil
}

// abandonForks marks the forks as destroyed, at start, that the end of the node's last run interrupted. Their temporary snapshot
// is deleted before they are acknowledged. In a restored, older copy of the store, it may have been since.
func (m *Manager) abandonForks(ctx context.Context, sandboxes map[ID]*liveSandbox) error {
	for id, b := range sandboxes {
		s, ok := m.snapshots.byID[b.view.Load().CreatedFrom]
		if !ok || !s.Temporary || s.Progress != snapshotDone || m.deps.Restored {
			continue
		}
		b.setState(StateDestroyed, ReasonCreateFailed)
		if err := b.save(ctx); err != nil { // before the snapshot's deletion, after which the fork would stay
			return fmt.Errorf("abandon fork %s: %w", id, err)
		}
	}
	return nil
}

// recoverSnapshots finishes or removes, at start, snapshots that the last run of the node left unfinished. No other method
// changes snapshots or sandboxes yet.
func (m *Manager) recoverSnapshots(ctx context.Context, sandboxes map[ID]*liveSandbox) error {
	if err := m.preserveNewerDisks(ctx, sandboxes); err != nil {
		return err
	}
	for _, s := range m.snapshots.byID {
		switch {
		case s.Progress == snapshotMoving:
			if err := m.settleMove(ctx, sandboxes[s.Sandbox], s); err != nil {
				return err
			}
			continue
		case s.Progress == snapshotCopying && m.deps.Restored:
			s.Progress = snapshotDone // it may have been acknowledged since
		case s.Progress == snapshotCopying:
			s.Progress = snapshotDeleted
		case s.Progress == snapshotDone && s.Temporary:
		default:
			continue
		}
		if s.Temporary {
			s.Progress = snapshotDeleted
		}
		if err := m.putSnapshot(ctx, s); err != nil {
			return err
		}
	}
	return nil
}
