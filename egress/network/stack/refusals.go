package stack

import (
	"net/netip"
	"time"
)

const (
	// refusedAgain is after how long a refusal of datagrams is told once more that go
	// to the same place: a client of QUIC sends several before it falls back.
	refusedAgain = 5 * time.Second
	// maxRefusedTold bounds how many places are told within that time: what is told
	// becomes a line in a log, and a packet costs the sandbox next to nothing.
	maxRefusedTold = 32
)

// refusals remembers which refusals of datagrams were told lately.
type refusals struct {
	told  map[netip.AddrPort]struct{}
	since time.Time
}

// isNew says whether a refusal is to be told.
func (r *refusals) isNew(to netip.AddrPort, now time.Time) bool {
	if r.told == nil || now.Sub(r.since) >= refusedAgain {
		r.told, r.since = map[netip.AddrPort]struct{}{}, now
	}
	if _, told := r.told[to]; told || len(r.told) >= maxRefusedTold {
		return false
	}
	r.told[to] = struct{}{}
	return true
}

func (s *Stack) tellRefused(to netip.AddrPort) {
	if s.cfg.Refused != nil && s.refused.isNew(to, time.Now()) {
		s.cfg.Refused(to)
	}
}
