package proxy

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// chunk is the number of bytes that are read ahead of a stream. Flow control
// holds back the data that the client sends beyond that.
const chunk = 32 << 10

// stream is a tunnel over HTTP/2: the client's data is the body of the request,
// and the data for the client is the body of the response. A goroutine copies the
// body to a pipe, so that waiting for it can end at a deadline and continue later, as
// with every net.Conn.
type stream struct {
	net.Conn      // has the client's data
	w             http.ResponseWriter
	body          io.ReadCloser
	local, remote net.Addr
	bodyErr       error         // set before the other end of Conn is closed
	done          chan struct{} // closed when the body was copied

	mu      sync.Mutex
	writing bool
	closed  bool
	aborted bool
}

func newStream(w http.ResponseWriter, r *http.Request) *stream {
	s := &stream{w: w, body: r.Body, done: make(chan struct{})}
	s.local, _ = r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		s.remote = net.TCPAddrFromAddrPort(from)
	}
	var in net.Conn
	s.Conn, in = net.Pipe()
	go func() { // ends in wait
		defer close(s.done)
		_, s.bodyErr = io.CopyBuffer(onlyWriter{in}, onlyReader{s.body}, make([]byte, chunk))
		in.Close()
	}()
	return s
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p)
	switch {
	case err == io.EOF && s.bodyErr != nil:
		err = s.bodyErr
	case err == io.ErrClosedPipe && s.isAborted():
		err = net.ErrClosed
	case err == io.ErrClosedPipe:
		err = io.EOF
	}
	return n, err
}

func (s *stream) isAborted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aborted
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
func (s *stream) Close() error { return s.closeStream(false) }

func (s *stream) Abort() { _ = s.closeStream(true) }

// closeStream closes the stream. If it is cut, or a Write is blocked, the Write ends and
// the stream is reset.
func (s *stream) closeStream(cut bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if s.aborted = cut || s.writing; s.aborted {
		_ = http.NewResponseController(s.w).SetWriteDeadline(time.Now()) // on an error, the Write ends with the client's connection
	}
	return s.Conn.Close()
}

// wait ends the copy of the body for a closed stream, and reports whether the stream was
// cut.
func (s *stream) wait() (cut bool) {
	s.body.Close()
	<-s.done
	return s.isAborted()
}

func (s *stream) LocalAddr() net.Addr { return s.local }

func (s *stream) RemoteAddr() net.Addr { return s.remote }

// SetWriteDeadline does nothing: Close and Abort end a blocked Write.
func (s *stream) SetWriteDeadline(time.Time) error { return nil }

func (s *stream) SetDeadline(t time.Time) error { return s.SetReadDeadline(t) }
