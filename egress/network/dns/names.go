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

// names are the addresses that names have. What is here for a client is who it
// speaks to, so that an address must not become another name's while somebody
// may still mean the first one:
//
//   - A name keeps its address until so many others came that there is no room,
//     and has been neither asked for nor connected to for maxIdle. If all were,
//     new names have to wait.
//   - The address of a name that went is given to another one only when all
//     others of the pool were given in the meantime: 130,816, of which 8,192 an
//     hour is the most, so after 14 hours. Until then it is nobody's.
type names struct {
	most int

	mu        sync.Mutex
	byName    map[string]*list.Element
	byAddress map[uint32]*list.Element // offset in link.Pool
	used      list.List                // of *record, the longest unused first
	next      uint32                   // offset to be given next, if it is free
}

// maxIdle is for how long a name keeps its address at least: sixty times as long
// as its answer may be kept, for there are clients that keep it longer.
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

// toOffset is of addresses that are given out only.
func toOffset(a netip.Addr) (uint32, bool) {
	if !link.Pool.Contains(a) || link.Reserved.Contains(a) {
		return 0, false
	}
	base, b := link.Pool.Addr().As4(), a.As4()
	return binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:]), true
}

// load takes what earlier servers gave, and goes on after the highest address.
// If there is more than fits, the highest remain.
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

// after returns the offset that follows in the pool.
func after(offset uint32) uint32 {
	if offset+1 == endOffset {
		return firstOffset
	}
	return offset + 1
}

// add keeps a record. n.mu is held.
func (n *names) add(r *record) {
	if n.byName == nil {
		n.byName, n.byAddress = map[string]*list.Element{}, map[uint32]*list.Element{}
	}
	e := n.used.PushBack(r)
	n.byName[r.name], n.byAddress[r.offset] = e, e
}

// given says what give did.
type given struct {
	address   netip.Addr
	isNew     bool
	forgotten string // the name that lost its address, if one did
	freed     netip.Addr
}

// give returns the address of a name, which gets one if it has none; false if
// there is no room.
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

// touch notes that a name is in use. n.mu is held.
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
