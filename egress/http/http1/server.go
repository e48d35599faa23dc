package http1

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"sync"
	"time"

	"github.com/doze-run/doze/problem"
)

const (
	// watchAfter is how long a handler runs before the server watches for the client's
	// disconnect. Watching takes a goroutine, which costs more than a short handler can
	// save.
	watchAfter = 100 * time.Millisecond
	// maxDiscard is how much of an unread body is discarded to reuse the connection.
	maxDiscard = 256 << 10
	// lingerTime is how long the client's data is discarded after the last response. A
	// reset could destroy the response before the client has read it (RFC 9112, section
	// 9.6).
	lingerTime = 500 * time.Millisecond
)

// Server serves client connections. Its fields must not change once it serves.
type Server struct {
	// Handler handles each request in the goroutine of Serve. A panic with
	// http.ErrAbortHandler ends Serve without completing the response. The request's body
	// may be read during the response, and by other goroutines until Handler returns. The
	// request's context ends when Handler returns or the client disconnects. The
	// ResponseWriter implements http.Flusher and http.Hijacker, and is always full duplex.
	Handler func(w http.ResponseWriter, r *http.Request)
	// Refuse responds to a request that cannot be served. The request has no method, URL
	// or header, and its connection ends.
	Refuse func(w http.ResponseWriter, r *http.Request, why *problem.Problem)
	// MaxHead is the size limit of a request's head.
	MaxHead int64
}

// Serve serves a connection until its end. It reads from in, which is conn or conn with
// data that was read before. It sets no time limits. The caller closes conn, after Serve
// or earlier to end it.
func (s *Server) Serve(ctx context.Context, conn net.Conn, in io.Reader) {
	c := newServerConn(s, conn, in)
	for c.serve(ctx) {
	}
	if !c.w.hijacked {
		c.r.Reset(nil)
		readers.Put(c.r)
		c.w.out.Reset(nil)
		writers.Put(c.w.out)
	}
}

// serverConn is a client's connection.
type serverConn struct {
	s      *Server
	conn   net.Conn
	remote string
	source source
	in     io.LimitedReader // of a head, over source
	r      *bufio.Reader
	lines  *textproto.Reader // over r
	w      responseWriter

	body  *requestBody // the current request's, nil if it has none
	minor int          // HTTP minor version of the current request
}

var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, bufferSize) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, bufferSize) }}
)

func newServerConn(s *Server, conn net.Conn, in io.Reader) *serverConn {
	c := &serverConn{s: s, conn: conn, remote: conn.RemoteAddr().String()}
	c.source.conn, c.source.in = conn, in
	c.source.changed.L = &c.source.mu
	c.in.R = &c.source
	c.r = readers.Get().(*bufio.Reader)
	c.r.Reset(&c.in)
	c.lines = textproto.NewReader(c.r)
	c.w.c, c.w.out = c, writers.Get().(*bufio.Writer)
	c.w.out.Reset(conn)
	return c
}

// serve serves one request and reports whether another may follow.
func (c *serverConn) serve(ctx context.Context) (more bool) {
	r, err := c.readRequest()
	if err != nil {
		c.refuse(ctx, err)
		return false
	}
	c.in.N = unlimited
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r = r.WithContext(ctx)
	if c.body != nil {
		c.body.r = r
	}
	c.w.reset(r)
	c.source.onDisconnect = cancel
	if c.body == nil {
		c.watch()
	}
	aborted := c.handle(r)
	bodyErr := c.body.stop()
	c.source.stopWatch()
	if aborted || c.w.hijacked {
		return false
	}
	return c.finish(bodyErr)
}

// handle calls the handler and reports whether it aborted.
func (c *serverConn) handle(r *http.Request) (aborted bool) {
	defer func() {
		if v := recover(); v == http.ErrAbortHandler {
			aborted = true
		} else if v != nil {
			panic(v)
		}
	}()
	c.s.Handler(&c.w, r)
	return false
}

// finish completes the response and reports whether another request may follow. bodyErr is
// the result of stopping the request's body.
func (c *serverConn) finish(bodyErr error) bool {
	if c.w.finish() != nil {
		return false
	}
	if !c.w.last && (bodyErr == io.EOF || bodyErr == nil && c.discardBody()) {
		return true
	}
	c.linger()
	return false
}

// discardBody discards the rest of the body and reports whether it was short enough. Like
// reading the next request it has no time limit.
func (c *serverConn) discardBody() bool {
	if c.body.awaited { // the client may or may not send it
		return false
	}
	p := pieces.Get().(*piece)
	defer pieces.Put(p)
	for n := 0; n < maxDiscard; {
		read, err := c.body.read(p[:])
		if n += read; err != nil {
			return err == io.EOF
		}
	}
	return false
}

// refuse responds to a request that cannot be served. Errors of the connection get no
// response.
func (c *serverConn) refuse(ctx context.Context, err error) {
	why, ok := err.(*problem.Problem)
	if !ok {
		return
	}
	r := (&http.Request{ProtoMajor: 1, ProtoMinor: c.minor, Header: http.Header{}, URL: new(url.URL)}).WithContext(ctx)
	c.body = nil
	c.w.reset(r)
	c.w.last = true
	c.s.Refuse(&c.w, r, why)
	if c.w.finish() == nil {
		c.linger()
	}
}

// linger closes the sending side and discards the data that the client still sends, for
// up to lingerTime.
func (c *serverConn) linger() {
	half, ok := c.conn.(interface{ CloseWrite() error })
	if ok && half.CloseWrite() == nil && c.conn.SetReadDeadline(time.Now().Add(lingerTime)) == nil {
		p := pieces.Get().(*piece)
		defer pieces.Put(p)
		for {
			if _, err := c.conn.Read(p[:]); err != nil { // at the latest by the deadline
				break
			}
		}
	}
}

// watch starts to watch for the client's disconnect if the handler runs for long. The
// request was read to its end.
func (c *serverConn) watch() {
	if c.r.Buffered() == 0 {
		c.source.scheduleWatch()
	}
}

// source reads from the client. While a handler runs it can read one byte ahead, to detect
// a disconnect.
type source struct {
	conn         net.Conn
	in           io.Reader // over conn
	onDisconnect func()

	mu        sync.Mutex
	changed   sync.Cond
	timer     *time.Timer
	scheduled bool // the timer runs
	watching  bool // a goroutine reads
	stopped   bool // its Read was interrupted
	hasByte   bool // ahead was read
	ahead     [1]byte
	err       error // of the watch
}

// Read implements io.Reader. It must not be called during a watch.
func (s *source) Read(b []byte) (int, error) {
	if s.hasByte && len(b) > 0 {
		b[0], s.hasByte = s.ahead[0], false
		return 1, nil
	}
	if s.err != nil {
		return 0, s.err
	}
	return s.in.Read(b)
}

// scheduleWatch starts a watch after watchAfter, unless stopWatch comes first.
func (s *source) scheduleWatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scheduled = true
	if s.timer == nil {
		s.timer = time.AfterFunc(watchAfter, s.watch)
	} else {
		s.timer.Reset(watchAfter)
	}
}

func (s *source) watch() {
	s.mu.Lock()
	if !s.scheduled || s.hasByte || s.err != nil {
		s.mu.Unlock()
		return
	}
	s.scheduled, s.watching, s.stopped = false, true, false
	s.mu.Unlock()
	n, err := s.in.Read(s.ahead[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hasByte = n > 0
	if err != nil && !s.stopped {
		s.err = err
		s.onDisconnect()
	}
	s.watching = false
	s.changed.Broadcast()
}

// stopWatch ends a watch. After it the connection can be read again.
func (s *source) stopWatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.scheduled {
		s.scheduled = false
		s.timer.Stop() // a call that has begun finds scheduled false
	}
	if !s.watching {
		return
	}
	s.stopped = true
	_ = s.conn.SetReadDeadline(time.Unix(1, 0))
	for s.watching {
		s.changed.Wait()
	}
	_ = s.conn.SetReadDeadline(time.Time{})
}
