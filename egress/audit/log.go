package audit

import (
	"log/slog"
	"sync"
	"time"
)

// Config configures a Log. Zero fields have their defaults.
type Config struct {
	// Entries and Bytes bound the stored entries of each sandbox: by default the latest
	// 1000, and at most 512 KiB. An entry takes some 600 bytes.
	Entries int
	Bytes   int
	// TotalBytes bounds the stored entries of all sandboxes: by default 128 MiB. All
	// sandboxes have equal shares, so that no sandbox evicts another's entries.
	TotalBytes int
	// Lines is the sustained rate of lines per second of each sandbox in the node's
	// log, by default 10, and LineBurst the burst, by default 1000. Both limits apply
	// twice, because refusals and failures are counted separately from other entries.
	// One sandbox writes at most some 500 MB a day, but an installation of a thousand
	// packages is logged completely.
	Lines     float64
	LineBurst int
	// Log receives the lines. If nil, no lines are written.
	Log *slog.Logger
	// Name returns the name of a sandbox for its lines, or "".
	Name func(sandbox string) string
}

func (c *Config) defaults() {
	if c.Entries == 0 {
		c.Entries = 1000
	}
	if c.Bytes == 0 {
		c.Bytes = 512 << 10
	}
	if c.TotalBytes == 0 {
		c.TotalBytes = 128 << 20
	}
	if c.Lines == 0 {
		c.Lines = 10
	}
	if c.LineBurst == 0 {
		c.LineBurst = 1000
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Name == nil {
		c.Name = func(string) string { return "" }
	}
}

// Log records the flows of all sandboxes. It has no goroutines and is safe for
// concurrent use. It implements prometheus.Collector.
type Log struct {
	cfg     Config
	metrics *metrics

	mu     sync.RWMutex // locked before a book's mu
	books  map[string]*book
	share  int // bytes that each book may hold
	closed bool
}

// New returns an empty Log.
func New(cfg Config) *Log {
	cfg.defaults()
	return &Log{cfg: cfg, metrics: newMetrics(), books: map[string]*book{}, share: cfg.Bytes}
}

// Record stores an entry, sends it to followers, counts it in the metrics and logs it.
// Record sets Seq, Time and Dropped. It never waits for a reader, but it waits for the
// handler of the node's log.
func (l *Log) Record(e Entry) {
	e.bound()
	e.Dropped = 0
	l.metrics.count(&e)
	b, share := l.open(e.Sandbox)
	for !b.append(&e, l.cfg.Entries, share) {
		b, share = l.open(e.Sandbox)
	}
	b.line(l, &e)
}

// Entries returns the stored entries of a sandbox that f matches, oldest first.
func (l *Log) Entries(sandbox string, f Filter) []Entry {
	l.mu.RLock()
	b := l.books[sandbox]
	l.mu.RUnlock()
	if b == nil {
		return nil
	}
	return b.matching(&f)
}

// Follow returns the stored entries, as Entries does, and then new ones. The channel is
// closed when stop is called, the sandbox is forgotten or the Log closes. A reader that
// lags behind by more than 256 entries loses some; Entry.Dropped of the next one is
// their number. Follow may be called before the sandbox has sent anything.
func (l *Log) Follow(sandbox string, f Filter) (entries <-chan Entry, stop func()) {
	for {
		b, _ := l.open(sandbox)
		if fl := b.follow(f); fl != nil {
			if l.isClosed() {
				b.end(fl)
			}
			return fl.entries, func() { l.unfollow(sandbox, b, fl) }
		}
	}
}

func (l *Log) isClosed() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.closed
}

// unfollow ends a subscription. A book without entries is removed with its last
// follower.
func (l *Log) unfollow(sandbox string, b *book, fl *follower) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.end(fl)
	if l.books[sandbox] == b && b.closeUnused() {
		delete(l.books, sandbox)
		l.divide()
	}
}

// Forget deletes the entries of a sandbox and ends its followers. The caller must end
// the sandbox's flows first: later entries are stored as if of a new sandbox.
func (l *Log) Forget(sandbox string) {
	l.mu.Lock()
	b := l.books[sandbox]
	if b != nil {
		b.close()
		delete(l.books, sandbox)
		l.divide()
	}
	l.mu.Unlock()
	if b != nil {
		b.lastLine(l, sandbox)
	}
}

// Close ends all followers. Entries may still be recorded and read.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, b := range l.books {
		b.endAll()
	}
}

// open returns the book of a sandbox, with the bytes that it may hold.
func (l *Log) open(sandbox string) (*book, int) {
	l.mu.RLock()
	b, share := l.books[sandbox], l.share
	l.mu.RUnlock()
	if b != nil {
		return b, share
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if b = l.books[sandbox]; b == nil {
		b = newBook(&l.cfg, time.Now())
		l.books[sandbox] = b
		l.divide()
	}
	return b, l.share
}

// divide sets the share of each book, and trims the books if it became smaller. The
// caller holds l.mu.
func (l *Log) divide() {
	before := l.share
	l.share = min(l.cfg.Bytes, l.cfg.TotalBytes/max(1, len(l.books)))
	if l.share < before {
		for _, b := range l.books {
			b.trim(l.share)
		}
	}
}
