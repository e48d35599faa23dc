package api

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// maxWrite bytes at most are written under one deadline: with the default Stall, a
// reader of 1 KiB/s is fast enough.
const maxWrite = 64 << 10

// timedWriter gives every write a deadline of its own, so that a slow reader is
// served for as long as he reads, while one who reads nothing is cut off. It has no
// ReadFrom, whose one call would be one write.
type timedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration
	wrote   bool // the header has gone
	status  int  // of the header; 0 before it
}

func newTimedWriter(w http.ResponseWriter, stall time.Duration) *timedWriter {
	return &timedWriter{ResponseWriter: w, control: http.NewResponseController(w), stall: stall}
}

// Unwrap lets http.ResponseController reach the server's own writer.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *timedWriter) WriteHeader(status int) {
	w.wrote = true
	if w.status < 200 && w.status != http.StatusSwitchingProtocols {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *timedWriter) Write(b []byte) (n int, _ error) {
	w.wrote = true
	for {
		w.extend()
		wrote, err := w.ResponseWriter.Write(b[n:min(len(b), n+maxWrite)])
		n += wrote
		if err != nil || n == len(b) {
			return n, err
		}
	}
}

// statusSent is the status that the client got.
func (w *timedWriter) statusSent() int {
	if w.status == 0 {
		return http.StatusOK
	}
	return w.status
}

// FlushError implements what http.ResponseController.Flush looks for.
func (w *timedWriter) FlushError() error {
	w.wrote = true
	w.extend()
	return w.control.Flush()
}

// extend sets the next deadline. A writer without deadlines, such as a test's,
// has none.
func (w *timedWriter) extend() { w.control.SetWriteDeadline(time.Now().Add(w.stall)) }

// finish gives a deadline to what the server does after the handler: it reads
// what is left of a small body, to use the connection again, and then writes
// what is left of the answer. Then it ends both deadlines itself.
func (w *timedWriter) finish(r *http.Request) {
	now := time.Now()
	if r.ContentLength != 0 {
		w.control.SetReadDeadline(now.Add(w.stall))
	}
	w.control.SetWriteDeadline(now.Add(2 * w.stall))
}

// timedBody reads a request's body of any size. Each read has a deadline of its
// own, and the first failure is kept, to tell it from a failure of whoever takes
// the bytes.
//
// The handler calls end before it returns: a transport that the body was given to
// may read on after its answer, and in HTTP/2 a deadline that is set after the
// handler has returned is a panic, which ends the node.
type timedBody struct {
	body  io.Reader
	stall time.Duration
	err   atomic.Pointer[error]

	mu      sync.Mutex
	control *http.ResponseController // nil after end
}

func newTimedBody(w http.ResponseWriter, body io.Reader, stall time.Duration) *timedBody {
	return &timedBody{body: body, control: http.NewResponseController(w), stall: stall}
}

func (b *timedBody) Read(p []byte) (int, error) {
	if !b.setDeadline(time.Now().Add(b.stall)) {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.body.Read(p)
	switch {
	case err == io.EOF:
		// A deadline that stays would end the request's context when it passes.
		b.setDeadline(time.Time{})
	case err != nil:
		b.err.CompareAndSwap(nil, &err)
	}
	return n, err
}

// setDeadline reports false after end.
func (b *timedBody) setDeadline(at time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.control == nil {
		return false
	}
	b.control.SetReadDeadline(at)
	return true
}

// end refuses what would be read from now on.
func (b *timedBody) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control = nil
}

// failure is why the body could not be read to its end, or nil.
func (b *timedBody) failure() error {
	if err := b.err.Load(); err != nil {
		return *err
	}
	return nil
}
