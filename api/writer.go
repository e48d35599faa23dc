package api

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// maxWrite is how many bytes are written under one deadline: with the default Stall, a
// client that reads 1 KiB/s is fast enough.
const maxWrite = 64 << 10

// timedWriter gives every write a deadline of its own: a client that reads slowly is
// served, one that does not read is disconnected. It has no ReadFrom, because one call
// would be one write.
type timedWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	stall   time.Duration
	wrote   bool // the header was written
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

// statusSent returns the status of the response.
func (w *timedWriter) statusSent() int {
	if w.status == 0 {
		return http.StatusOK
	}
	return w.status
}

// FlushError is called by http.ResponseController.Flush.
func (w *timedWriter) FlushError() error {
	w.wrote = true
	w.extend()
	return w.control.Flush()
}

// extend sets the next deadline. Writers of tests may not support deadlines.
func (w *timedWriter) extend() { w.control.SetWriteDeadline(time.Now().Add(w.stall)) }

// finish sets deadlines for the server's work after the handler: it reads the rest of a
// small body, to reuse the connection, and writes the rest of the response. Then the
// server removes both deadlines.
func (w *timedWriter) finish(r *http.Request) {
	now := time.Now()
	if r.ContentLength != 0 {
		w.control.SetReadDeadline(now.Add(w.stall))
	}
	w.control.SetWriteDeadline(now.Add(2 * w.stall))
}

// timedBody reads a request's body of any size. Each read has a deadline of its own. The
// first failure is stored, to distinguish it from a failure to forward the bytes.
//
// The handler calls detach before it returns: a transport may read its request's body
// after the response, and in HTTP/2 setting a deadline after the handler has returned
// panics, which ends the node.
type timedBody struct {
	body  io.Reader
	stall time.Duration
	limit int64 // of the body in bytes, or 0; set before the first read
	read  int64
	err   atomic.Pointer[error]

	mu      sync.Mutex
	control *http.ResponseController // nil after detach
}

func newTimedBody(w http.ResponseWriter, body io.Reader, stall time.Duration) *timedBody {
	return &timedBody{body: body, control: http.NewResponseController(w), stall: stall}
}

func (b *timedBody) Read(p []byte) (int, error) {
	if !b.setDeadline(time.Now().Add(b.stall)) {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.body.Read(p)
	if b.read += int64(n); b.limit > 0 && b.read > b.limit {
		n, err = 0, tooLarge(b.limit, smallerFile)
	}
	switch {
	case err == io.EOF:
		// Otherwise the deadline would end the request's context.
		b.setDeadline(time.Time{})
	case err != nil:
		b.err.CompareAndSwap(nil, &err)
	}
	return n, err
}

// setDeadline returns false after detach.
func (b *timedBody) setDeadline(at time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.control == nil {
		return false
	}
	b.control.SetReadDeadline(at)
	return true
}

// detach makes further reads fail.
func (b *timedBody) detach() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control = nil
}

// failure returns the error with which reading the body failed, or nil.
func (b *timedBody) failure() error {
	if err := b.err.Load(); err != nil {
		return *err
	}
	return nil
}
