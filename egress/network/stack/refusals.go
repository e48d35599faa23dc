package stack

import (
	"net/netip"
	"time"
)

const (
	// refusedAgain is the interval in which refused datagrams to one destination are
	// reported once: a QUIC client sends several before it falls back.
	refusedAgain = 5 * time.Second
	// maxRefusedTold is the maximum number of destinations reported in that interval:
	// each report becomes a log line, and a packet costs the sandbox almost nothing.
	maxRefusedTold = 32
)

// refusals records the recently reported destinations of refused datagrams.
type refusals struct {
	told  map[netip.AddrPort]struct{}
	since time.Time
}

// isNew reports whether a refusal must be reported, and records it.
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
