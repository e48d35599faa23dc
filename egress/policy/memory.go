package policy

import (
	"sync"

	"github.com/tetratelabs/wazero/experimental"
)

// memory is the memory of one instance, in its own mapping. On Go's heap it would be
// garbage once the instance has ended, megabytes for each replaced policy, and the heap
// would grow by as much before a collection. A mapping is returned to the system
// immediately, pages that a guest never touched take no memory, and growing copies
// nothing.
//
// It implements wazero's MemoryAllocator and LinearMemory. Its content must not be read
// after Free.
type memory struct {
	mapped []byte
	freed  sync.Once
}

// Allocate reserves max bytes of address space for the one memory that a module may have,
// and makes the first bytes usable. It panics with a *failure on errors, as host functions
// do.
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

// Reallocate makes the first size bytes usable. Bytes that were not usable before are
// zero. It returns nil if the reservation or the system's memory is exhausted.
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

// Free releases the mapping. It may be called more than once, also concurrently: when the
// instance ends, and by wazero for all remaining instances when a host is closed.
func (m *memory) Free() {
	m.freed.Do(func() {
		if m.mapped != nil {
			_ = release(m.mapped) // fails only for unmapped addresses
			m.mapped = nil
		}
	})
}
