package store

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Memory is a sandbox.Store without persistence. It encodes all values as Badger does, so
// that it shares no memory with its callers. Its methods may be called concurrently.
type Memory struct {
	nodeID string

	mu        sync.Mutex
	closed    bool
	sandboxes map[sandbox.ID][]byte
	events    map[sandbox.ID][]encodedEvent // by seq
	documents map[string][]byte             // by documentKey
}

// NewMemory returns an empty store.
func NewMemory() *Memory {
	return &Memory{
		nodeID:    newNodeID(),
		sandboxes: make(map[sandbox.ID][]byte),
		events:    make(map[sandbox.ID][]encodedEvent),
		documents: make(map[string][]byte),
	}
}

// NodeID implements sandbox.Store.
func (m *Memory) NodeID() string { return m.nodeID }

// PutSandbox implements sandbox.Store.
func (m *Memory) PutSandbox(ctx context.Context, sb sandbox.Sandbox) error {
	if err := checkID(sb.ID); err != nil {
		return err
	}
	value, err := encode("sandbox", sb, maxRecord)
	if err != nil {
		return err
	}
	return m.change(ctx, func() { m.sandboxes[sb.ID] = value })
}

// DeleteSandbox implements sandbox.Store.
func (m *Memory) DeleteSandbox(ctx context.Context, id sandbox.ID) error {
	if err := checkID(id); err != nil {
		return err
	}
	return m.change(ctx, func() { delete(m.sandboxes, id) })
}

// Sandboxes implements sandbox.Store.
func (m *Memory) Sandboxes(ctx context.Context, yield func(sandbox.Sandbox) error) error {
	var snapshot map[sandbox.ID][]byte
	if err := m.change(ctx, func() { snapshot = maps.Clone(m.sandboxes) }); err != nil {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(snapshot)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		sb, err := decodeSandbox(id, snapshot[id])
		if err != nil {
			return err
		}
		if err := yield(sb); err != nil {
			return err
		}
	}
	return nil
}

// AppendEvents implements sandbox.Store.
func (m *Memory) AppendEvents(ctx context.Context, events []sandbox.Event) error {
	var encoded []encodedEvent
	for _, e := range events {
		if err := checkID(e.Sandbox); err != nil {
			return err
		}
		value, err := encodeEvent(e, maxEvent)
		if err != nil {
			return err
		}
		encoded = append(encoded, encodedEvent{id: e.Sandbox, seq: e.Seq, value: value, expires: e.Time.Add(sandbox.EventRetention)})
	}
	return m.change(ctx, func() {
		for _, e := range encoded {
			m.insert(e)
		}
	})
}

func (m *Memory) insert(e encodedEvent) {
	list := m.events[e.id]
	at, found := slices.BinarySearchFunc(list, e.seq, func(have encodedEvent, seq uint64) int {
		switch {
		case have.seq < seq:
			return -1
		case have.seq > seq:
			return 1
		}
		return 0
	})
	if found {
		list[at] = e
	} else {
		list = slices.Insert(list, at, e)
	}
	if newest := list[len(list)-1].seq; newest >= sandbox.MaxEvents {
		keep := newest - sandbox.MaxEvents + 1
		list = slices.DeleteFunc(list, func(e encodedEvent) bool { return e.seq < keep })
	}
	m.events[e.id] = list
}

// Events implements sandbox.Store.
func (m *Memory) Events(ctx context.Context, id sandbox.ID, after uint64, limit int) ([]sandbox.Event, error) {
	var events []sandbox.Event
	var bad error
	err := m.change(ctx, func() {
		for _, e := range m.live(id) {
			if len(events) >= limit {
				return
			}
			if e.seq <= after {
				continue
			}
			var event sandbox.Event
			if bad = decode(e.value, &event); bad != nil {
				return
			}
			events = append(events, event)
		}
	})
	if err == nil {
		err = bad
	}
	return events, err
}

// LastSeq implements sandbox.Store.
func (m *Memory) LastSeq(ctx context.Context, id sandbox.ID) (uint64, error) {
	var seq uint64
	err := m.change(ctx, func() {
		if list := m.live(id); len(list) > 0 {
			seq = list[len(list)-1].seq
		}
	})
	return seq, err
}

// live drops the expired events of a sandbox and returns the others.
func (m *Memory) live(id sandbox.ID) []encodedEvent {
	now := time.Now()
	list := slices.DeleteFunc(m.events[id], func(e encodedEvent) bool { return !e.expires.After(now) })
	if len(list) == 0 {
		delete(m.events, id)
		return nil
	}
	m.events[id] = list
	return list
}

// Close implements sandbox.Store.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

// change runs fn with mu locked, unless ctx has ended or the store is closed.
func (m *Memory) change(ctx context.Context, fn func()) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errClosed
	}
	fn()
	return nil
}

var _ sandbox.Store = (*Memory)(nil)
