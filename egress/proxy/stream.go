package proxy

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"
)

// chunk is the number of bytes that are read ahead of a stream. Flow control
// holds back the data that the client sends beyond that.
const chunk = 32 << 10

// stream is a tunnel over HTTP/2: the client's data is the body of the request,
// and the data for the client is the body of the response. A goroutine reads the
// body, so that waiting for it can end at a deadline and continue later, as with
// every net.Conn.
type stream struct {
	w    http.ResponseWriter
	body io.ReadCloser
	ends struct{ local, remote net.Addr }
	done chan struct{} // closed when pump has returned

	mu      sync.Mutex
	changed *sync.Cond // signals a change of the fields below
	came    []byte     // read from the body, but not yet from the stream
	err     error      // that ended the body
	limit   time.Time  // deadline of Read
	timer   *time.Timer
	writing bool
	closed  bool
	aborted bool
}

func newStream(w http.ResponseWriter, r *http.Request) *stream {
	s := &stream{w: w, body: r.Body, done: make(chan struct{})}
	s.changed = sync.NewCond(&s.mu)
	s.ends.local, _ = r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		s.ends.remote = net.TCPAddrFromAddrPort(from)
	}
	go s.pump() // ends in wait
	return s
}

// pump reads the body, a chunk at a time.
func (s *stream) pump() {
	defer close(s.done)
	b := make([]byte, chunk)
	for {
		n, err := s.body.Read(b)
		s.mu.Lock()
		s.came, s.err = b[:n], err
		s.changed.Broadcast()
		for len(s.came) > 0 && !s.closed {
			s.changed.Wait()
		}
		ended := err != nil || s.closed
		s.mu.Unlock()
		if ended {
			return
		}
	}
}

func (s *stream) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.aborted:
			return 0, net.ErrClosed
		case s.closed:
			return 0, io.EOF
		case !s.limit.IsZero() && !time.Now().Before(s.limit):
			return 0, os.ErrDeadlineExceeded
		case len(s.came) > 0:
			n := copy(p, s.came)
			s.came = s.came[n:]
			s.changed.Broadcast()
			return n, nil
		case s.err != nil:
			return 0, s.err
		}
		s.changed.Wait()
	}
}

func (s *stream) Write(p []byte) (int, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return 0, net.ErrClosed
	}
	s.writing = true
	s.mu.Unlock()
	n, err := s.w.Write(p)
	if err == nil {
		err = s.flush()
	}
	s.mu.Lock()
	s.writing = false
	s.mu.Unlock()
	return n, err
}

func (s *stream) flush() error { return http.NewResponseController(s.w).Flush() }

func (s *stream) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, onlyReader{s}) }

func (s *stream) ReadFrom(r io.Reader) (int64, error) { return io.Copy(onlyWriter{s}, onlyReader{r}) }

// CloseWrite ends the tunnel: a handler of net/http ends its half of a stream by
// returning, which ends the other half, too.
func (s *stream) CloseWrite() error { return s.Close() }

// Close ends the tunnel after the written data was sent. It cuts the tunnel if a Write is
// blocked.
func (s *stream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	if s.writing {
		s.cut()
	}
	s.close()
	return nil
}

func (s *stream) Abort() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.cut()
		s.close()
	}
}

// cut ends a blocked Write, and resets the stream. s.mu is held.
func (s *stream) cut() {
	s.aborted = true
	_ = http.NewResponseController(s.w).SetWriteDeadline(time.Now()) // on an error, the Write ends with the client's connection
}

// close marks the stream as closed. s.mu is held.
func (s *stream) close() {
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	s.changed.Broadcast()
}

// wait ends pump for a closed stream, and reports whether the stream was cut.
func (s *stream) wait() (cut bool) {
	s.body.Close()
	<-s.done
	return s.aborted
}

func (s *stream) LocalAddr() net.Addr { return s.ends.local }

func (s *stream) RemoteAddr() net.Addr { return s.ends.remote }

func (s *stream) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	if s.limit = t; !t.IsZero() && !s.closed {
		s.timer = time.AfterFunc(time.Until(t), s.expire)
	}
	s.changed.Broadcast()
	return nil
}

// expire makes a waiting Read check its deadline. Without s.mu, a Read that is about to
// wait would miss the signal.
func (s *stream) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

// SetWriteDeadline does nothing: Close and Abort end a blocked Write.
func (s *stream) SetWriteDeadline(time.Time) error { return nil }

func (s *stream) SetDeadline(t time.Time) error { return s.SetReadDeadline(t) }
