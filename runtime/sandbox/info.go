package sandbox

import (
	"context"
	"maps"
	"slices"
	"time"
)

// Info is the state of the node.
type Info struct {
	NodeID    string
	StartedAt time.Time
	States    map[State]int
	Leases    int64
	Waiters   int64
	Sizes     map[string]Limits
	Images    []string // short names that create accepts
	Allow     []string // patterns of other images
	Enforced  []string // limits that are enforced
	// EngineError is the error of an engine that does not respond; empty when it does.
	EngineError string
	// Quarantined are containers and run folders without a record, sorted by id.
	Quarantined []Quarantined
	// Pending are operations that the node tries again until they are done, oldest first.
	Pending []PendingOperation
	// Restored: the node started on an older copy of its data.
	Restored bool
}

// Info pings the engine, for at most a second.
func (m *Manager) Info(ctx context.Context) Info {
	cfg := m.config()
	info := Info{
		NodeID:    m.deps.Store.NodeID(),
		StartedAt: m.startedAt,
		States:    map[State]int{},
		Waiters:   m.waiting.Load(),
		Sizes:     maps.Clone(cfg.Sizes),
		Images:    slices.Sorted(maps.Keys(cfg.Images.Names)),
		Allow:     slices.Clone(cfg.Images.Allow),
		Enforced:  m.deps.Freezer.Enforced(),
		Restored:  m.deps.Restored,
	}
	m.mu.RLock()
	for _, b := range m.sandboxes {
		info.States[b.state()]++
		info.Leases += b.leases()
	}
	m.mu.RUnlock()
	info.Pending = m.retries.list()
	info.Quarantined = m.listQuarantined()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := m.deps.Engine.Ping(ctx); err != nil {
		info.EngineError = err.Error()
	}
	return info
}
