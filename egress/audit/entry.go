// Package audit records outbound flows with their verdicts: the latest entries of each
// sandbox in memory, a line for each in the node's log, and metrics.
//
// Entries contain no query string, header value, body or secret: Entry has no field
// for them.
package audit

import (
	"net/netip"
	"time"
)

// Kind is the kind of traffic that an entry records.
type Kind string

const (
	DNS        Kind = "dns"        // a refused DNS query
	Connection Kind = "connection" // a TCP flow
	Request    Kind = "request"    // an HTTP request within an intercepted flow
)

// Verdict is the outcome of a flow, request or DNS query.
type Verdict string

const (
	Allow   Verdict = "allow"   // it went to the host
	Deny    Verdict = "deny"    // it was refused
	Respond Verdict = "respond" // a rule or a policy responded instead of the host
	Error   Verdict = "error"   // it was allowed and failed
)

// Entry is one flow, request or refusal, recorded when it has ended. Long texts are
// truncated, and unprintable characters are replaced.
type Entry struct {
	// Seq increases by one with each entry of a sandbox. It continues to increase
	// after a restart of the node, unless the node's clock was set back.
	Seq uint64 `json:"seq"`
	// Time is the time of recording.
	Time    time.Time `json:"time"`
	Sandbox string    `json:"sandbox"`
	// Flow identifies a connection: all its entries have the same value.
	Flow string `json:"flow,omitempty"`
	Kind Kind   `json:"kind"`

	Host string `json:"host,omitempty"`
	// Address is the real address that was dialed, or the one that the sandbox named.
	Address netip.Addr `json:"address,omitzero"`
	Port    uint16     `json:"port,omitempty"`
	Method  string     `json:"method,omitempty"`
	Path    string     `json:"path,omitempty"` // without the query

	// Rule is the rule that decided, as source/name.
	Rule     string   `json:"rule,omitempty"`
	Policies []Policy `json:"policies,omitempty"`
	Verdict  Verdict  `json:"verdict"`
	Reason   string   `json:"reason,omitempty"`
	// Secrets are the names of the secrets that were used.
	Secrets []string `json:"secrets,omitempty"`
	// Notes are the notes that policies added.
	Notes []string `json:"notes,omitempty"`

	Status   int          `json:"status,omitempty"`
	BytesOut int64        `json:"bytes_out,omitempty"` // from the sandbox
	BytesIn  int64        `json:"bytes_in,omitempty"`  // to the sandbox
	Duration Milliseconds `json:"duration_ms,omitempty"`

	// Dropped is the number of entries that a follower lost before this one, because
	// it read too slowly.
	Dropped uint64 `json:"dropped,omitempty"`
}

// Policy identifies a policy that ran.
type Policy struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
}

// Milliseconds is a duration in milliseconds.
type Milliseconds float64

// Took returns a duration in milliseconds, to the microsecond.
func Took(d time.Duration) Milliseconds {
	return Milliseconds(float64(d.Microseconds()) / 1000)
}

func (m Milliseconds) seconds() float64 { return float64(m) / 1000 }
