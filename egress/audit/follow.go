package audit

// followerRoom is the number of entries that a reader may lag behind: a few KiB, and
// some tenths of a second of a busy sandbox.
const followerRoom = 256

type follower struct {
	filter  Filter
	entries chan Entry
	dropped uint64 // since the last entry that was delivered; guarded by the book's mu
}

// follow returns a follower that starts with the stored entries. It returns nil if the
// book is closed.
func (b *book) follow(f Filter) *follower {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	kept := b.entries.matching(&f)
	fl := &follower{filter: f, entries: make(chan Entry, len(kept)+followerRoom)}
	for i := range kept {
		fl.entries <- kept[i]
	}
	if b.followers == nil {
		b.followers = map[*follower]struct{}{}
	}
	b.followers[fl] = struct{}{}
	return fl
}

// tell sends an entry to the follower, or counts it as dropped. It never blocks. The
// caller holds the book's lock.
func (f *follower) tell(e *Entry) {
	if !f.filter.match(e) {
		return
	}
	told := *e
	told.Dropped = f.dropped
	select {
	case f.entries <- told:
		f.dropped = 0
	default:
		f.dropped++
	}
}

// end ends a follower. It does nothing if the follower has already ended.
func (b *book) end(fl *follower) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.followers[fl]; ok {
		delete(b.followers, fl)
		close(fl.entries)
	}
}

func (b *book) endAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.endFollowers()
}

// endFollowers ends all followers. The caller holds b.mu.
func (b *book) endFollowers() {
	for fl := range b.followers {
		close(fl.entries)
	}
	clear(b.followers)
}
