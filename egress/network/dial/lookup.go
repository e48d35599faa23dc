package dial

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// overrides is the value of Config.Overrides.
type overrides map[string]Override

// find returns the override of a host: its own, or the longest wildcard's.
func (o overrides) find(host string) (Override, bool) {
	found, ok := o[host]
	for more := len(o) > 0; more && !ok; {
		if _, host, more = strings.Cut(host, "."); more {
			found, ok = o["*."+host]
		}
	}
	return found, ok
}

const (
	// foundFor is how long addresses are cached. Go's resolver caches none and does
	// not return their TTL. An installation opens a hundred connections to one
	// host, and a host that moves must be found again soon.
	foundFor = 10 * time.Second
	// missingFor is how long the absence of a name is cached: a client that retries
	// immediately does not make the node query again.
	missingFor = time.Second
	// maxNames bounds the cached names of all sandboxes, and maxFound the addresses of
	// each: the owner of a name controls their number, up to 4,000 in a response. So
	// the cache takes about 200 KiB, and 2 MiB at most.
	maxNames = 1024
	maxFound = 64
)

// cache queries the resolver and caches the results briefly. The addresses are
// checked on each dial.
type cache struct {
	// resolve is the LookupNetIP of a net.Resolver, which shares concurrent lookups of a
	// name. The names end in a dot so that no search list applies.
	resolve func(ctx context.Context, network, host string) ([]netip.Addr, error)

	mu      sync.Mutex
	lookups map[string]lookup
}

// lookup is the result of a lookup.
type lookup struct {
	addrs []netip.Addr
	err   error
	until time.Time
}

func (c *cache) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	c.mu.Lock()
	a, ok := c.lookups[host]
	c.mu.Unlock()
	if ok && time.Now().Before(a.until) {
		return a.addrs, a.err
	}
	a.addrs, a.err = c.resolve(ctx, "ip", host+".")
	if len(a.addrs) > maxFound {
		a.addrs = slices.Clone(a.addrs[:maxFound])
	}
	if a.err == nil && len(a.addrs) == 0 {
		a.err = &net.DNSError{Err: "it has no address", Name: host, IsNotFound: true}
	}
	dnsError, ok := errors.AsType[*net.DNSError](a.err)
	switch {
	case a.err == nil:
		a.until = time.Now().Add(foundFor)
	case ok && dnsError.IsNotFound:
		a.until = time.Now().Add(missingFor)
	default:
		return nil, a.err
	}
	c.store(host, a)
	return a.addrs, a.err
}

// store stores the result for a host. A full cache drops expired names, then arbitrary ones.
func (c *cache) store(host string, a lookup) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lookups == nil {
		c.lookups = map[string]lookup{}
	}
	if _, ok := c.lookups[host]; !ok && len(c.lookups) >= maxNames {
		now := time.Now()
		maps.DeleteFunc(c.lookups, func(_ string, old lookup) bool { return now.After(old.until) })
		for name := range c.lookups {
			if len(c.lookups) < maxNames {
				break
			}
			delete(c.lookups, name)
		}
	}
	c.lookups[host] = a
}

// newResolver returns Go's resolver with these servers instead of the system's. The
// first is queried until it does not respond, then the next; after the last comes
// the first again.
func newResolver(servers []netip.AddrPort) *net.Resolver {
	var current atomic.Uint32
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		index := current.Load()
		failed := func() { current.CompareAndSwap(index, index+1) }
		server := servers[int(index)%len(servers)]
		conn, err := new(net.Dialer).DialContext(ctx, network, server.String())
		if err != nil {
			failed()
			return nil, err
		}
		if udp, ok := conn.(*net.UDPConn); ok {
			return &watched{udp, failed}, nil
		}
		return conn, nil
	}}
}

// watched calls failed when a server does not respond. It is a net.PacketConn, by
// which the resolver recognizes UDP.
type watched struct {
	*net.UDPConn
	failed func()
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.UDPConn.Read(b)
	if err != nil {
		w.failed()
	}
	return n, err
}
