package dial

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// own caches the addresses of this node's interfaces. It does not know an address that is
// translated to the node's elsewhere (NAT).
type own struct {
	list func() ([]netip.Addr, error)

	mu    sync.Mutex
	addrs []netip.Addr
	until time.Time
}

// ownFor is how long the list is cached. With few interfaces, listing takes 40 µs,
// as much as a dial within a machine, and the list changes rarely.
const ownFor = time.Second

// has reports whether an address is the node's. If the addresses cannot be listed,
// it returns an error, and nothing is dialed.
func (o *own) has(a netip.Addr) (bool, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); !now.Before(o.until) {
		list, err := o.list()
		if err != nil {
			return false, fmt.Errorf("list this node's addresses: %w", err)
		}
		o.addrs = o.addrs[:0]
		for _, one := range list {
			o.addrs = append(o.addrs, one.Unmap())
		}
		o.until = now.Add(ownFor)
	}
	return slices.Contains(o.addrs, a), nil
}

func interfaceAddresses() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, one := range list {
		if prefix, err := netip.ParsePrefix(one.String()); err == nil {
			addrs = append(addrs, prefix.Addr())
		}
	}
	return addrs, nil
}
