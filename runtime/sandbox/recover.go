package sandbox

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// recoverers is how many sandboxes are recovered concurrently.
	recoverers = 8
	// recoverWait is how long Start waits for that. Healthy sandboxes take some
	// milliseconds each; recovery of the others goes on while the node serves.
	recoverWait = 5 * time.Second
)

// Start compares the store with the engine's containers and makes them agree: it adopts
// running sandboxes, marks vanished ones as stopped, removes half-made and half-destroyed
// ones, and quarantines containers without a record. A sandbox that cannot be adopted is
// stopped. Start waits at most 5 s; requests for a sandbox that is still being recovered
// wait for it.
//
// Before Start returns, the other methods return ErrClosed. After an error the Manager must
// be closed. The caller closes the Uplink after the Manager.
func (m *Manager) Start(ctx context.Context, uplink Uplink) error {
	m.uplink = uplink
	if err := m.creations.open(); err != nil {
		return err
	}
	m.pollDisks() // writes count from now on
	if err := m.deps.Disks.Repair(ctx); err != nil {
		m.log.Warn("failed to check the storage for damage by a loss of power", "error", err)
	}
	containers, err := m.deps.Engine.List(ctx)
	if err != nil {
		return fmt.Errorf("list the engine's containers: %w", err)
	}
	byID := make(map[ID]Container, len(containers))
	for _, c := range containers {
		byID[c.ID] = c
	}
	sandboxes := map[ID]*liveSandbox{}
	err = m.deps.Store.Sandboxes(ctx, func(sb Sandbox) error {
		sb.upgrade()
		b := m.newLiveSandbox(sb)
		close(b.made)
		sandboxes[sb.ID] = b
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the sandboxes: %w", err)
	}
	err = m.deps.Store.Snapshots(ctx, func(s Snapshot) error {
		m.snapshots.byID[s.ID] = s
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the snapshots: %w", err)
	}
	if err := m.forgetUnfinished(ctx, sandboxes); err != nil {
		return err
	}
	if err := m.abandonForks(ctx, sandboxes); err != nil {
		return err
	}
	m.mu.Lock()
	for _, b := range sandboxes {
		if b.toRemove() {
			m.sandboxes[b.id] = b // its name may be another's by now
		} else {
			m.addLocked(b)
		}
	}
	m.mu.Unlock()
	if err := m.recoverSnapshots(ctx, sandboxes); err != nil {
		return fmt.Errorf("recover the snapshots: %w", err)
	}
	m.readOrigins(sandboxes, byID)
	m.quarantineUnknown(sandboxes, containers)

	if err := m.recover(ctx, sandboxes, byID); err != nil {
		return err
	}
	m.forgetStrays(ctx, sandboxes)
	m.deleteStaleArchives(sandboxes)
	m.mu.Lock()
	m.started = true
	m.mu.Unlock()
	m.spawn(m.maintainSnapshots)
	m.spawn(m.watchDisks)
	m.spawn(m.awaitLostMounts)
	if m.deps.Memory != nil {
		m.spawn(m.watchMemory)
	}
	return nil
}

// forgetUnfinished removes the records of unfinished creations that may have been finished
// since: in an older copy of the store, or without a note in Deps.Creations. Their
// containers go to quarantine.
func (m *Manager) forgetUnfinished(ctx context.Context, sandboxes map[ID]*liveSandbox) error {
	unfinished := map[ID]bool{}
	for id, b := range sandboxes {
		if b.state() != StateStarting {
			continue
		}
		if !m.deps.Restored && m.creations.pending(id) {
			unfinished[id] = true
			continue
		}
		if err := m.deps.Store.DeleteSandbox(ctx, id); err != nil {
			return fmt.Errorf("remove the record of the unfinished %s: %w", id, err)
		}
		delete(sandboxes, id)
	}
	if err := m.creations.retain(func(id ID) bool { return unfinished[id] }); err != nil {
		m.log.Warn("failed to remove notes of creations that are over", "error", err)
	}
	return nil
}

// toRemove reports, at start, whether the sandbox is to be removed: it was destroyed, or
// the node died before its creation was acknowledged.
func (b *liveSandbox) toRemove() bool {
	s := b.state()
	return s == StateDestroyed || s == StateStarting
}

// recover makes sandboxes and containers agree, each in a goroutine of the Manager with the
// transition lock. It returns when all are done or recoverWait has passed.
func (m *Manager) recover(ctx context.Context, sandboxes map[ID]*liveSandbox, byID map[ID]Container) error {
	var adoptions, destructions []func(context.Context)
	for id, b := range sandboxes {
		c, exists := byID[id]
		switch {
		case b.toRemove():
			if b.state() == StateStarting {
				b.setState(StateDestroyed, ReasonCreateFailed)
			}
			destructions = append(destructions, func(ctx context.Context) {
				_ = b.destroy(ctx, b.view.Load().StateReason) // and again, if it fails
			})
		case !exists || c.State == ContainerExited:
			b.foundStopped(exists)
		case c.State == ContainerCreated: // its first process may run, if the engine died with the node during a start
			b.transition.TryAcquire(1) // only Start knows b yet
			b.foundStopped(exists)
			adoptions = append(adoptions, func(ctx context.Context) {
				defer b.unlockTransition()
				b.kill(ctx, 0)
			})
		default:
			b.transition.TryAcquire(1) // only Start knows b yet
			adoptions = append(adoptions, func(ctx context.Context) {
				defer b.unlockTransition()
				if err := b.adopt(ctx, c); err != nil && ctx.Err() == nil {
					b.stopUnusable(ctx, err)
				}
			})
		}
	}
	done := make(chan struct{})
	if !m.spawn(func(ctx context.Context) {
		defer close(done)
		var all errgroup.Group
		all.SetLimit(recoverers)
		for _, do := range append(adoptions, destructions...) {
			all.Go(func() error { do(ctx); return nil })
		}
		_ = all.Wait()
	}) {
		return ErrClosed
	}
	m.stopAllQuarantined()
	timeout := time.NewTimer(recoverWait)
	defer timeout.Stop()
	select {
	case <-done:
	case <-timeout.C:
		m.log.Warn("failed to recover all sandboxes in time, serving without them")
		for _, b := range sandboxes {
			// Before Start returns only recover locks transitions.
			if b.transition.TryAcquire(1) {
				b.unlockTransition()
			} else if b.view.Load().Condition.Code == "" {
				// Start did not wait for it.
				b.setCondition(ConditionUnresponsive, "it has not responded since the node started")
			}
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// forgetStrays deletes the Uplink's state of sandboxes that no longer exist.
func (m *Manager) forgetStrays(ctx context.Context, sandboxes map[ID]*liveSandbox) {
	for _, id := range m.uplink.Known() {
		if sandboxes[id] != nil || m.quarantinedByID(id) != nil {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		m.log.Info("deleted the egress state of a sandbox that is gone", "sandbox", id)
		m.uplink.Forget(id)
	}
}

// foundStopped marks a sandbox as stopped at start: its container does not run.
func (b *liveSandbox) foundStopped(exists bool) {
	defer b.arm() // it may expire
	if b.state() == StateArchived {
		if exists { // the last run of the node did not remove it
			b.m.spawn(func(ctx context.Context) {
				_ = b.lockedIf(ctx, func() bool { return b.state() == StateArchived }, func() { b.removeContainer(ctx) })
			})
		}
		return
	}
	reason := ReasonContainerExited
	if !exists {
		reason = ReasonContainerLost
	}
	if before := b.view.Load(); before.State == StateStopped && (exists || before.StateReason == reason) {
		return
	}
	b.change(func(sb *Sandbox) { sb.endRun(reason) })
	b.setState(StateStopped, reason)
	b.emit(Event{Type: EventStopped, Reason: reason})
}

// adopt takes over a container that runs, frozen or not. After an error the sandbox cannot
// be used. Needs the transition lock.
func (b *liveSandbox) adopt(ctx context.Context, c Container) error {
	before := b.sandbox()
	if _, err := b.m.deps.Freezer.Prepare(b.id, b.limits()); err != nil {
		return fmt.Errorf("prepare its cgroup: %w", err)
	}
	frozen, err := b.m.deps.Freezer.Frozen(ctx, b.id)
	if err != nil {
		return err
	}
	b.pid.Store(int64(c.PID))
	// Before anything runs in it, and also for a sleeping one: responses that it waits
	// for may arrive.
	uplinkErr := b.attach(ctx)
	mountErr := b.remount(ctx)
	// Sandboxes that slept only because the node shut down go on. If the node died before
	// it could write that, a hold shows it too.
	resume := before.State == StateAsleep && before.StateReason == ReasonNodeShutdown ||
		before.State != StateAsleep && time.Now().Before(before.HoldUntil)
	if frozen && !resume {
		if before.State != StateAsleep {
			b.setState(StateAsleep, ReasonRecovered)
		}
		b.endConditionOf(ConditionUnresponsive)
		b.noteAttached(uplinkErr)
		b.noteRemounted(mountErr)
		b.arm()
		return nil
	}
	if frozen {
		if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil {
			return err
		}
	}
	if before.State == StateStopped { // the node died in the middle of a cold wake
		limits := b.limits()
		b.change(func(sb *Sandbox) { sb.beginRun(limits) })
	}
	if err := b.adoptGuest(ctx, deathWait); err != nil {
		return err
	}
	if before.State == StateStopped {
		b.emit(Event{Type: EventWoke, Kind: WakeCold, Reason: ReasonRecovered})
	}
	b.noteAttached(uplinkErr)
	b.noteRemounted(mountErr)
	b.touch()
	b.open(0)
	b.armWoken()
	b.guest.Close() // hundreds are adopted together, and few have a request soon
	return nil
}

// adoptGuest makes the sandbox running with a guest that an earlier run of the node started,
// once the guest responds, within wait. Needs the transition lock.
func (b *liveSandbox) adoptGuest(ctx context.Context, wait time.Duration) error {
	helloCtx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if err := b.awaitGuest(helloCtx); err != nil {
		return err
	}
	b.watch()
	if b.state() != StateRunning {
		b.setState(StateRunning, "")
	}
	b.endConditionOf(b.view.Load().Condition.Code) // before trustUplink, which may set another
	b.trustUplink(ctx)
	return b.startMissing(ctx)
}

// stopUnusable stops a container that this node cannot use, such as one whose guest is of
// another version. Its disk stays, and its next wake is a cold one. Needs the transition
// lock.
func (b *liveSandbox) stopUnusable(ctx context.Context, why error) {
	b.m.log.Error("failed to adopt a sandbox, stopping it", "sandbox", b.id, "error", why)
	b.ended(ending{reason: ReasonRecoveryFailed, failure: why.Error()})
	b.failed(ConditionRecoveryFailed, fmt.Errorf("it could not be adopted, and was stopped: %w", why))
	b.kill(ctx, b.m.config().StopGrace)
}
