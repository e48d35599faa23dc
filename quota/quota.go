// Package quota bounds how much of a resource is in use. It never waits: a request
// beyond a limit fails, and its caller may try again.
package quota

import (
	"errors"
	"sync"
	"sync/atomic"
)

var (
	// ErrExceeded reports that the limit of the pool or of the key was reached.
	ErrExceeded = errors.New("quota exceeded")
	// ErrTotalExceeded reports that the limit of the parent or of all keys was reached.
	ErrTotalExceeded = errors.New("total quota exceeded")
)

// Pool counts what is in use of something. A child counts in its parent, too.
type Pool struct {
	parent      *Pool
	limit, used atomic.Int64
}

// New returns a Pool of limit units.
func New(limit int64) *Pool { return (*Pool)(nil).Child(limit) }

// Child returns a Pool that acquires from itself first and then from p. A nil p
// bounds nothing.
func (p *Pool) Child(limit int64) *Pool {
	c := &Pool{parent: p}
	c.limit.Store(limit)
	return c
}

// TryAcquire acquires n units until Release, or none and returns ErrExceeded or
// ErrTotalExceeded.
func (p *Pool) TryAcquire(n int64) error {
	for {
		used := p.used.Load()
		if used+n > p.limit.Load() {
			return ErrExceeded
		}
		if p.used.CompareAndSwap(used, used+n) {
			break
		}
	}
	if p.parent != nil && p.parent.TryAcquire(n) != nil {
		p.used.Add(-n)
		return ErrTotalExceeded
	}
	return nil
}

// Release releases n units, in the parent too.
func (p *Pool) Release(n int64) {
	for ; p != nil; p = p.parent {
		p.used.Add(-n)
	}
}

// SetLimit changes the limit. Units in use stay acquired.
func (p *Pool) SetLimit(limit int64) { p.limit.Store(limit) }

// Used returns how many units are in use.
func (p *Pool) Used() int64 { return p.used.Load() }

// Keyed counts what is in use by key and in total. Callers may have different limits.
// The zero value is ready for use.
type Keyed[K comparable] struct {
	mu    sync.Mutex
	total int
	used  map[K]int // no entry for 0
}

// TryAcquire acquires one unit for key until Release, or returns ErrExceeded or
// ErrTotalExceeded.
func (k *Keyed[K]) TryAcquire(key K, limit, total int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.used[key] >= limit:
		return ErrExceeded
	case k.total >= total:
		return ErrTotalExceeded
	case k.used == nil:
		k.used = map[K]int{}
	}
	k.total++
	k.used[key]++
	return nil
}

// Release releases one unit of key.
func (k *Keyed[K]) Release(key K) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.total--
	if k.used[key]--; k.used[key] == 0 {
		delete(k.used, key)
	}
}

// Used returns how many units are in use, and by how many keys.
func (k *Keyed[K]) Used() (total, keys int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.total, len(k.used)
}
