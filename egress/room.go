package egress

import (
	"net/http"
	"sync/atomic"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/problem"
)

// maxSenderRequests and maxRequests are how many requests are under way, of one sender
// and of all. A connection of HTTP/2 may have hundreds, each with its buffers.
const (
	maxSenderRequests = 512
	maxRequests       = 4096
)

// maxHeld and maxHeldAll are how many bytes of bodies are in memory because
// placeholders are looked for in them, of one sender and of all. The largest has
// 1 MiB, what becomes of it 2.
const (
	maxHeld    = 16 << 20
	maxHeldAll = 128 << 20
)

// maxAttempts and maxAttemptsAll are how many connections to servers are being made
// for requests, of one sender and of all. Each request that is under way may make one:
// to a host of which nobody knows yet that it speaks HTTP/2. The other half is for
// those whose requests have ended, which the library goes on making.
const (
	maxAttempts    = 2 * maxSenderRequests
	maxAttemptsAll = 2 * maxRequests
)

// maxWideRequests is how many requests of a sender have answers of which up to 2 MiB
// may wait in the node, as with stack.Limits.Wide; maxWide are those of all. Beyond
// that it is 128 KiB, so that what a hostile sandbox leaves there is 0.2 GiB.
const maxWideRequests = 64

// room is how much there is of something that is bounded.
type room struct{ used atomic.Int64 }

// take takes n, unless there would be more than limit.
func (r *room) take(n, limit int64) bool {
	if r.used.Add(n) > limit {
		r.used.Add(-n)
		return false
	}
	return true
}

func (r *room) give(n int64) { r.used.Add(-n) }

// load is what requests tie up, of a sender or of all.
type load struct {
	requests room // under way
	attempts room // to connect, which outlive their requests
	held     room // bytes of bodies
}

// narrow says whether there are more requests than may be wide.
func (m *sender) narrow() bool {
	return m.load.requests.used.Load() > maxWideRequests || m.e.load.requests.used.Load() > maxWide
}

// begin takes room for a request of the sender until finish, or says of what there is
// too much.
func (m *sender) begin() (full string) {
	if !m.load.requests.take(1, maxSenderRequests) {
		return "requests under way of the sender"
	}
	if !m.e.load.requests.take(1, maxRequests) {
		m.load.requests.give(1)
		return "requests under way in the node"
	}
	return ""
}

func (m *sender) finish() {
	m.load.requests.give(1)
	m.e.load.requests.give(1)
}

// full refuses a request for which there is no room.
func (x *exchange) full(w http.ResponseWriter, r *http.Request, of string) {
	x.refuse(w, r, problem.EgressLimitExceeded, "a limit was reached: "+of)
}

// errAttempts is why a request is refused for which another connection would be made.
var errAttempts = &intercept.RefusedError{
	Code:   problem.EgressLimitExceeded,
	Reason: "a limit was reached: connections to servers that are being made",
}

// attempt counts a connection that is being made, until done.
func (m *sender) attempt() (done func(), err error) {
	if !m.load.attempts.take(1, maxAttempts) {
		return nil, errAttempts
	}
	if !m.e.load.attempts.take(1, maxAttemptsAll) {
		m.load.attempts.give(1)
		return nil, errAttempts
	}
	return func() {
		m.load.attempts.give(1)
		m.e.load.attempts.give(1)
	}, nil
}

// hold says whether there is room for a body in memory. It has it until letGo.
func (x *exchange) hold(bytes int64) bool {
	if !x.m.load.held.take(bytes, maxHeld) {
		return false
	}
	if !x.m.e.load.held.take(bytes, maxHeldAll) {
		x.m.load.held.give(bytes)
		return false
	}
	x.held += bytes
	return true
}

func (x *exchange) letGo() {
	x.m.load.held.give(x.held)
	x.m.e.load.held.give(x.held)
}
