package intercept

import (
	"io"
	"sync"
)

// aheadSize bounds what is read of a body before it is sent: what a TLS record and
// its reader's turn take, several times over.
const aheadSize = 8 * recordSize

// ahead holds what was read of a body until it is sent: a ring, which one goroutine
// fills and another empties. What was read can be sent at once, whatever the reader
// waits for.
type ahead struct {
	mu      sync.Mutex
	changed sync.Cond
	start   int   // of what is there
	length  int   // of what is there
	err     error // that ended the body
	ended   bool  // nobody takes what comes
	ring    [aheadSize]byte
}

var aheads = sync.Pool{New: func() any { return new(ahead) }}

func (a *ahead) reset() {
	a.changed.L = &a.mu
	a.start, a.length, a.err, a.ended = 0, 0, nil, false
}

// fill reads a body to its end, or until end and the error that Read then returns.
func (a *ahead) fill(body io.Reader) {
	for {
		b := a.room()
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

// room waits until there is room for a record, or for less at the end of the ring,
// and returns it, or nil after end.
func (a *ahead) room() []byte {
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

// take returns what can be sent in one piece, which stays until taken, or the error
// that ended the body. It waits for either if it is told to.
func (a *ahead) take(wait bool) ([]byte, error) {
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

// taken gives back so many bytes of what take returned.
func (a *ahead) taken(n int) {
	a.mu.Lock()
	a.start = (a.start + n) % aheadSize
	a.length -= n
	a.mu.Unlock()
	a.changed.Signal()
}

// end says that nothing is taken any more.
func (a *ahead) end() {
	a.mu.Lock()
	a.ended = true
	a.mu.Unlock()
	a.changed.Signal()
}
