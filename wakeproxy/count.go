package wakeproxy

import (
	"sync"

	"github.com/doze-run/doze/runtime/sandbox"
)

// counts of requests in flight, upgraded connections included.
type counts struct {
	mu         sync.Mutex
	total      int
	perSandbox map[sandbox.ID]int // no entry for 0
}

// enter counts one more request unless a limit is reached. Each one that was
// counted must leave.
func (c *counts) enter(id sandbox.ID, perSandbox, total int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.total >= total || c.perSandbox[id] >= perSandbox {
		return false
	}
	c.total++
	c.perSandbox[id]++
	return true
}

func (c *counts) leave(id sandbox.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total--
	if c.perSandbox[id]--; c.perSandbox[id] == 0 {
		delete(c.perSandbox, id)
	}
}
