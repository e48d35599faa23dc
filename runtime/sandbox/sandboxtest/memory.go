package sandboxtest

import (
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Memory is a sandbox.Memory that a test sets. It begins with half of 1 GiB available, no swap
// and no count of stalls. Each read is a second later than the one before.
type Memory struct {
	mu    sync.Mutex
	state sandbox.MemoryState
	read  func(*sandbox.MemoryState)
	err   error
}

// NewMemory returns a Memory.
func NewMemory() *Memory {
	return &Memory{state: sandbox.MemoryState{At: time.Now(), Total: 1 << 30, Available: 1 << 29}}
}

// Change changes the state from the next read on.
func (m *Memory) Change(f func(*sandbox.MemoryState)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(&m.state)
}

// OnRead makes each read call f with the state, which f may change.
func (m *Memory) OnRead(f func(*sandbox.MemoryState)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read = f
}

// Fail makes reads return err; nil ends that.
func (m *Memory) Fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

// Read implements sandbox.Memory.
func (m *Memory) Read() (sandbox.MemoryState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return sandbox.MemoryState{}, m.err
	}
	m.state.At = m.state.At.Add(time.Second)
	if m.read != nil {
		m.read(&m.state)
	}
	return m.state, nil
}
