package egress

import (
	"net/http"

	"github.com/doze-run/doze/egress/intercept"
)

// Requests that are under way at a time: of one sender, and of all together. A
// connection of HTTP/2 may have hundreds, and of each answer that its client does not
// read the node holds up to 2 MiB.
const (
	maxSenderRequests = 512
	maxRequests       = 4096
)

// begin takes room for a request of the sender, or says what there is no room for.
// Who got room gives it back with finish.
func (m *sender) begin() (full string) {
	if m.requests.Add(1) > maxSenderRequests {
		m.requests.Add(-1)
		return "requests under way of the sender"
	}
	if m.e.requests.Add(1) > maxRequests {
		m.e.requests.Add(-1)
		m.requests.Add(-1)
		return "requests under way in the node"
	}
	return ""
}

func (m *sender) finish() {
	m.e.requests.Add(-1)
	m.requests.Add(-1)
}

// full refuses a request for which there is no room.
func (x *exchange) full(w http.ResponseWriter, r *http.Request, of string) {
	x.denied(http.StatusServiceUnavailable, "a limit was reached: "+of)
	intercept.Refuse(w, r, http.StatusServiceUnavailable, intercept.Refusal{
		Code: codeLimit, Reason: x.entry.Reason, Host: x.to.host,
	})
}
