package dial

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// overrides is the value of Config.Overrides.
type overrides map[string]Override

// find returns the override of a host: its own, or the longest wildcard's.
func (o overrides) find(host string) (Override, bool) {
	if found, ok := o[host]; ok || len(o) == 0 {
		return found, ok
	}
	for below := host; ; {
		_, rest, more := strings.Cut(below, ".")
		if !more {
			return Override{}, false
		}
		if found, ok := o["*."+rest]; ok {
			return found, true
		}
		below = rest
	}
}

const (
	// foundFor is how long addresses are cached. Go's resolver caches none and does
	// not return their TTL. An installation opens a hundred connections to one
	// host, and a host that moves must be found again soon.
	foundFor = 10 * time.Second
	// missingFor is how long the absence of a name is cached: a client that retries
	// immediately does not make the node query again.
	missingFor = time.Second
	// maxKept bounds the cached names of all sandboxes, and maxFound the addresses of
	// each: the owner of a name controls their number, up to 4,000 in a response. So
	// the cache takes about 200 KiB, and 2 MiB at most.
	maxKept  = 1024
	maxFound = 64
)

// cache queries the resolver and caches the results briefly. The addresses are
// checked on each dial.
type cache struct {
	resolver Resolver

	mu   sync.Mutex
	kept map[string]answer
}

type answer struct {
	addrs []netip.Addr
	err   error
	until time.Time
}

func (c *cache) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	c.mu.Lock()
	a, ok := c.kept[host]
	c.mu.Unlock()
	if ok && time.Now().Before(a.until) {
		return a.addrs, a.err
	}
	a.addrs, a.err = c.resolver.LookupNetIP(ctx, "ip", host+".")
	if len(a.addrs) > maxFound {
		a.addrs = slices.Clone(a.addrs[:maxFound])
	}
	if a.err == nil && len(a.addrs) == 0 {
		a.err = &net.DNSError{Err: "it has no address", Name: host, IsNotFound: true}
	}
	var dnsError *net.DNSError
	switch {
	case a.err == nil:
		a.until = time.Now().Add(foundFor)
	case errors.As(a.err, &dnsError) && dnsError.IsNotFound:
		a.until = time.Now().Add(missingFor)
	default:
		return nil, a.err
	}
	c.keep(host, a)
	return a.addrs, a.err
}

// keep stores the result for a host. A full cache drops expired names, then arbitrary ones.
func (c *cache) keep(host string, a answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept == nil {
		c.kept = map[string]answer{}
	}
	if _, ok := c.kept[host]; !ok && len(c.kept) >= maxKept {
		now := time.Now()
		for name, old := range c.kept {
			if now.After(old.until) {
				delete(c.kept, name)
			}
		}
		for name := range c.kept {
			if len(c.kept) < maxKept {
				break
			}
			delete(c.kept, name)
		}
	}
	c.kept[host] = a
}
