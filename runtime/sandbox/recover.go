package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// recoverers is how many sandboxes are brought into line at once.
	recoverers = 8
	// recoverWait is how long Start waits for that. Healthy sandboxes take some
	// milliseconds each; those that hang go on being looked at while the node serves.
	recoverWait = 5 * time.Second
)

// Start reads the store, asks the engine what exists, and makes the two agree:
// running sandboxes are adopted, vanished ones become stopped, half-made and
// half-destroyed ones are removed, and containers without a record are quarantined.
// A sandbox that cannot be adopted is stopped,
// and keeps no other from starting. Requests for one that is still looked at when
// Start returns wait for that. Before it returns, every other method answers
// ErrClosed. After an error the Manager must be closed. The Uplink is the caller's, who
// closes it after the Manager.
func (m *Manager) Start(ctx context.Context, uplink Uplink) error {
	m.uplink = uplink
	containers, err := m.engine.List(ctx)
	if err != nil {
		return fmt.Errorf("asking the engine for its containers: %w", err)
	}
	byID := make(map[ID]Container, len(containers))
	for _, c := range containers {
		byID[c.ID] = c
	}
	sandboxes := map[ID]*liveSandbox{}
	err = m.store.Sandboxes(ctx, func(sb Sandbox) error {
		sb.upgrade()
		b := m.newLiveSandbox(sb)
		close(b.made)
		sandboxes[sb.ID] = b
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the sandboxes: %w", err)
	}
	if err := m.forgetUnfinished(ctx, sandboxes); err != nil {
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
	m.readOrigins(sandboxes, byID)
	m.quarantineUnknown(sandboxes, containers)

	if err := m.recover(ctx, sandboxes, byID); err != nil {
		return err
	}
	m.forgetStrays(ctx, sandboxes)
	m.mu.Lock()
	m.started = true
	m.mu.Unlock()
	return nil
}

// forgetUnfinished removes the records of unfinished creations that may have been
// finished since: in an older copy of the store, or without a note that they are under
// way. What there is of them goes to quarantine.
func (m *Manager) forgetUnfinished(ctx context.Context, sandboxes map[ID]*liveSandbox) error {
	unfinished := map[ID]bool{}
	for id, b := range sandboxes {
		if b.state() != StateStarting {
			continue
		}
		if !m.restored && m.creations.pending(id) {
			unfinished[id] = true
			continue
		}
		if err := m.store.DeleteSandbox(ctx, id); err != nil {
			return fmt.Errorf("remove the record of the unfinished %s: %w", id, err)
		}
		delete(sandboxes, id)
	}
	if err := m.creations.retain(func(id ID) bool { return unfinished[id] }); err != nil {
		m.log.Warn("failed to remove notes of creations that are over", "error", err)
	}
	return nil
}

// toRemove says, at start, whether nothing may be left of the sandbox: it was
// destroyed, or the node died before its creation was acknowledged.
func (b *liveSandbox) toRemove() bool {
	s := b.state()
	return s == StateDestroyed || s == StateStarting
}

// recover brings boxes and containers into line, each in a goroutine of the
// Manager with the box's turn. It returns when all are done or recoverWait has passed.
func (m *Manager) recover(ctx context.Context, sandboxes map[ID]*liveSandbox, byID map[ID]Container) error {
	var all sync.WaitGroup
	slots := make(chan struct{}, recoverers)
	begin := func(f func(context.Context)) {
		all.Add(1)
		if !m.spawn(func(ctx context.Context) {
			defer all.Done()
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-ctx.Done(): // f sees it, and ends its turn
			}
			f(ctx)
		}) {
			all.Done()
		}
	}
	var destroyed []*liveSandbox
	for id, b := range sandboxes {
		c, exists := byID[id]
		switch {
		case b.toRemove():
			destroyed = append(destroyed, b)
		case !exists || c.State == ContainerExited || c.State == ContainerCreated:
			b.foundStopped(exists)
		default:
			b.transition <- struct{}{} // free: nobody knows the box yet
			begin(func(ctx context.Context) {
				defer b.unlockTransition()
				if err := b.adopt(ctx, c); err != nil && ctx.Err() == nil {
					b.stopUnusable(ctx, err)
				}
			})
		}
	}
	for _, b := range destroyed {
		if b.state() == StateStarting {
			b.setState(StateDestroyed, ReasonCreateFailed)
		}
		begin(func(ctx context.Context) {
			_ = b.destroy(ctx, b.view.Load().StateReason) // and again, if it fails
		})
	}
	m.stopAllQuarantined()
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }() // ends with those that it waits for
	timeout := time.NewTimer(recoverWait)
	defer timeout.Stop()
	select {
	case <-done:
	case <-timeout.C:
		m.log.Warn("some sandboxes do not answer; the node serves without waiting for them")
		for _, b := range sandboxes {
			// Before Start returns only recover takes turns.
			if len(b.transition) > 0 && b.view.Load().Condition.Code == "" {
				// For this one Start did not wait.
				b.setCondition(ConditionUnresponsive, "it has not responded since the node started")
			}
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// forgetStrays has the Uplink forget sandboxes that are no more.
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

// foundStopped notes at start that the container does not run.
func (b *liveSandbox) foundStopped(exists bool) {
	defer b.arm() // it may expire
	reason := ReasonContainerExited
	if !exists {
		reason = ReasonContainerLost
	}
	if before := b.view.Load(); before.State == StateStopped && (exists || before.StateReason == reason) {
		return
	}
	b.change(func(sb *Sandbox) { sb.Processes = lost(sb.Processes) })
	b.setState(StateStopped, reason)
	b.emit(Event{Type: EventStopped, Reason: reason})
}

// adopt takes over a container that runs, frozen or not. Needs the turn. An
// error says why the sandbox cannot be used.
func (b *liveSandbox) adopt(ctx context.Context, c Container) error {
	before := b.sandbox()
	if _, err := b.m.freezer.Prepare(b.id, b.limits()); err != nil {
		return fmt.Errorf("preparing its cgroup: %w", err)
	}
	frozen, err := b.m.freezer.Frozen(ctx, b.id)
	if err != nil {
		return err
	}
	b.pid.Store(int64(c.PID))
	// Before anything runs in it, and asleep too: what it waits for may come.
	uplinkErr := b.attach(ctx)
	// One that the node put to sleep only because it shut down goes on. If it died
	// before it could write that down, a hold says so too.
	resume := before.State == StateAsleep && before.StateReason == ReasonNodeShutdown ||
		before.State != StateAsleep && time.Now().Before(before.HoldUntil)
	if frozen && !resume {
		if before.State != StateAsleep {
			b.setState(StateAsleep, ReasonRecovered)
		}
		b.endConditionOf(ConditionUnresponsive)
		b.noteAttached(uplinkErr)
		b.arm()
		return nil
	}
	if frozen {
		if err := b.m.freezer.Thaw(ctx, b.id); err != nil {
			return err
		}
	}
	helloCtx, cancel := context.WithTimeout(ctx, deathWait)
	defer cancel()
	if err := b.awaitGuest(helloCtx); err != nil {
		return err
	}
	b.watch()
	b.trustUplink(ctx)
	if before.State == StateStopped { // the node died in the middle of a cold wake
		b.change(func(sb *Sandbox) { sb.StartedAt, sb.Limits = time.Now().UTC(), b.limits() })
	}
	if err := b.startMissing(ctx); err != nil {
		return err
	}
	if before.State != StateRunning {
		b.setState(StateRunning, "")
	}
	if before.State == StateStopped {
		b.emit(Event{Type: EventWoke, Kind: WakeCold, Reason: ReasonRecovered})
	}
	b.endCondition()
	b.noteAttached(uplinkErr)
	b.touch()
	b.open(0)
	b.armWoken()
	b.guest.Close() // hundreds are adopted at once, and few have a request soon
	return nil
}

// giveUp stops a container that this node cannot use, such as one whose guest
// is of another version; its disk is kept and its next wake is a cold one. Needs
// the turn.
func (b *liveSandbox) stopUnusable(ctx context.Context, why error) {
	b.m.log.Error("a sandbox cannot be adopted: stopping it", "sandbox", b.id, "error", why)
	b.ended(ReasonRecoveryFailed, why.Error())
	b.failed(ConditionRecoveryFailed, fmt.Errorf("it could not be adopted, and was stopped: %w", why))
	b.kill(ctx, b.m.config().StopGrace)
}
