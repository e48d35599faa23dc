package policy

import (
	"context"
	"sync"

	"github.com/tetratelabs/wazero/experimental"
)

// memory is an instance's, mapped for it alone. On Go's heap it would be garbage
// once the instance has ended, megabytes of it for each policy that is replaced, and
// the heap grows by as much before that is collected. Here it is the system's again
// up front, pages that a guest never touched take none, and growing copies nothing.
//
// It implements wazero's MemoryAllocator and LinearMemory. Its content must not be read
// after Free.
type memory struct {
	mapped []byte
	freed  sync.Once
}

// within returns a context in which wazero takes an instance's memory from m.
func (m *memory) within(ctx context.Context) context.Context {
	return experimental.WithMemoryAllocator(ctx, m)
}

// Allocate reserves addresses for the one memory that a module may have, and makes
// the first bytes usable. It fails as host functions do.
func (m *memory) Allocate(first, max uint64) experimental.LinearMemory {
	if max == 0 {
		return m
	}
	var err error
	m.mapped, err = reserve(int(max))
	if err != nil || m.Reallocate(first) == nil {
		fail("the node has no memory for it")
	}
	return m
}

// Reallocate makes the first size bytes usable: zeros, unless they were before. It
// returns nil where there is no room.
func (m *memory) Reallocate(size uint64) []byte {
	if size > uint64(len(m.mapped)) {
		return nil
	}
	usable := m.mapped[:size:size]
	if size > 0 && commit(usable) != nil {
		return nil
	}
	return usable
}

// Free releases all of it. It may be called more than once, also concurrently: when the
// instance ends, and by wazero for all instances that are left when a host is closed.
func (m *memory) Free() {
	m.freed.Do(func() {
		if m.mapped != nil {
			_ = release(m.mapped) // fails only for what is not mapped
			m.mapped = nil
		}
	})
}
