package stack

import (
	"cmp"
	"net/netip"
	"time"
)

// Limits of one stack. Zero means the default.
type Limits struct {
	// Connections is how many connections may exist at the same time, in any state,
	// including those that the Handler has closed and the sandbox has not; default
	// 1024. Further ones are reset.
	Connections int
	// Attempts is how many connections may wait for the Handler to decide, which
	// may take as long as dialing does, or for the sandbox to complete the
	// handshake; default 128. Further ones are reset.
	Attempts int
	// Wide is how many connections may have socket buffers that grow with their use,
	// up to link.MaxReceiveBuffer and link.MaxSendBuffer; default 64. All others have
	// 128 KiB each way. So a hostile sandbox can make the node buffer at most 0.4 GiB.
	Wide int
	// Idle is how long the stack accepts on the listener without a connection; default 1 minute.
	Idle time.Duration
}

func (l Limits) withDefaults() Limits {
	return Limits{
		Connections: cmp.Or(l.Connections, 1024),
		Attempts:    cmp.Or(l.Attempts, 128),
		Wide:        cmp.Or(l.Wide, 64),
		Idle:        cmp.Or(l.Idle, time.Minute),
	}
}

// maxQueries is how many name queries may be in flight. Further ones are dropped, and the
// client sends them again.
const maxQueries = 64

// Exceeded is a limit that was reached.
type Exceeded string

const (
	Connections    Exceeded = "connections"
	Attempts       Exceeded = "connection attempts"
	AllConnections Exceeded = "connections of all sandboxes"
	Queries        Exceeded = "name queries"
)

// exceededEvery is the minimum interval of calls to Config.Exceeded for one limit: short
// enough for a log, and no load if a sandbox constantly exceeds the limit.
const exceededEvery = 10 * time.Second

// reportExceeded calls Config.Exceeded, at most once per exceededEvery and limit. Only the
// reader calls it.
func (s *Stack) reportExceeded(what Exceeded) {
	now := time.Now()
	if now.Sub(s.exceeded[what]) < exceededEvery { // never reported: the zero time
		return
	}
	s.exceeded[what] = now
	s.cfg.Exceeded(what)
}

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
