package dns

import (
	"container/list"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/runtime/netns/link"
)

// names assigns addresses to names. A client identifies its peer by the address, so an
// address must not become another name's while a client may still use it for the first
// one:
//
//   - A name loses its address only if maxNames have one and the name was neither queried
//     nor connected to for maxIdle, also across a restart, which counts as a use. If all
//     names were used within maxIdle, new names have to wait.
//   - The address is then assigned again only after all others that are free: those that
//     were never assigned, then the others in the order in which they were freed. With at
//     most 8,192 assignments an hour out of 130,816 addresses, that takes at least 14
//     hours. Until then the address has no name. A restart forgets the order, because
//     only the addresses of names are stored. It matters only to clients that cache an
//     address for longer than maxIdle without connecting to it.
type names struct {
	limit  int // maxNames, except in tests
	record func(name string, a netip.Addr)
	forget func(a netip.Addr)

	mu        sync.Mutex
	byName    map[string]*list.Element
	byAddress map[uint32]*list.Element // offset in link.Pool
	used      list.List                // of *record, the least recently used first
	next      uint32                   // all offsets from here on were never assigned
	freed     []uint32                 // the other unassigned offsets, the first to be assigned next
}

// maxNames is how many names can have addresses at the same time: less than half of the
// pool, so that there is always a free address.
const maxNames = 8192

// maxIdle is the minimum time for which an unused name retains its address: sixty times
// the TTL of its answer, because some clients cache answers for longer than the TTL.
const maxIdle = time.Hour

type record struct {
	name   string
	offset uint32
	at     time.Time
}

var (
	firstOffset = uint32(1) << (32 - link.Reserved.Bits())
	endOffset   = uint32(1) << (32 - link.Pool.Bits())
)

func toAddress(offset uint32) netip.Addr {
	base := link.Pool.Addr().As4()
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, binary.BigEndian.Uint32(base[:])+offset)))
}

// toOffset is the inverse of toAddress; it returns false for an address that is never assigned.
func toOffset(a netip.Addr) (uint32, bool) {
	if !link.Pool.Contains(a) || link.Reserved.Contains(a) {
		return 0, false
	}
	base, b := link.Pool.Addr().As4(), a.As4()
	return binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:]), true
}

// load adds the addresses that earlier servers assigned. It ignores invalid addresses and
// names. New names get higher addresses first.
func (n *names) load(known map[netip.Addr]string, now time.Time) {
	n.next = firstOffset
	for _, a := range slices.SortedFunc(maps.Keys(known), netip.Addr.Compare) {
		offset, ok := toOffset(a)
		name, err := rule.CleanHost(known[a])
		if !ok || err != nil || n.byName[name] != nil {
			continue
		}
		for ; n.next < offset; n.next++ {
			n.freed = append(n.freed, n.next)
		}
		n.next++
		n.add(&record{name: name, offset: offset, at: now})
	}
}

// add stores a record as the most recently used. n.mu is held.
func (n *names) add(r *record) {
	if n.byName == nil {
		n.byName, n.byAddress = map[string]*list.Element{}, map[uint32]*list.Element{}
	}
	e := n.used.PushBack(r)
	n.byName[r.name], n.byAddress[r.offset] = e, e
}

// assign returns the address of a name, and assigns one if it has none. It returns false
// if it cannot assign one, see names.
//
// It calls record and forget with the lock held, so that no other query for the name gets
// the address before it is recorded.
func (n *names) assign(name string, now time.Time) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byName[name]; e != nil {
		return toAddress(n.touch(e, now).offset), true
	}
	for len(n.byName) >= n.limit {
		oldest := n.used.Front().Value.(*record)
		if now.Sub(oldest.at) < maxIdle {
			return netip.Addr{}, false
		}
		n.used.Remove(n.used.Front())
		delete(n.byName, oldest.name)
		delete(n.byAddress, oldest.offset)
		n.freed = append(n.freed, oldest.offset)
		n.forget(toAddress(oldest.offset))
	}
	offset := n.next
	if offset < endOffset {
		n.next++
	} else {
		offset, n.freed = n.freed[0], n.freed[1:]
	}
	n.add(&record{name: name, offset: offset, at: now})
	n.record(name, toAddress(offset))
	return toAddress(offset), true
}

// touch marks a name as used now. n.mu is held.
func (n *names) touch(e *list.Element, now time.Time) *record {
	n.used.MoveToBack(e)
	r := e.Value.(*record)
	r.at = now
	return r
}

func (n *names) host(a netip.Addr, now time.Time) (string, bool) {
	offset, ok := toOffset(a)
	if !ok {
		return "", false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.byAddress[offset]
	if e == nil {
		return "", false
	}
	return n.touch(e, now).name, true
}
