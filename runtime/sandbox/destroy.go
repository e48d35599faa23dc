package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// destroyTimeout bounds one attempt to remove a sandbox.
const destroyTimeout = time.Minute

// Destroy removes the sandbox with its files in any state, and returns when nothing is
// left of it. When ctx ends first, the removal goes on. A failed attempt leaves the sandbox
// destroyed: the node tries again until nothing is left, and another call tries immediately.
func (m *Manager) Destroy(ctx context.Context, id ID) error {
	b, err := m.live(id)
	if err != nil {
		return err
	}
	return m.do(ctx, func(ctx context.Context) error { return b.destroy(ctx, ReasonRequested) })
}

// destroy is Destroy of one sandbox; reason is for its record and its event.
func (b *liveSandbox) destroy(ctx context.Context, reason StateReason) error {
	err := b.tryDestroy(ctx, reason)
	b.destroyLater(err)
	if err == nil {
		b.m.done(OperationDestroy, b.id)
	}
	return err
}

// tryDestroy is one attempt.
func (b *liveSandbox) tryDestroy(ctx context.Context, reason StateReason) error {
	b.interrupt()
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if b.m.liveByID(b.id) != b {
		return nil // destroyed by another caller meanwhile, or never finished
	}
	return b.destroyDue(ctx, reason, func() bool { return true })
}

// destroyDue destroys the sandbox if due returns true; due is called while no caller can
// change the sandbox. Needs the transition lock.
func (b *liveSandbox) destroyDue(ctx context.Context, reason StateReason, due func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	// From here on it is destroyed, also if the node dies in between. An earlier attempt,
	// also in an earlier run of the node, has already written the record and the event.
	if b.state() != StateDestroyed {
		b.updating.Lock()
		if !due() {
			b.updating.Unlock()
			return nil
		}
		err := b.noteDestroyed(ctx, reason)
		b.updating.Unlock()
		if err != nil {
			return b.failed(ConditionDestroyFailed, fmt.Errorf("destroy %s: %w", b.id, err))
		}
		b.emit(Event{Type: EventDestroyed, Reason: reason})
	}
	if err := b.dismantle(ctx); err != nil {
		return b.failed(ConditionDestroyFailed, fmt.Errorf("destroy %s: %w", b.id, err))
	}
	b.m.remove(b)
	if b.view.Load().Snapshot != "" {
		b.m.collectSoon()
	}
	return nil
}

// interrupt cancels the creation, the wake or the reclaim under way.
func (b *liveSandbox) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.endMake != nil {
		b.endMake(ErrDestroyed)
	}
	if b.wake != nil {
		b.wake.end(ErrDestroyed)
	}
	if b.endReclaim != nil {
		b.endReclaim()
	}
	if b.retrieval != nil {
		b.retrieval.end(ErrDestroyed)
	}
}

// noteDestroyed writes the record that the next start of the node needs to finish a
// destruction. It is short, so that no record is too large to be destroyed. On a full disk,
// which only a destruction can relieve, the journal writes it later.
func (b *liveSandbox) noteDestroyed(ctx context.Context, reason StateReason) error {
	var before Sandbox
	b.change(func(sb *Sandbox) {
		before = *sb
		sb.State, sb.StateReason, sb.StateSince = StateDestroyed, reason, time.Now().UTC()
		sb.Env, sb.EnvChanges, sb.Processes, sb.Terminals, sb.Sessions, sb.Contexts, sb.Listening, sb.Declared = nil, nil, nil, nil, nil, nil, nil, nil
	})
	err := b.save(ctx)
	switch {
	case errors.Is(err, ErrStoreFull):
		b.m.journal.dirty(b)
		return nil
	case err != nil:
		b.change(func(sb *Sandbox) { *sb = before })
		b.m.journal.dirty(b) // the failed write may have reached the disk
	}
	return err
}

// dismantle removes the container, cgroup, folders, egress state and record. Archives are deleted later, and the record
// with them. Needs the transition lock. Idempotent.
func (b *liveSandbox) dismantle(ctx context.Context) error {
	b.mu.Lock()
	b.gone = true
	b.mu.Unlock()
	b.closeNow()
	b.disarm()
	b.disconnect()
	if err := b.m.deps.Engine.Remove(ctx, b.id); err != nil {
		return err
	}
	if err := b.m.deps.Disks.Sync(ctx, b.id); err != nil { // before the record is removed
		return err
	}
	if err := b.m.deps.Freezer.Remove(b.id); err != nil {
		return err
	}
	if err := b.m.removeRunDir(ctx, b.id); err != nil {
		return err
	}
	if err := b.removeOrigin(); err != nil {
		return err
	}
	b.m.uplink.Forget(b.id) // before its record, which is the only reference to it
	if archives := b.archives(); len(archives) > 0 {
		b.deleteArchivesLater(archives)
		return nil
	}
	return b.removeRecord(ctx)
}

// removeRecord removes the record of a sandbox that is gone, and the note of its creation.
func (b *liveSandbox) removeRecord(ctx context.Context) error {
	if err := b.deleteRecord(ctx); err != nil {
		return err
	}
	return b.m.creations.remove(b.id) // after the record, which without a note is not removed at start
}
