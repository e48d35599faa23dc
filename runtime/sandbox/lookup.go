package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
)

func (m *Manager) liveByID(id ID) *liveSandbox {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.sandboxes[id]
}

// Knows reports whether the id belongs to a sandbox, also one that is being destroyed, or to
// a container in quarantine.
func (m *Manager) Knows(id ID) bool { return m.liveByID(id) != nil || m.quarantinedByID(id) != nil }

func (m *Manager) live(id ID) (*liveSandbox, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if !m.started {
		return nil, ErrClosed
	}
	b := m.sandboxes[id]
	if b == nil {
		return nil, fmt.Errorf("sandbox %s: %w", clip(string(id)), ErrNotFound)
	}
	return b, nil
}

// on calls f with a sandbox, and returns the sandbox as f has left it.
func (m *Manager) on(id ID, f func(*liveSandbox) error) (Sandbox, error) {
	b, err := m.live(id)
	if err == nil {
		err = f(b)
	}
	if err != nil {
		return Sandbox{}, err
	}
	return b.sandbox(), nil
}

type nameKey struct{ owner, name string }

func (m *Manager) addLocked(b *liveSandbox) {
	sb := b.view.Load()
	m.sandboxes[b.id] = b
	m.nameLocked(b, nameKey{sb.Owner, sb.Name})
}

func (m *Manager) nameLocked(b *liveSandbox, key nameKey) {
	if m.names[key] != b {
		m.names[key] = b
		b.names = append(b.names, key)
	}
}

func (m *Manager) remove(b *liveSandbox) {
	m.mu.Lock()
	delete(m.sandboxes, b.id)
	for _, key := range b.names {
		if m.names[key] == b {
			delete(m.names, key)
		}
	}
	b.names = nil
	m.mu.Unlock()
	b.dropListeners()
}

// Get returns a sandbox of an owner by name or id. It wakes nothing.
func (m *Manager) Get(owner, nameOrID string) (Sandbox, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if !m.started {
		return Sandbox{}, ErrClosed
	}
	if b, ok := m.names[nameKey{owner, nameOrID}]; ok {
		return b.sandbox(), nil
	}
	if b, ok := m.sandboxes[ID(nameOrID)]; ok && b.view.Load().Owner == owner {
		return b.sandbox(), nil
	}
	return Sandbox{}, fmt.Errorf("sandbox %q: %w", clip(nameOrID), ErrNotFound)
}

// ByID returns a sandbox of any owner, from memory. It wakes nothing.
func (m *Manager) ByID(id ID) (Sandbox, bool) {
	b, err := m.live(id)
	if err != nil {
		return Sandbox{}, false
	}
	return b.sandbox(), true
}

// LastLog returns the last line that the sandbox's container wrote; empty if it wrote none,
// does not exist, or the Engine does not know.
func (m *Manager) LastLog(ctx context.Context, id ID) string {
	line, err := m.deps.Engine.LastLog(ctx, id)
	if err != nil && !errors.Is(err, ErrNoContainer) {
		m.log.Warn("failed to read the last line of a container", "sandbox", id, "error", err)
	}
	return line
}

// Filter of a list. Empty fields match all.
type Filter struct {
	Labels map[string]string // a sandbox must have all of them with these values
	State  State
}

func (f Filter) matches(sb *Sandbox) bool {
	if f.State != "" && sb.State != f.State {
		return false
	}
	for k, v := range f.Labels {
		if have, ok := sb.Labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// List returns up to limit sandboxes of an owner, sorted by name, after the name after. next
// is the last name if there are more, otherwise empty. It wakes nothing.
func (m *Manager) List(owner string, filter Filter, after string, limit int) (list []Sandbox, next string) {
	type entry struct {
		b    *liveSandbox
		view *Sandbox
	}
	var found []entry
	m.mu.RLock()
	for key, b := range m.names {
		// During a rename a sandbox is in the map under two names.
		if view := b.view.Load(); key.owner == owner && key.name > after && key.name == view.Name && filter.matches(view) {
			found = append(found, entry{b, view})
		}
	}
	m.mu.RUnlock()
	slices.SortFunc(found, func(a, b entry) int { return cmp.Compare(a.view.Name, b.view.Name) })
	if limit > 0 && len(found) > limit {
		found = found[:limit]
		next = found[limit-1].view.Name
	}
	list = make([]Sandbox, len(found))
	for i, e := range found {
		list[i] = e.b.shown(e.view)
	}
	return list, next
}
