package intercept

import (
	"net"
	"net/http"
	"sync"
)

// writer is the ResponseWriter of an HTTP/1.1 connection.
type writer struct {
	http.ResponseWriter
	wire *wire
}

// Unwrap implements the interface that http.ResponseController requires.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// maxGathered limits the bytes that a wire holds back: two packets of a sandbox's
// network, whose MTU is 65,520.
const maxGathered = 128 << 10

// gatherings are buffers, each in use while a large response is sent.
var gatherings = sync.Pool{New: func() any { b := make([]byte, 0, maxGathered); return &b }}

// wire is a connection's bytes. It closes its connection when it is closed, by the server
// or by a handler that has hijacked it.
//
// TLS writes records of 16 KiB, one by one. Each as a packet of its own costs the
// sandbox's kernel and its client as much as one four times as large; so the records of a
// large response are gathered.
type wire struct {
	net.Conn
	of *connection

	mu       sync.Mutex
	gathered *[]byte // nil: writes are sent immediately
}

// Write implements net.Conn. After cork it may hold back b; then uncork sends b, and
// returns the error of sending it.
func (w *wire) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		return w.Conn.Write(b)
	}
	if len(*w.gathered)+len(b) > maxGathered {
		if err := w.flush(); err != nil {
			return 0, err
		}
	}
	if len(b) > maxGathered {
		return w.Conn.Write(b)
	}
	*w.gathered = append(*w.gathered, b...)
	return len(b), nil
}

// cork holds back written bytes until uncork. The caller's response must be the only one
// on the connection, and have more to write.
func (w *wire) cork() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		w.gathered = gatherings.Get().(*[]byte)
	}
}

// uncork sends the bytes that were held back. Later writes are sent immediately.
func (w *wire) uncork() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		return nil
	}
	err := w.flush()
	gatherings.Put(w.gathered)
	w.gathered = nil
	return err
}

func (w *wire) flush() error {
	b := *w.gathered
	*w.gathered = b[:0]
	if len(b) == 0 {
		return nil
	}
	_, err := w.Conn.Write(b)
	return err
}

func (w *wire) Close() error { return w.of.Close() }

// CloseWrite closes the sending side.
func (w *wire) CloseWrite() error {
	if half, ok := w.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
