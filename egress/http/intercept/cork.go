package intercept

import (
	"net"
	"sync"
)

// maxGathered is what a wire holds back at most: two packets of a sandbox's network,
// whose MTU is 65,520.
const maxGathered = 128 << 10

// gatherings are held only while a large answer is on its way.
var gatherings = sync.Pool{New: func() any { b := make([]byte, 0, maxGathered); return &b }}

// wire is a connection's bytes. It tells its connection when it is closed, by
// whoever has it then: the library's server, or a handler that took it over.
//
// TLS writes records of 16 KiB, one by one. Each as a packet of its own costs the
// sandbox's kernel and its client as much as one four times as large; so the writer
// of a large answer has them gathered.
type wire struct {
	net.Conn
	of *connection

	mu       sync.Mutex
	gathered *[]byte // nil: what is written goes out at once
}

// Write implements net.Conn. What is gathered goes out with release, and an error of
// that is told there.
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

// gather holds back what is written, until release: the caller is the only one whose
// answer is on its way, and has more of it.
func (w *wire) gather() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gathered == nil {
		w.gathered = gatherings.Get().(*[]byte)
	}
}

// release sends what was held back, and what is written from now on at once.
func (w *wire) release() error {
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

// CloseWrite says that no more will be sent.
func (w *wire) CloseWrite() error {
	if half, ok := w.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
