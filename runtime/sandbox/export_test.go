package sandbox

import "time"

// RunCheck does what the timer of a sandbox does when it fires.
func (m *Manager) RunCheck(id ID) { m.liveByID(id).runCheck(m.ctx) }

// RunCheckLate does what RunCheck does when the sandbox leaves that state just before the
// check has the transition lock.
func (m *Manager) RunCheckLate(id ID, was State) { _ = m.liveByID(id).doDue(m.ctx, was) }

// RetryIn is the pause after the last failure.
func (m *Manager) RetryIn(id ID) time.Duration { return m.liveByID(id).retryIn() }

// Armed reports whether a timer is set.
func (m *Manager) Armed(id ID) bool {
	b := m.liveByID(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.timer != nil
}

// WarmWake begins a wake that starts no container and has no waiters. The returned function
// ends it as if the sandbox was found stopped.
func (m *Manager) WarmWake(id ID) (end func()) {
	b := m.liveByID(id)
	w := &wake{end: func(error) {}, done: make(chan struct{})}
	b.mu.Lock()
	b.wake = w
	b.mu.Unlock()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.wake, w.err = nil, b.notRunning()
		close(w.done)
	}
}

// ExpireLate does what the timer of a sandbox does once its TTL has passed.
func (m *Manager) ExpireLate(id ID) error { return m.liveByID(id).expire(m.ctx) }

// KernelClients counts the slots for clients of the sandbox's kernels.
func (m *Manager) KernelClients(id ID) int {
	b := m.liveByID(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.kernels.slots)
}

// ConnectKernel does what code for a context does that has been closed since it was found.
func (m *Manager) ConnectKernel(id ID, c Context) error {
	_, err := m.liveByID(id).connectKernel(m.ctx, c)
	return err
}

// Relieve does what is due when MemoryInterval has passed, without reading again immediately. It
// reports whether that is due.
func (m *Manager) Relieve() (again bool) { return m.relieve(m.ctx) }

// WatchDisks does what is due when DiskInterval has passed.
func (m *Manager) WatchDisks() {
	m.pollDisks()
	m.measureDue(m.ctx)
}

// MeasuredLongAgo makes the periodic measurement of a sandbox due.
func (m *Manager) MeasuredLongAgo(id ID) {
	b := m.liveByID(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk.measured = b.disk.measured.Add(-diskPeriod)
}

// TryAgain ends the pause after a failed measurement.
func (m *Manager) TryAgain(id ID) {
	b := m.liveByID(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disk.notBefore = time.Time{}
}

// StopForMemory stops a sandbox that was chosen because memory is short.
func (m *Manager) StopForMemory(id ID) error {
	return m.liveByID(id).stop(m.ctx, modePressure, ending{reason: ReasonMemoryPressure})
}

// Reclaiming reports whether memory is being reclaimed.
func (m *Manager) Reclaiming() bool {
	m.reclaims.mu.Lock()
	defer m.reclaims.mu.Unlock()
	return m.reclaims.running
}

// AddSleeping adds sleeping sandboxes without a container, which exist in memory only.
func (m *Manager) AddSleeping(count int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for range count {
		b := m.newLiveSandbox(Sandbox{ID: NewID(), State: StateAsleep, StateSince: time.Now()})
		close(b.made)
		m.sandboxes[b.id] = b
	}
}

// FeedSize is how many events the feed keeps.
const FeedSize = feedSize

// EmitForTest adds an event to a sandbox's timeline.
func (m *Manager) EmitForTest(id ID, ev Event) { m.liveByID(id).emit(ev) }

// RetryNow does what the timer of a pending operation does when it fires.
func (m *Manager) RetryNow(operation Operation, id ID) {
	m.attempt(m.ctx, pendingKey{operation, id})
}

// Recoverers is how many sandboxes Start recovers concurrently.
const Recoverers = recoverers

// StopQuarantined does what the start of the node has done.
func (m *Manager) StopQuarantined(id ID) error {
	return m.stopQuarantined(m.ctx, m.quarantinedByID(id))
}

// CollectSnapshots removes deleted snapshots that nothing is based on.
func (m *Manager) CollectSnapshots() { m.collect(m.ctx) }
