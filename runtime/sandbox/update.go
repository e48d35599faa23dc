package sandbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Patch is a change to a sandbox; nil fields stay.
type Patch struct {
	Name                  *string
	Labels                *map[string]string
	SleepAfter, StopAfter *Duration
	ArchiveAfter          *Duration
	// TTL counts from the moment of the change; 0 removes the limit.
	TTL *Duration
	// Persist counts from the next sleep, or with PersistNone from the next stop.
	Persist *Persist
}

// Update changes a sandbox and returns it. It wakes nothing. Errors:
// *InvalidError, *ConflictError when the name is taken, ErrDestroyed.
func (m *Manager) Update(ctx context.Context, id ID, p Patch) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error { return b.update(ctx, p) })
}

func (b *liveSandbox) update(ctx context.Context, p Patch) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.sandbox()
	if before.State == StateDestroyed {
		return fmt.Errorf("sandbox %s: %w", b.id, ErrDestroyed)
	}
	after := before
	now := time.Now().UTC()
	p.apply(&after, now)
	if err := after.validate(); err != nil {
		return err
	}
	if err := b.m.rename(b, before, after.Name); err != nil {
		return err
	}
	err := b.changeSaved(ctx,
		func(sb *Sandbox) { p.apply(sb, now) },
		func(sb *Sandbox) {
			sb.Name, sb.Labels = before.Name, before.Labels
			sb.SleepAfter, sb.StopAfter, sb.ArchiveAfter = before.SleepAfter, before.StopAfter, before.ArchiveAfter
			sb.TTL, sb.ExpiresAt, sb.Persist = before.TTL, before.ExpiresAt, before.Persist
		})
	if err != nil {
		b.m.unname(b, before, after.Name)
		return err
	}
	b.m.unname(b, after, before.Name)
	b.emit(Event{Type: EventUpdated})
	b.arm()
	return nil
}

func (p Patch) apply(sb *Sandbox, now time.Time) {
	if p.Name != nil {
		sb.Name = *p.Name
	}
	if p.Labels != nil {
		sb.Labels = maps.Clone(*p.Labels)
	}
	if p.SleepAfter != nil {
		sb.SleepAfter = *p.SleepAfter
	}
	if p.StopAfter != nil {
		sb.StopAfter = *p.StopAfter
	}
	if p.ArchiveAfter != nil {
		sb.ArchiveAfter = *p.ArchiveAfter
	}
	if p.TTL != nil {
		sb.setTTL(*p.TTL, now)
	}
	if p.Persist != nil {
		sb.Persist = *p.Persist
	}
}

// rename reserves a name in addition to the sandbox's present one.
func (m *Manager) rename(b *liveSandbox, sb Sandbox, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sandboxes[b.id] != b {
		return fmt.Errorf("sandbox %s: %w", b, ErrNotFound)
	}
	key := nameKey{sb.Owner, name}
	if other, ok := m.names[key]; ok && other != b {
		return &ConflictError{Name: name, Reason: "is another sandbox", Want: "use a name that is free"}
	}
	m.nameLocked(b, key)
	return nil
}

// unname releases a name that is not, or no longer, the sandbox's own.
func (m *Manager) unname(b *liveSandbox, sb Sandbox, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := nameKey{sb.Owner, name}
	if name != sb.Name && m.names[key] == b {
		delete(m.names, key)
		b.names = slices.DeleteFunc(b.names, func(have nameKey) bool { return have == key })
	}
}
