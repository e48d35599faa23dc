// Package policylog retains the latest lines of output of each policy, in memory, for
// the policy's owner.
//
// Policies hold no secret and see no response before secrets were taken out of it, so
// that no line has one.
package policylog

import (
	"slices"
	"time"

	"github.com/doze-run/doze/egress/feed"
)

// Level of a line.
type Level string

const (
	Debug Level = "debug"
	Info  Level = "info"
	Warn  Level = "warn"
	Error Level = "error"
)

// levels in their order.
var levels = []Level{Debug, Info, Warn, Error}

// Line is a line that a policy logged, or wrote to its output.
type Line struct {
	// Seq increases by one with each line of a policy. It continues to increase after a
	// restart of the node, unless the node's clock was set back.
	Seq  uint64    `json:"seq"`
	Time time.Time `json:"time"`
	// Level is info for lines of an output.
	Level Level `json:"level" enum:"debug,info,warn,error"`
	// Text has no line breaks, and at most 1 KiB.
	Text string `json:"text"`
	// Flow is the flow in the audit log during which the line was written; missing while
	// an instance of the policy starts.
	Flow        string `json:"flow,omitempty"`
	Sandbox     string `json:"sandbox,omitempty"` // its id
	SandboxName string `json:"sandbox_name,omitempty"`
	// Dropped is the number of lines that a follower lost before this one, because it read
	// too slowly.
	Dropped uint64 `json:"dropped,omitempty"`
}

// size of a line in memory.
func (l *Line) size() int {
	return 150 + len(l.Text) + len(l.Flow) + len(l.Sandbox) + len(l.SandboxName)
}

// Filter selects lines.
type Filter struct {
	After uint64 // only those with a higher Seq
	Level Level  // this level and above; empty: all
}

func (f *Filter) match(l *Line) bool {
	return l.Seq > f.After && slices.Index(levels, l.Level) >= slices.Index(levels, f.Level)
}

// Policy is the name of an owner's policy.
type Policy struct{ Owner, Name string }

// Limits of the stored lines, of each policy and of all: policies share the latter equally.
const (
	maxLines = 1000
	maxBytes = 256 << 10
	maxTotal = 64 << 20
)

// Log has the lines of all policies.
type Log struct{ *feed.Feed[Policy, Line] }

// New returns an empty Log.
func New() *Log {
	return &Log{feed.New[Policy](feed.Config[Line]{
		Entries: maxLines, Bytes: maxBytes, TotalBytes: maxTotal, Size: (*Line).size,
		Header: func(l *Line) feed.Header { return feed.Header{Seq: &l.Seq, Time: &l.Time, Dropped: &l.Dropped} },
	})}
}

// Add stores a line and sends it to followers. It sets Seq, Time and Dropped, and never
// waits for a reader.
func (l *Log) Add(p Policy, line Line) { l.Feed.Add(p, &line) }

// Lines returns the stored lines of a policy, oldest first.
func (l *Log) Lines(p Policy, f Filter) []Line { return l.Entries(p, f.match) }

// Follow returns the stored lines and then new ones, until stop is called, the policy is
// forgotten or the Log closes: then the channel is closed.
func (l *Log) Follow(p Policy, f Filter) (lines <-chan Line, stop func()) {
	return l.Feed.Follow(p, f.match)
}
