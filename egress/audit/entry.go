// Package audit records outbound flows with their verdicts: the latest entries of each
// sandbox in memory, a line for each in the node's log, and metrics.
//
// Entries hold no query string, no value of a header, no body and no secret:
// what is not in Entry cannot be kept.
package audit

import (
	"net/netip"
	"time"
)

// Kind is what an entry is about.
type Kind string

const (
	DNS        Kind = "dns"        // a name that was asked for and refused
	Connection Kind = "connection" // a TCP flow
	Request    Kind = "request"    // an HTTP request within a flow that is intercepted
)

// Verdict is what became of it.
type Verdict string

const (
	Allow   Verdict = "allow"   // it went to the host
	Deny    Verdict = "deny"    // it was refused
	Respond Verdict = "respond" // a rule or a policy responded instead of the host
	Error   Verdict = "error"   // it was allowed and failed
)

// Entry is one flow, request or refusal, told when it has ended. Texts that are
// too long are cut, and characters that cannot be printed replaced.
type Entry struct {
	// Seq rises by one with each entry of a sandbox. It goes on rising when the
	// node restarts, unless its clock was set back.
	Seq uint64 `json:"seq"`
	// Time is when it was recorded.
	Time    time.Time `json:"time"`
	Sandbox string    `json:"sandbox"`
	// Flow is the same in all entries about one connection.
	Flow string `json:"flow,omitempty"`
	Kind Kind   `json:"kind"`

	Host string `json:"host,omitempty"`
	// Address is the real one that was dialled, or that the sandbox named.
	Address netip.Addr `json:"address,omitzero"`
	Port    uint16     `json:"port,omitempty"`
	Method  string     `json:"method,omitempty"`
	Path    string     `json:"path,omitempty"` // without the query

	// Rule that decided, as source/name.
	Rule     string   `json:"rule,omitempty"`
	Policies []Policy `json:"policies,omitempty"`
	Verdict  Verdict  `json:"verdict"`
	Reason   string   `json:"reason,omitempty"`
	// Secrets are the names of those that were used.
	Secrets []string `json:"secrets,omitempty"`
	// Notes are what policies said of it.
	Notes []string `json:"notes,omitempty"`

	Status   int          `json:"status,omitempty"`
	BytesOut int64        `json:"bytes_out,omitempty"` // from the sandbox
	BytesIn  int64        `json:"bytes_in,omitempty"`  // to it
	Duration Milliseconds `json:"duration_ms,omitempty"`

	// Dropped is how many entries a follower lost before this one, because it
	// read too slowly.
	Dropped uint64 `json:"dropped,omitempty"`
}

// Policy that ran.
type Policy struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
}

// Milliseconds is how long something took.
type Milliseconds float64

// Took returns a duration in milliseconds, to the microsecond.
func Took(d time.Duration) Milliseconds {
	return Milliseconds(float64(d.Microseconds()) / 1000)
}

func (m Milliseconds) seconds() float64 { return float64(m) / 1000 }
