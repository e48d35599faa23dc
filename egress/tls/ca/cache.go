package ca

import (
	"crypto/tls"
	"sync"
	"time"
)

// cacheSize is the limit of cached leaves: about 3 KiB each. The next request for
// an evicted name signs a leaf again, which takes some 50 µs.
const cacheSize = 4096

// leaf is the cache entry for the certificate of one host.
type leaf struct {
	mu    sync.Mutex // held while cert is signed
	cert  *tls.Certificate
	until time.Time // when cert is signed again
}

// cache holds the leaves that were used since the one before the latest rotation. The zero
// value is ready for use.
type cache struct {
	mu            sync.Mutex
	recent, older map[string]*leaf // by host, at most half of cacheSize each
}

// get returns the entry of a host, which it adds without a certificate if necessary.
func (c *cache) get(host string) *leaf {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.recent[host]
	if l != nil {
		return l
	}
	if l = c.older[host]; l == nil {
		l = new(leaf)
	}
	if c.recent == nil || len(c.recent) == cacheSize/2 {
		c.recent, c.older = map[string]*leaf{}, c.recent
	}
	c.recent[host] = l
	return l
}
