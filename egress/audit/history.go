package audit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/loglimit"
)

// book is what is kept of one sandbox.
type book struct {
	mu        sync.Mutex
	entries   ring
	seq       uint64 // of the latest entry
	followers map[*follower]struct{}
	closed    bool // another one may be its sandbox's now

	// harmless and refused bound the lines in the node's log: a flood of harmless requests
	// does not hide a refusal.
	harmless, refused *loglimit.Limit
}

// newBook begins to count at the time in microseconds, so that a follower who
// comes back after the node restarted has seen smaller numbers. JSON's numbers
// are exact up to 2^53, which is in the year 2255.
func newBook(cfg *Config, now time.Time) *book {
	perSecond := rate.Limit(cfg.Lines)
	return &book{
		seq:      uint64(now.UnixMicro()),
		harmless: loglimit.New(perSecond, cfg.LineBurst), refused: loglimit.New(perSecond, cfg.LineBurst),
	}
}

// append keeps e, with its seq and time, and tells followers; false if the book
// is closed.
func (b *book) append(e *Entry, entries, bytes int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.seq++
	e.Seq, e.Time = b.seq, time.Now().UTC()
	b.entries.push(e, entries)
	b.entries.trim(bytes)
	for f := range b.followers {
		f.tell(e)
	}
	return true
}

func (b *book) matching(f *Filter) []Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entries.matching(f)
}

// trim is for a share that has become smaller.
func (b *book) trim(bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entries.trim(bytes)
	b.entries.fit()
}

// close ends the followers and keeps nothing from now on.
func (b *book) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.endFollowers()
}

// closeUnused closes a book without entries and followers.
func (b *book) closeUnused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = b.entries.n == 0 && len(b.followers) == 0
	return b.closed
}
