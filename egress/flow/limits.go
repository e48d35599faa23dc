package flow

import (
	"errors"

	"github.com/doze-run/doze/quota"
)

// Limits of requests under way, of one client and of all. An HTTP/2 connection may have
// hundreds, each with its buffers.
const (
	MaxClientRequests = 512
	MaxRequests       = 4096
)

// Limits of the bytes of bodies in memory that are searched for placeholders, of one client
// and of all. The largest body has 1 MiB, and 2 MiB after the replacement.
const (
	MaxClientBodies = 16 << 20
	MaxBodies       = 128 << 20
)

// Limits of the bytes of bodies in memory that policies read or write, of one client and of
// all: 64 and 512 of the largest. Without them, each request under way could hold several.
const (
	MaxClientPolicyBodies = 64 << 20
	MaxPolicyBodies       = 512 << 20
)

// Limits of the connections to upstreams that are being made for requests, of one client
// and of all. Each request under way may make one, until the upstream is known to speak
// HTTP/2. The other half is for requests that have ended, whose connections net/http
// continues to make.
const (
	MaxClientDials = 2 * MaxClientRequests
	MaxDials       = 2 * MaxRequests
)

// Limits of the requests whose responses may have up to 2 MiB waiting in the node, of one
// client and of all. The limit of other responses is 128 KiB, so that a hostile sandbox
// occupies at most 0.2 GiB. MaxLargeWindows also limits the connections of all sandboxes
// whose buffers may grow, to some 3.5 MiB each: 1.8 GiB at most.
const (
	MaxClientLargeWindows = 64
	MaxLargeWindows       = 512
)

// Limits of the responses that are decoded with a window of up to 16 MiB, of one client and
// of all: 256 MiB and 2 GiB. Requests beyond the limit accept codings with smaller windows
// only. Few responses to programs are encoded in this way.
const (
	MaxClientWindows = 16
	MaxWindows       = 128
)

// Usage counts the resources that requests use, of one client or of all.
type Usage struct {
	Requests *quota.Pool // under way
	Dials    *quota.Pool // connections that are being made, which may outlive their requests
	Bodies   *quota.Pool // bytes in memory that are searched for placeholders
	Windows  *quota.Pool // large windows of decoders
	// PolicyBodies counts bytes in memory that policies read or write.
	PolicyBodies *quota.Pool
}

// SmallWindow reports whether more requests are under way than may have large windows.
func (c *Client) SmallWindow() bool {
	return c.Usage.Requests.Used() > MaxClientLargeWindows || c.carrier.Usage.Requests.Used() > MaxLargeWindows
}

// limitReason returns the reason for a refusal by a quota.
func limitReason(err error, ofClient, ofAll string) string {
	if errors.Is(err, quota.ErrTotalExceeded) {
		return "a limit was reached: " + ofAll
	}
	return "a limit was reached: " + ofClient
}
