package ca

import (
	"container/list"
	"crypto/tls"
	"sync"
	"time"
)

// cacheSize bounds the leaves that are kept: about 3 KiB each. A name that is
// pushed out is signed again when it is asked for, which takes some 50 µs.
const cacheSize = 4096

// leaf is a place for the certificate of one host.
type leaf struct {
	host string

	mu    sync.Mutex // held while it is signed
	cert  *tls.Certificate
	until time.Time // then it is signed anew
}

// cache holds the leaves that were used last.
type cache struct {
	mu   sync.Mutex
	size int
	at   map[string]*list.Element // of *leaf
	used *list.List               // most recently used first
}

func newCache(size int) *cache {
	return &cache{size: size, at: map[string]*list.Element{}, used: list.New()}
}

// get returns the place of a host, which is new and empty if there was none.
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
