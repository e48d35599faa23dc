package http1

import (
	"container/list"
	"sync"
	"time"
)

// Pool keeps connections that wait for the next request, by keys. Its zero value is not
// usable; see NewPool.
type Pool struct {
	maxInAll, maxByKey int
	maxIdle            time.Duration

	mu     sync.Mutex
	byKey  map[string][]*kept // oldest first
	byAge  list.List          // of *kept, oldest first
	expire *time.Timer        // nil: nothing expires
}

type kept struct {
	key  string
	conn *Conn
	from time.Time
	age  *list.Element
}

// NewPool returns an empty pool that keeps up to maxInAll connections, and maxByKey of
// one key, for maxIdle.
func NewPool(maxInAll, maxByKey int, maxIdle time.Duration) *Pool {
	return &Pool{maxInAll: maxInAll, maxByKey: maxByKey, maxIdle: maxIdle, byKey: map[string][]*kept{}}
}

// Get takes the connection out that was put in last, or returns nil.
func (p *Pool) Get(key string) *Conn {
	for {
		c := p.take(key)
		if c == nil || c.alive() {
			return c
		}
		_ = c.Close()
	}
}

func (p *Pool) take(key string) *Conn {
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

// remove takes out what is at the index of its key. p.mu is held.
func (p *Pool) remove(k *kept, i int) {
	waiting := p.byKey[k.key]
	copy(waiting[i:], waiting[i+1:])
	waiting[len(waiting)-1] = nil
	if waiting = waiting[:len(waiting)-1]; len(waiting) == 0 {
		delete(p.byKey, k.key)
	} else {
		p.byKey[k.key] = waiting
	}
	p.byAge.Remove(k.age)
}

// oldest is the connection that has waited longest, or nil. p.mu is held.
func (p *Pool) oldest() *kept {
	e := p.byAge.Front()
	if e == nil {
		return nil
	}
	return e.Value.(*kept)
}

// Put keeps a connection. Where there are too many the oldest is closed.
func (p *Pool) Put(key string, c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &kept{key: key, conn: c, from: time.Now()}
	switch waiting := p.byKey[key]; {
	case len(waiting) >= p.maxByKey:
		p.drop(waiting[0])
	case p.byAge.Len() >= p.maxInAll:
		p.drop(p.oldest())
	}
	k.age = p.byAge.PushBack(k)
	p.byKey[key] = append(p.byKey[key], k)
	if p.expire == nil {
		p.expire = time.AfterFunc(p.maxIdle, p.expired)
	}
}

// drop closes a connection, which is the oldest of its key. p.mu is held.
func (p *Pool) drop(k *kept) {
	p.remove(k, 0)
	_ = k.conn.Close()
}

// expired closes the connections that have waited too long.
func (p *Pool) expired() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := p.oldest(); ; k = p.oldest() {
		if k == nil {
			p.expire = nil
			return
		}
		if left := p.maxIdle - time.Since(k.from); left > 0 {
			p.expire.Reset(left)
			return
		}
		p.drop(k)
	}
}

// CloseIdle closes the connections that wait.
func (p *Pool) CloseIdle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := p.oldest(); k != nil; k = p.oldest() {
		p.drop(k)
	}
}
