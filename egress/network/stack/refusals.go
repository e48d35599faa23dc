package stack

import (
	"net/netip"
	"time"
)

const (
	// refusedAgain is the interval in which refused datagrams to one destination are
	// reported once: a QUIC client sends several before it falls back.
	refusedAgain = 5 * time.Second
	// maxRefusedReported is the maximum number of destinations reported in that interval:
	// each report becomes a log line, and a packet costs the sandbox almost nothing.
	maxRefusedReported = 32
)

// refusals records the recently reported destinations of refused datagrams.
type refusals struct {
	reported map[netip.AddrPort]struct{}
	since    time.Time
}

// isNew reports whether a refusal must be reported, and records it.
func (r *refusals) isNew(to netip.AddrPort, now time.Time) bool {
	if r.reported == nil || now.Sub(r.since) >= refusedAgain {
		r.reported, r.since = map[netip.AddrPort]struct{}{}, now
	}
	if _, known := r.reported[to]; known || len(r.reported) >= maxRefusedReported {
		return false
	}
	r.reported[to] = struct{}{}
	return true
}

func (s *Stack) reportRefused(to netip.AddrPort) {
	if s.refused.isNew(to, time.Now()) {
		s.cfg.Refused(to)
	}
}
