package egress

import (
	"errors"
	"net/http"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

// maxSenderRequests and maxRequests bound the requests under way, of one client and of
// all. A connection of HTTP/2 may have hundreds, each with its buffers.
const (
	maxSenderRequests = 512
	maxRequests       = 4096
)

// maxHeld and maxHeldAll bound the bytes of bodies that are in memory to be searched for
// placeholders, of one client and of all. The largest body has 1 MiB, and 2 after the
// exchange.
const (
	maxHeld    = 16 << 20
	maxHeldAll = 128 << 20
)

// maxAttempts and maxAttemptsAll bound the connections to servers that are being made
// for requests, of one client and of all. Each request under way may make one, until the
// upstream is known to speak HTTP/2. The other half is for requests that have ended, whose
// connections the library goes on making.
const (
	maxAttempts    = 2 * maxSenderRequests
	maxAttemptsAll = 2 * maxRequests
)

// maxWideRequests is how many requests of a client have responses with up to 2 MiB
// waiting in the node, as with stack.Limits.Wide; maxWide is the limit of all clients.
// Beyond that it is 128 KiB, so that a hostile sandbox ties up 0.2 GiB there.
const maxWideRequests = 64

// load is what requests use, of a client or of all.
type load struct {
	requests *quota.Pool // under way
	attempts *quota.Pool // to connect, which outlive their requests
	bodies   *quota.Pool // bytes in memory
}

func newLoad() load {
	return load{quota.New(maxRequests), quota.New(maxAttemptsAll), quota.New(maxHeldAll)}
}

// child returns the load of one client.
func (l load) child() load {
	return load{l.requests.Child(maxSenderRequests), l.attempts.Child(maxAttempts), l.bodies.Child(maxHeld)}
}

// narrow reports whether more requests are under way than may be wide.
func (m *sender) narrow() bool {
	return m.load.requests.Used() > maxWideRequests || m.e.load.requests.Used() > maxWide
}

// full refuses a request beyond a limit.
func (x *exchange) full(w http.ResponseWriter, r *http.Request, err error) {
	of := "requests under way of the sender"
	if errors.Is(err, quota.ErrTotalExceeded) {
		of = "requests under way in the node"
	}
	x.refuse(w, r, problem.EgressLimitExceeded, "a limit was reached: "+of)
}

// hold reports whether a body of so many bytes may be held in memory. It counts until
// the exchange ends.
func (x *exchange) hold(bytes int64) bool {
	if x.m.load.bodies.TryAcquire(bytes) != nil {
		return false
	}
	x.held += bytes
	return true
}
