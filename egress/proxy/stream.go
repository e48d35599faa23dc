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

// chunk is what is read ahead of a stream, whose flow control keeps what it has
// sent beyond that.
const chunk = 32 << 10

// stream is a tunnel over HTTP/2: what the client sends is the request's body, what
// it gets the response's. The body is read by a goroutine, so that waiting for it
// can end at a deadline and go on later, as with every net.Conn.
type stream struct {
	w    http.ResponseWriter
	body io.ReadCloser
	ends struct{ local, remote net.Addr }
	done chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex
	changed *sync.Cond // one of the following
	came    []byte     // read from the body and not yet from the stream
	err     error      // that ended the body
	limit   time.Time  // of reading
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
// returning, and the other half ends with it.
func (s *stream) CloseWrite() error { return s.Close() }

// Close ends the tunnel when what was written is sent, and cuts it if that hangs.
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

// cut ends a Write that waits, and resets the stream. Needs mu.
func (s *stream) cut() {
	s.aborted = true
	_ = http.NewResponseController(s.w).SetWriteDeadline(time.Now()) // if not, it ends with the client's connection
}

// close needs mu.
func (s *stream) close() {
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	s.changed.Broadcast()
}

// wait ends the goroutine of a stream that was closed, and reports whether it was cut.
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

// expire makes a waiting Read check its limit. Without mu, a Read that is about to wait
// would miss it.
func (s *stream) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

// SetWriteDeadline does nothing: Close and Abort end a Write that waits.
func (s *stream) SetWriteDeadline(time.Time) error { return nil }

func (s *stream) SetDeadline(t time.Time) error { return s.SetReadDeadline(t) }
