package audit

import (
	"log/slog"
	"sync"
	"time"
)

// Config of a Log. What is zero has its default.
type Config struct {
	// Entries and Bytes are how much is kept of each sandbox: the latest 1000
	// entries, but no more than 512 KiB of them. An entry takes some 600 bytes.
	Entries int
	Bytes   int
	// TotalBytes bounds what is kept of all: 128 MiB. All sandboxes have the
	// same share of it, so that none pushes out what another did.
	TotalBytes int
	// Lines is how many lines a second each sandbox may have in the node's log
	// for long, 10, and LineBurst how many at once, 1000; twice that, as
	// refusals and failures are counted apart from the rest. So one sandbox
	// writes at most some 500 MB a day, while an installation of a thousand
	// packages is there line by line.
	Lines     float64
	LineBurst int
	// Log gets the lines; none if nil.
	Log *slog.Logger
	// Name returns the name of a sandbox for its lines, or nothing.
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

// Log is the record of all sandboxes. It has no goroutines and is safe for
// concurrent use. It is a prometheus.Collector.
type Log struct {
	cfg     Config
	metrics *metrics

	mu     sync.RWMutex // before that of a book
	books  map[string]*book
	share  int // bytes that each book may hold
	closed bool
}

// New returns an empty Log.
func New(cfg Config) *Log {
	cfg.defaults()
	return &Log{cfg: cfg, metrics: newMetrics(), books: map[string]*book{}, share: cfg.Bytes}
}

// Record keeps an entry and tells everybody. Seq, Time and Dropped are set here.
// It never waits for a reader, but for the handler of the node's log.
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

// Entries returns what is kept of a sandbox, oldest first.
func (l *Log) Entries(sandbox string, f Filter) []Entry {
	l.mu.RLock()
	b := l.books[sandbox]
	l.mu.RUnlock()
	if b == nil {
		return nil
	}
	return b.matching(&f)
}

// Follow returns the entries that are kept, as Entries does, and then those to
// come, until stop is called, the sandbox is forgotten or the Log closes: then
// the channel is closed. A reader who is 256 entries behind loses some; the next
// one says how many (Entry.Dropped). It serves who asks before a sandbox sent
// anything.
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

// unfollow ends a subscription. A book that only followers asked for goes with
// the last of them.
func (l *Log) unfollow(sandbox string, b *book, fl *follower) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.end(fl)
	if l.books[sandbox] == b && b.closeUnused() {
		delete(l.books, sandbox)
		l.divide()
	}
}

// Forget drops what is kept of a sandbox and ends who follows it. Its flows have
// ended before: what is recorded later is kept as if of a new one.
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

// Close ends all who follow. Entries may still be recorded and read.
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

// divide sets the share of each book, and trims them if it became smaller. l.mu
// is held.
func (l *Log) divide() {
	before := l.share
	l.share = min(l.cfg.Bytes, l.cfg.TotalBytes/max(1, len(l.books)))
	if l.share < before {
		for _, b := range l.books {
			b.trim(l.share)
		}
	}
}
