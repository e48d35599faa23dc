package intercept

import (
	"io"
	"sync"
)

// aheadSize limits the part of a body that is read before it is sent: several TLS
// records.
const aheadSize = 8 * recordSize

// ahead buffers the part of a body that was read and not yet sent: a ring, which one
// goroutine fills and another empties. Bytes that were read can be sent immediately, even
// while the reader waits.
type ahead struct {
	mu      sync.Mutex
	changed sync.Cond
	start   int   // of the bytes that were read
	length  int   // of these bytes
	err     error // that ended the body
	ended   bool  // later bytes are dropped
	ring    [aheadSize]byte
}

var aheads = sync.Pool{New: func() any { return new(ahead) }}

func (a *ahead) reset() {
	a.changed.L = &a.mu
	a.start, a.length, a.err, a.ended = 0, 0, nil, false
}

// fill reads a body until its end, or until stop and the error that Read then returns.
func (a *ahead) fill(body io.Reader) {
	for {
		b := a.free()
		if b == nil {
			return
		}
		n, err := body.Read(b)
		a.mu.Lock()
		a.length += n
		a.err = err
		a.mu.Unlock()
		a.changed.Signal()
		if err != nil {
			return
		}
	}
}

// free waits until a record fits, or less at the end of the ring, and returns this part of
// the ring, or nil after stop.
func (a *ahead) free() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	for aheadSize-a.length < recordSize && !a.ended {
		a.changed.Wait()
	}
	if a.ended {
		return nil
	}
	if a.length == 0 {
		a.start = 0
	}
	from := (a.start + a.length) % aheadSize
	return a.ring[from:min(aheadSize, from+aheadSize-a.length)]
}

// next returns the bytes that can be sent in one piece, which remain valid until consume,
// or the error that ended the body. With wait it waits for either.
func (a *ahead) next(wait bool) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for wait && a.length == 0 && a.err == nil {
		a.changed.Wait()
	}
	if a.length == 0 {
		return nil, a.err
	}
	return a.ring[a.start:min(aheadSize, a.start+a.length)], nil
}

// consume frees n of the bytes that next returned.
func (a *ahead) consume(n int) {
	a.mu.Lock()
	a.start = (a.start + n) % aheadSize
	a.length -= n
	a.mu.Unlock()
	a.changed.Signal()
}

// stop ends fill. Later bytes are dropped.
func (a *ahead) stop() {
	a.mu.Lock()
	a.ended = true
	a.mu.Unlock()
	a.changed.Signal()
}
