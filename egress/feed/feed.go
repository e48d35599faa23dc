// Package feed stores the latest entries of each of many sources in memory, and sends new
// ones to followers.
package feed

import (
	"sync"
	"time"
)

// Backlog is the number of new entries that a follower may lag behind.
const Backlog = 256

// Config of a Feed. All fields are required.
type Config[E any] struct {
	// Entries and Bytes bound the stored entries of each source.
	Entries, Bytes int
	// TotalBytes bounds the stored entries of all sources. All sources have equal shares, so
	// that no source evicts another's entries.
	TotalBytes int
	// Size returns the memory of an entry, in bytes.
	Size func(*E) int
	// Header returns the fields of an entry that the Feed sets.
	Header func(*E) Header
}

// Header points to the fields of an entry that a Feed sets.
type Header struct {
	// Seq increases by one with each entry of a source. It continues to increase after a
	// restart, unless the clock was set back.
	Seq *uint64
	// Time is the time of Add.
	Time *time.Time
	// Dropped is the number of entries that a follower lost before this one, because it
	// read too slowly.
	Dropped *uint64
}

// Feed stores the entries of sources, which have keys. It has no goroutines and is safe for
// concurrent use. Make one with New.
type Feed[K comparable, E any] struct {
	cfg Config[E]

	mu      sync.Mutex
	sources map[K]*source[E]
	share   int // bytes that each source may store
	closed  bool
}

type source[E any] struct {
	entries   ring[E]
	bytes     int
	seq       uint64 // of the latest entry
	followers map[*follower[E]]struct{}
}

type follower[E any] struct {
	match   func(*E) bool
	entries chan E
	dropped uint64 // since the last entry that was delivered
}

// New returns an empty Feed.
func New[K comparable, E any](cfg Config[E]) *Feed[K, E] {
	return &Feed[K, E]{cfg: cfg, sources: map[K]*source[E]{}, share: cfg.Bytes}
}

// Add sets the header of an entry, stores a copy and sends it to the followers of the
// source. It never waits for a follower.
func (f *Feed[K, E]) Add(key K, e *E) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.open(key)
	if s.entries.n == f.cfg.Entries {
		f.pop(s)
	}
	stored := s.entries.push(*e, f.cfg.Entries)
	s.seq++
	h := f.cfg.Header(stored)
	*h.Seq, *h.Time, *h.Dropped = s.seq, time.Now().UTC(), 0
	*e = *stored // e itself does not escape
	s.bytes += f.cfg.Size(stored)
	for fl := range s.followers {
		f.send(fl, stored)
	}
	f.trim(s)
}

func (f *Feed[K, E]) send(fl *follower[E], e *E) {
	if !fl.match(e) {
		return
	}
	sent := *e
	*f.cfg.Header(&sent).Dropped = fl.dropped
	select {
	case fl.entries <- sent:
		fl.dropped = 0
	default:
		fl.dropped++
	}
}

// open returns a source, and makes it if it does not exist. Its numbers start at the time in
// microseconds, so that they continue to increase for a follower that reconnects after a
// restart. JSON numbers are exact up to 2^53, which is reached in the year 2255.
func (f *Feed[K, E]) open(key K) *source[E] {
	s := f.sources[key]
	if s == nil {
		s = &source[E]{seq: uint64(time.Now().UnixMicro()), followers: map[*follower[E]]struct{}{}}
		f.sources[key] = s
		f.divide()
	}
	return s
}

// divide sets the share of each source, and releases memory if the share became smaller.
func (f *Feed[K, E]) divide() {
	before := f.share
	f.share = min(f.cfg.Bytes, f.cfg.TotalBytes/max(1, len(f.sources)))
	if f.share >= before {
		return
	}
	for _, s := range f.sources {
		f.trim(s)
		if s.entries.n < len(s.entries.slots)/2 {
			s.entries.resize(s.entries.n)
		}
	}
}

// trim removes the oldest entries of a source beyond its share.
func (f *Feed[K, E]) trim(s *source[E]) {
	for s.entries.n > 0 && s.bytes > f.share {
		f.pop(s)
	}
}

func (f *Feed[K, E]) pop(s *source[E]) {
	s.bytes -= f.cfg.Size(s.entries.at(0))
	s.entries.pop()
}

// Entries returns the stored entries of a source that match, oldest first.
func (f *Feed[K, E]) Entries(key K, match func(*E) bool) []E {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.sources[key]; s != nil {
		return s.matching(match)
	}
	return nil
}

func (s *source[E]) matching(match func(*E) bool) (found []E) {
	for i := range s.entries.n {
		if e := s.entries.at(i); match(e) {
			found = append(found, *e)
		}
	}
	return found
}

// Follow returns the entries of Entries and then new ones. The channel is closed when stop
// is called, the source is forgotten or the Feed closes. A follower that lags behind by more
// than Backlog entries loses some; Header.Dropped of the next one is their number.
func (f *Feed[K, E]) Follow(key K, match func(*E) bool) (entries <-chan E, stop func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.open(key)
	stored := s.matching(match)
	fl := &follower[E]{match: match, entries: make(chan E, len(stored)+Backlog)}
	for _, e := range stored {
		fl.entries <- e
	}
	s.followers[fl] = struct{}{}
	stop = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.remove(key, s, fl)
	}
	if f.closed {
		f.remove(key, s, fl)
	}
	return fl.entries, stop
}

// remove ends a follower, which may have ended. A source without entries is removed with its
// last follower.
func (f *Feed[K, E]) remove(key K, s *source[E], fl *follower[E]) {
	s.end(fl)
	if f.sources[key] == s && s.entries.n == 0 && len(s.followers) == 0 {
		delete(f.sources, key)
		f.divide()
	}
}

func (s *source[E]) end(fl *follower[E]) {
	if _, ok := s.followers[fl]; ok {
		delete(s.followers, fl)
		close(fl.entries)
	}
}

// Forget deletes the entries of a source and ends its followers. Later entries are stored as
// if of a new source.
func (f *Feed[K, E]) Forget(key K) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.sources[key]; s != nil {
		s.endFollowers()
		delete(f.sources, key)
		f.divide()
	}
}

// Close ends all followers. Entries may still be added and read.
func (f *Feed[K, E]) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	for _, s := range f.sources {
		s.endFollowers()
	}
}

func (s *source[E]) endFollowers() {
	for fl := range s.followers {
		s.end(fl)
	}
}

// ring holds the latest entries. It grows on demand.
type ring[E any] struct {
	slots []E
	first int // slot of the oldest entry
	n     int
}

// at returns the i-th oldest entry.
func (r *ring[E]) at(i int) *E { return &r.slots[(r.first+i)%len(r.slots)] }

// push adds an entry. The ring has fewer than limit entries.
func (r *ring[E]) push(e E, limit int) (stored *E) {
	if r.n == len(r.slots) {
		r.resize(min(max(8, 2*r.n), limit))
	}
	r.n++
	stored = r.at(r.n - 1)
	*stored = e
	return stored
}

// resize changes the capacity, which must be at least r.n.
func (r *ring[E]) resize(capacity int) {
	slots := make([]E, capacity)
	for i := range r.n {
		slots[i] = *r.at(i)
	}
	r.slots, r.first = slots, 0
}

// pop removes the oldest entry.
func (r *ring[E]) pop() {
	clear(r.slots[r.first : r.first+1])
	r.first = (r.first + 1) % len(r.slots)
	r.n--
}
