package audit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/loglimit"
)

// book holds the entries of one sandbox.
type book struct {
	mu        sync.Mutex
	entries   ring
	seq       uint64 // of the latest entry
	followers map[*follower]struct{}
	closed    bool // the sandbox may have another book now

	// harmless and refused bound the lines in the node's log: a flood of harmless requests
	// does not hide a refusal.
	harmless, refused *loglimit.Limit
}

// newBook returns a book whose seq starts at the time in microseconds, so that the
// numbers continue to increase for a follower that reconnects after a restart of the
// node. JSON numbers are exact up to 2^53, which is reached in the year 2255.
func newBook(cfg *Config, now time.Time) *book {
	perSecond := rate.Limit(cfg.Lines)
	return &book{
		seq:      uint64(now.UnixMicro()),
		harmless: loglimit.New(perSecond, cfg.LineBurst), refused: loglimit.New(perSecond, cfg.LineBurst),
	}
}

// append stores e, sets its seq and time, and sends it to the followers. It returns
// false if the book is closed.
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

// trim reduces the entries to a smaller share, and releases unused memory.
func (b *book) trim(bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entries.trim(bytes)
	b.entries.fit()
}

// close ends the followers. The book stores no entries from now on.
func (b *book) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.endFollowers()
}

// closeUnused closes the book if it has neither entries nor followers, and reports
// whether it did.
func (b *book) closeUnused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = b.entries.n == 0 && len(b.followers) == 0
	return b.closed
}
