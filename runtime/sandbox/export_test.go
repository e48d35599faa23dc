package sandbox

// Look does what the timer of a sandbox does when it fires.
func (m *Manager) Look(id ID) { m.boxByID(id).look(m.ctx) }

// LookLate does what Look does when the state was that one until just before it
// gets the turn.
func (m *Manager) LookLate(id ID, was State) { _ = m.boxByID(id).doDue(m.ctx, was) }

// Armed says whether a timer is set.
func (m *Manager) Armed(id ID) bool {
	b := m.boxByID(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.timer != nil
}
