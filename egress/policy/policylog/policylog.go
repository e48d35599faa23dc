// Package policylog retains the latest lines of output of each policy, in memory, for
// the policy's owner.
//
// Policies hold no secret and see no response before secrets were taken out of it, so
// that no line has one.
package policylog

import (
	"slices"
	"sync"
	"time"
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

// Line is what a policy wrote, with its function log or to its output.
type Line struct {
	// Seq rises by one with each line of a policy. It goes on rising when the node
	// restarts, unless its clock was set back.
	Seq  uint64    `json:"seq"`
	Time time.Time `json:"time"`
	// Level is info for what was written to an output.
	Level Level `json:"level" enum:"debug,info,warn,error"`
	// Text has no line breaks, and at most 1 KiB.
	Text string `json:"text"`
	// Flow is the flow in the audit log during which it was written; missing while
	// an instance of the policy starts.
	Flow        string `json:"flow,omitempty"`
	Sandbox     string `json:"sandbox,omitempty"` // its id
	SandboxName string `json:"sandbox_name,omitempty"`
	// Dropped is how many lines a follower lost before this one, because it read too
	// slowly.
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

// Policy is a name in the hands of an owner.
type Policy struct{ Owner, Name string }

// Limits of the stored lines, of each policy and of all: policies share the latter equally.
const (
	maxLines = 1000
	maxBytes = 256 << 10
	maxTotal = 64 << 20
	// followerBacklog is how many lines a follower may be behind.
	followerBacklog = 256
)

// Log is the lines of all policies. The zero value is ready. It is safe for
// concurrent use.
type Log struct {
	mu     sync.Mutex
	books  map[Policy]*book
	closed bool
}

// book is the lines of one policy. Guarded by Log.mu.
type book struct {
	lines     []Line
	bytes     int
	seq       uint64
	followers map[*follower]struct{}
}

type follower struct {
	filter  Filter
	lines   chan Line
	dropped uint64
}

// book returns a policy's book, and makes it if it is missing. Needs mu.
func (l *Log) book(p Policy) *book {
	b := l.books[p]
	if b == nil {
		if l.books == nil {
			l.books = map[Policy]*book{}
		}
		b = &book{seq: uint64(time.Now().UnixMicro()), followers: map[*follower]struct{}{}}
		l.books[p] = b
		for _, other := range l.books {
			other.trim(l.share())
		}
	}
	return b
}

// share is how many bytes of lines a policy may have. Needs mu.
func (l *Log) share() int { return min(maxBytes, maxTotal/max(1, len(l.books))) }

// Add keeps a line and hands it to those who follow. Seq, Time and Dropped are set
// here. It never waits for a reader.
func (l *Log) Add(p Policy, line Line) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.book(p)
	b.seq++
	line.Seq, line.Time, line.Dropped = b.seq, time.Now().UTC(), 0
	b.lines = append(b.lines, line)
	b.bytes += line.size()
	b.trim(l.share())
	for f := range b.followers {
		f.send(line)
	}
}

// trim drops the oldest lines.
func (b *book) trim(bytes int) {
	n := 0
	for n < len(b.lines) && (len(b.lines)-n > maxLines || b.bytes > bytes) {
		b.bytes -= b.lines[n].size()
		b.lines[n] = Line{}
		n++
	}
	b.lines = b.lines[n:] // append moves them to the beginning of another array
}

// send never waits.
func (f *follower) send(line Line) {
	if !f.filter.match(&line) {
		return
	}
	line.Dropped = f.dropped
	select {
	case f.lines <- line:
		f.dropped = 0
	default:
		f.dropped++
	}
}

// Lines returns what is kept of a policy, oldest first.
func (l *Log) Lines(p Policy, f Filter) []Line {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.books[p]
	if b == nil {
		return nil
	}
	return b.matching(&f)
}

func (b *book) matching(f *Filter) (found []Line) {
	for i := range b.lines {
		if f.match(&b.lines[i]) {
			found = append(found, b.lines[i])
		}
	}
	return found
}

// Follow returns the lines that are kept, and then those to come, until stop is
// called, the policy is forgotten or the Log closes: then the channel is closed.
func (l *Log) Follow(p Policy, f Filter) (lines <-chan Line, stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.book(p)
	kept := b.matching(&f)
	fl := &follower{filter: f, lines: make(chan Line, len(kept)+followerBacklog)}
	for _, line := range kept {
		fl.lines <- line
	}
	if l.closed {
		close(fl.lines)
		return fl.lines, func() {}
	}
	b.followers[fl] = struct{}{}
	return fl.lines, func() { l.unfollow(p, b, fl) }
}

func (l *Log) unfollow(p Policy, b *book, fl *follower) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.endFollower(fl)
	if l.books[p] == b && len(b.lines) == 0 && len(b.followers) == 0 {
		delete(l.books, p)
	}
}

// endFollower ends a follower. It may have ended before.
func (b *book) endFollower(fl *follower) {
	if _, ok := b.followers[fl]; ok {
		delete(b.followers, fl)
		close(fl.lines)
	}
}

// Forget drops the lines of a policy, and ends those who follow it.
func (l *Log) Forget(p Policy) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.books[p]; b != nil {
		for fl := range b.followers {
			b.endFollower(fl)
		}
		delete(l.books, p)
	}
}

// Close ends all followers.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, b := range l.books {
		for fl := range b.followers {
			b.endFollower(fl)
		}
	}
}
