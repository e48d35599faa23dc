package ca

import (
	"container/list"
	"crypto/tls"
	"sync"
	"time"
)

// cacheSize is the limit of cached leaves: about 3 KiB each. The next request for
// an evicted name signs a leaf again, which takes some 50 µs.
const cacheSize = 4096

// leaf is the cache entry for the certificate of one host.
type leaf struct {
	host string

	mu    sync.Mutex // held while cert is signed
	cert  *tls.Certificate
	until time.Time // when cert is signed again
}

// cache holds the most recently used leaves.
type cache struct {
	mu   sync.Mutex
	size int
	at   map[string]*list.Element // of *leaf
	used *list.List               // most recently used first
}

func newCache(size int) *cache {
	return &cache{size: size, at: map[string]*list.Element{}, used: list.New()}
}

// get returns the entry of a host, which it adds without a certificate if necessary.
func (c *cache) get(host string) *leaf {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.at[host]; ok {
		c.used.MoveToFront(e)
		return e.Value.(*leaf)
	}
	if c.used.Len() == c.size {
		last := c.used.Back()
		delete(c.at, last.Value.(*leaf).host)
		c.used.Remove(last)
	}
	l := &leaf{host: host}
	c.at[host] = c.used.PushFront(l)
	return l
}
