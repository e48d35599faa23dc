package http1

import (
	"container/list"
	"slices"
	"sync"
	"time"
)

// Pool holds idle connections by key. Use NewPool.
type Pool struct {
	maxConns, maxPerKey int
	maxIdle             time.Duration

	mu     sync.Mutex
	byKey  map[string][]*idleConn // oldest first
	byAge  list.List              // of *idleConn, oldest first
	expiry *time.Timer            // nil if the pool was empty when it last fired
}

type idleConn struct {
	key   string
	conn  *Conn
	since time.Time
	age   *list.Element
}

// NewPool returns an empty pool. It holds up to maxConns connections, up to maxPerKey of
// them under one key, each for up to maxIdle.
func NewPool(maxConns, maxPerKey int, maxIdle time.Duration) *Pool {
	return &Pool{maxConns: maxConns, maxPerKey: maxPerKey, maxIdle: maxIdle, byKey: map[string][]*idleConn{}}
}

// Get removes and returns the connection that was added last under the key and that is
// still usable. It returns nil if there is none.
func (p *Pool) Get(key string) *Conn {
	for {
		c := p.pop(key)
		if c == nil || c.alive() {
			return c
		}
		_ = c.Close()
	}
}

func (p *Pool) pop(key string) *Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	waiting := p.byKey[key]
	if len(waiting) == 0 {
		return nil
	}
	k := waiting[len(waiting)-1]
	p.remove(k, len(waiting)-1)
	return k.conn
}

// remove removes the connection at index i of its key. p.mu is held.
func (p *Pool) remove(k *idleConn, i int) {
	if waiting := slices.Delete(p.byKey[k.key], i, i+1); len(waiting) == 0 {
		delete(p.byKey, k.key)
	} else {
		p.byKey[k.key] = waiting
	}
	p.byAge.Remove(k.age)
}

// Put adds an idle connection. At a limit it closes the oldest one.
func (p *Pool) Put(key string, c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &idleConn{key: key, conn: c, since: time.Now()}
	switch waiting := p.byKey[key]; {
	case len(waiting) >= p.maxPerKey:
		p.evict(waiting[0])
	case p.byAge.Len() >= p.maxConns:
		p.evict(p.byAge.Front().Value.(*idleConn))
	}
	k.age = p.byAge.PushBack(k)
	p.byKey[key] = append(p.byKey[key], k)
	if p.expiry == nil {
		p.expiry = time.AfterFunc(p.maxIdle, p.evictExpired)
	}
}

// evict closes the oldest connection of its key. p.mu is held.
func (p *Pool) evict(k *idleConn) {
	p.remove(k, 0)
	_ = k.conn.Close()
}

// evictExpired closes the connections that have been idle too long.
func (p *Pool) evictExpired() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for e := p.byAge.Front(); e != nil; e = p.byAge.Front() {
		k := e.Value.(*idleConn)
		if left := p.maxIdle - time.Since(k.since); left > 0 {
			p.expiry.Reset(left)
			return
		}
		p.evict(k)
	}
	p.expiry = nil
}

// CloseIdle closes all idle connections.
func (p *Pool) CloseIdle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for e := p.byAge.Front(); e != nil; e = p.byAge.Front() {
		p.evict(e.Value.(*idleConn))
	}
}
