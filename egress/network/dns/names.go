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
//   - A name loses its address only if the maximum number of names is reached and the
//     name was neither queried nor connected to for maxIdle. If all names were used
//     within maxIdle, new names have to wait.
//   - The address of a removed name is assigned again only after all other addresses of
//     the pool. These are 130,816, and by default at most 8,192 are assigned an hour, so
//     that takes at least 14 hours. Until then the address has no name.
type names struct {
	most int

	mu        sync.Mutex
	byName    map[string]*list.Element
	byAddress map[uint32]*list.Element // offset in link.Pool
	used      list.List                // of *record, the least recently used first
	next      uint32                   // offset to be assigned next, if it is free
}

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

// load adds the addresses that earlier servers assigned, and continues after the
// highest one. If there are too many, it drops the lowest addresses. Invalid addresses
// and names are dropped, too.
func (n *names) load(known map[netip.Addr]string, now time.Time) {
	n.next = firstOffset
	for _, a := range slices.SortedFunc(maps.Keys(known), func(a, b netip.Addr) int { return b.Compare(a) }) {
		offset, ok := toOffset(a)
		name, err := rule.CleanHost(known[a])
		if !ok || err != nil || n.byName[name] != nil || len(n.byName) == n.most {
			continue
		}
		if n.byName == nil {
			n.next = after(offset)
		}
		n.add(&record{name: name, offset: offset, at: now})
	}
}

// after returns the next offset in the pool; the first one follows the last.
func after(offset uint32) uint32 {
	if offset+1 == endOffset {
		return firstOffset
	}
	return offset + 1
}

// add stores a record as the most recently used. n.mu is held.
func (n *names) add(r *record) {
	if n.byName == nil {
		n.byName, n.byAddress = map[string]*list.Element{}, map[uint32]*list.Element{}
	}
	e := n.used.PushBack(r)
	n.byName[r.name], n.byAddress[r.offset] = e, e
}

// given is the result of give.
type given struct {
	address   netip.Addr
	isNew     bool
	forgotten string // the name that lost its address, if one did
	freed     netip.Addr
}

// give returns the address of a name, and assigns one if it has none. It returns false
// if it cannot assign one, see names.
func (n *names) give(name string, now time.Time) (given, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byName[name]; e != nil {
		return given{address: toAddress(n.touch(e, now).offset)}, true
	}
	g := given{isNew: true}
	if len(n.byName) >= n.most {
		oldest := n.used.Front().Value.(*record)
		if now.Sub(oldest.at) < maxIdle {
			return given{}, false
		}
		n.used.Remove(n.used.Front())
		delete(n.byName, oldest.name)
		delete(n.byAddress, oldest.offset)
		g.forgotten, g.freed = oldest.name, toAddress(oldest.offset)
	}
	for n.byAddress[n.next] != nil {
		n.next = after(n.next)
	}
	n.add(&record{name: name, offset: n.next, at: now})
	g.address = toAddress(n.next)
	n.next = after(n.next)
	return g, true
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
