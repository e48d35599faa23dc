package bucketfs

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

const (
	// chunkSize is the unit of a stream's memory.
	chunkSize = 256 << 10
	// behind is how much a stream retains for reads that arrive out of order.
	behind = 512 << 10
	// idleLimit is how long a stream without reads keeps its request open.
	idleLimit = 10 * time.Second
)

var (
	// errMissed is the error of a read that the stream does not cover any more.
	errMissed = errors.New("outside of the window")
	errClosed = errors.New("stream is closed")
)

// streams are the streams of a sandbox.
type streams struct {
	memory *quota
	chunks sync.Pool

	mu  sync.Mutex
	all map[*stream]bool
}

func newStreams(memory *quota) *streams {
	return &streams{memory: memory, all: map[*stream]bool{}, chunks: sync.Pool{New: func() any { return new([chunkSize]byte) }}}
}

// add starts a stream of an object's bytes [off, end), pinned. It closes idle streams for memory, also of other
// mounts, and returns nil if there is none.
func (ss *streams) add(m *mount, key string, o object, off, end int64) *stream {
	// A window has a chunk more than the data, because it drops entire chunks.
	memory := min(readWindow, (end-off+2*chunkSize-1)/chunkSize*chunkSize)
	ss.mu.Lock()
	defer ss.mu.Unlock()
	for !ss.memory.acquire(memory) {
		idle := ss.idlest()
		if idle == nil {
			return nil
		}
		ss.removeLocked(idle)
	}
	ctx, cancel := context.WithCancel(m.ctx)
	s := &stream{
		all: ss, store: m.store, key: key, object: o, memory: memory, cancel: cancel,
		first: off, filled: off, end: end, position: off, pins: 1, used: time.Now(),
		changed: make(chan struct{}),
	}
	ss.all[s] = true
	m.background.Go(func() { s.produce(ctx) })
	return s
}

// idlest returns the stream without reads that was used least recently, or nil. The caller holds ss.mu.
func (ss *streams) idlest() *stream {
	var idlest *stream
	var oldest time.Time
	for s := range ss.all {
		if used, pinned := s.usage(); !pinned && (idlest == nil || used.Before(oldest)) {
			idlest, oldest = s, used
		}
	}
	return idlest
}

// remove closes a stream and frees its memory. Reads end with errMissed, and the producer drops the chunk that it fills.
func (ss *streams) remove(s *stream) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.removeLocked(s)
}

func (ss *streams) removeLocked(s *stream) {
	if !ss.all[s] {
		return
	}
	delete(ss.all, s)
	ss.memory.free(s.memory)
	s.close()
}

// stream is a window of an object's bytes, which a producer fills.
type stream struct {
	all    *streams
	store  *store
	key    string
	object object
	memory int64
	cancel context.CancelFunc

	mu       sync.Mutex
	chunks   []*[chunkSize]byte
	first    int64 // the offset of the first chunk
	filled   int64 // the end of the bytes in the chunks
	end      int64 // the last byte that the producer will read
	position int64 // the greatest end of a read
	pins     int   // reads
	used     time.Time
	err      error         // why the producer has ended before end
	changed  chan struct{} // closed and replaced on each change
	closed   bool
}

// notify wakes reads and the producer. The caller holds s.mu.
func (s *stream) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stream) usage() (used time.Time, pinned bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used, s.pins > 0
}

// pin reports whether the stream has the byte at off, or soon will, and then prevents its eviction.
func (s *stream) pin(off int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.covers(off) {
		return false
	}
	s.pins++
	return true
}

// covers reports whether a read at off has to use the stream. The caller holds s.mu.
func (s *stream) covers(off int64) bool {
	return !s.closed && (s.err == nil || off < s.filled) && off >= s.first && off < s.end && off <= max(s.filled, s.position)+jump
}

func (s *stream) unpin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pins--
	s.used = time.Now()
}

// read copies bytes from off into p, at least one. It returns errMissed if the window has passed.
func (s *stream) read(ctx context.Context, p []byte, off int64) (int, error) {
	for {
		n, wait, err := s.tryRead(p, off)
		if n > 0 || err != nil {
			return n, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// tryRead copies the bytes that are available. If there are none, the caller waits for the channel.
func (s *stream) tryRead(p []byte, off int64) (int, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed, off < s.first, off >= s.end:
		return 0, nil, errMissed
	case off >= s.filled && s.err != nil:
		return 0, nil, s.err
	case off >= s.filled:
		if off > s.position { // the producer may wait for this read
			s.position = off
			s.notify()
		}
		return 0, s.changed, nil
	}
	n := 0
	for n < len(p) && off < s.filled {
		at := off - s.first
		chunk := s.chunks[at/chunkSize]
		m := copy(p[n:min(int64(len(p)), int64(n)+s.filled-off)], chunk[at%chunkSize:])
		n, off = n+m, off+int64(m)
	}
	if off > s.position {
		s.position = off
		s.notify()
	}
	return n, nil, nil
}

// close ends the producer, and reads with errMissed.
func (s *stream) close() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.chunks = nil // not into the pool: the producer may be filling one
	s.notify()
}

// produce fills the stream until its end, an error or close.
func (s *stream) produce(ctx context.Context) {
	defer s.cancel()
	failures := 0
	for {
		before := s.reached()
		err := s.fill(ctx)
		if err == nil || err == errClosed {
			return
		}
		if s.reached() > before {
			failures = 0
		}
		if failures++; failures == maxAttempts || ctx.Err() != nil || isPermanent(err) {
			s.setError(err)
			return
		}
	}
}

func (s *stream) reached() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.filled
}

func (s *stream) setError(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
	s.notify()
}

// fill sends one request and reads its response.
func (s *stream) fill(ctx context.Context) error {
	if err := s.store.transfers.acquire(ctx); err != nil {
		return err
	}
	defer s.store.transfers.releaseSlot()
	from := s.reached()
	body, err := s.store.get(ctx, s.key, s.object, from, s.end-from)
	if err != nil {
		return err
	}
	defer body.Close()
	for {
		p, err := s.space(ctx, body)
		if err != nil || p == nil {
			return err
		}
		n, err := body.Read(p)
		s.advance(n)
		if err != nil && err != io.EOF {
			return err
		}
	}
}

// space waits for free space in the window and returns it. It returns nil at the end, also when no read comes.
// While it waits, it does not hold the request's slot.
func (s *stream) space(ctx context.Context, body io.Closer) ([]byte, error) {
	p, wait, err := s.tryGrow()
	if p != nil || wait == nil || err != nil {
		return p, err
	}
	s.store.transfers.releaseSlot()
	defer s.store.transfers.reacquire()
	body.(*content).watchdog.pause()
	defer body.(*content).watchdog.progress()
	timer := time.NewTimer(idleLimit)
	defer timer.Stop()
	for {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-timer.C:
			s.shorten()
			return nil, nil
		}
		if p, wait, err = s.tryGrow(); p != nil || wait == nil || err != nil {
			return p, err
		}
	}
}

// tryGrow returns free space, or a channel to wait for, or nothing at the end.
func (s *stream) tryGrow() ([]byte, <-chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed
	}
	if s.filled == s.end {
		return nil, nil, nil
	}
	for s.first+chunkSize <= min(s.position-behind, s.filled) {
		s.all.chunks.Put(s.chunks[0])
		s.chunks = s.chunks[1:]
		s.first += chunkSize
	}
	at := s.filled - s.first
	if at == int64(len(s.chunks))*chunkSize {
		if at+chunkSize > s.memory {
			return nil, s.changed, nil
		}
		s.chunks = append(s.chunks, s.all.chunks.Get().(*[chunkSize]byte))
	}
	return s.chunks[at/chunkSize][at%chunkSize : min(chunkSize, at%chunkSize+s.end-s.filled)], nil, nil
}

func (s *stream) advance(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.filled += int64(n)
	s.notify()
}

// shorten ends an idle stream at its filled bytes. A read beyond starts another.
func (s *stream) shorten() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end = s.filled
	s.notify()
}
