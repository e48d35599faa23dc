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
)

const (
	unlimited = 1<<63 - 1
	// watchAfter so much time a handler's client is watched, so that it is known to have
	// left. For shorter ones that is not worth its cost.
	watchAfter = 100 * time.Millisecond
	// maxRest is read of a body that a handler did not read, to keep the connection.
	maxRest = 256 << 10
	// linger is how long what a client sends is thrown away after the last response. Else
	// its kernel would hear a reset, and the client maybe nothing of the response
	// (RFC 9112, section 9.6).
	linger = 500 * time.Millisecond
)

// Server serves connections. Its fields are not changed after the first.
type Server struct {
	// Handler is called with each request, in the goroutine of Serve. It may panic with
	// http.ErrAbortHandler, which ends Serve before the response has ended. The body of
	// the request may be read while the response is written, and by other goroutines, until
	// the Handler has returned. The context of the request ends when it has returned or the
	// client has left. The writer is an http.Flusher and http.Hijacker.
	Handler func(w http.ResponseWriter, r *http.Request)
	// Refuse answers a request that cannot be read. Its header is empty.
	Refuse func(w http.ResponseWriter, r *http.Request, why *RequestError)
	// MaxHead bounds the head of a request, in bytes.
	MaxHead int64
}

// Serve serves a connection until its end. What the client sends is read from in, which
// is conn or what was read of that before it. There are no time limits toward the client.
// The caller closes conn: afterwards, or earlier to end Serve.
func (s *Server) Serve(ctx context.Context, conn net.Conn, in io.Reader) {
	c := newServerConn(s, conn, in)
	defer c.release()
	for c.serve(ctx) {
	}
}

// serverConn is a client's connection.
type serverConn struct {
	s      *Server
	conn   net.Conn
	remote string
	source source
	in     limited // over source
	r      *bufio.Reader
	lines  *textproto.Reader // over r
	w      responseWriter

	body  *requestBody // of the request under way; nil: none
	minor int          // version of its protocol
}

var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, bufferSize) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, bufferSize) }}
)

func newServerConn(s *Server, conn net.Conn, in io.Reader) *serverConn {
	c := &serverConn{s: s, conn: conn, remote: conn.RemoteAddr().String()}
	c.source.conn, c.source.in = conn, in
	c.source.changed.L = &c.source.mu
	c.in.r = &c.source
	c.r = readers.Get().(*bufio.Reader)
	c.r.Reset(&c.in)
	c.lines = textproto.NewReader(c.r)
	c.w.c, c.w.out = c, writers.Get().(*bufio.Writer)
	c.w.out.Reset(conn)
	return c
}

// release gives the buffers back, unless somebody has taken the connection over.
func (c *serverConn) release() {
	if c.w.hijacked {
		return
	}
	c.r.Reset(nil)
	readers.Put(c.r)
	c.w.out.Reset(nil)
	writers.Put(c.w.out)
}

// serve serves a request, and reports whether another may follow.
func (c *serverConn) serve(ctx context.Context) (more bool) {
	r, err := c.readRequest()
	if err != nil {
		c.refuse(ctx, err)
		return false
	}
	c.in.left = unlimited
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r = r.WithContext(ctx)
	if c.body != nil {
		c.body.r = r
	}
	c.w.begin(r)
	c.source.gone = cancel
	if c.body == nil {
		c.watch()
	}
	aborted := c.handle(r)
	rest := c.body.stop()
	c.source.ignore()
	if aborted || c.w.hijacked {
		return false
	}
	return c.finish(rest)
}

// handle calls the handler, and reports whether that has ended the connection.
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

// finish ends the response, and reports whether another request may follow. rest is what
// has ended the body.
func (c *serverConn) finish(rest error) bool {
	if c.w.finish() != nil {
		return false
	}
	if !c.w.last && (rest == io.EOF || rest == nil && c.skipRest()) {
		return true
	}
	c.goodbye()
	return false
}

// skipRest reads the rest of a body that no handler has read, if it is short, as one reads
// the next request.
func (c *serverConn) skipRest() bool {
	if c.body.awaited { // the client does not know whether to send it
		return false
	}
	p := pieces.Get().(*piece)
	defer pieces.Put(p)
	for n := 0; n < maxRest; {
		read, err := c.body.next(p[:])
		if n += read; err != nil {
			return err == io.EOF
		}
	}
	return false
}

// refuse answers a request that cannot be read. Nobody hears of the end of a connection.
func (c *serverConn) refuse(ctx context.Context, err error) {
	why, ok := err.(*RequestError)
	if !ok {
		return
	}
	r := (&http.Request{ProtoMajor: 1, ProtoMinor: c.minor, Header: http.Header{}, URL: new(url.URL)}).WithContext(ctx)
	c.body = nil
	c.w.begin(r)
	c.w.last = true
	c.s.Refuse(&c.w, r, why)
	if c.w.finish() == nil {
		c.goodbye()
	}
}

// goodbye says that no more will be sent, and waits for the client to say so, too.
func (c *serverConn) goodbye() {
	half, ok := c.conn.(interface{ CloseWrite() error })
	if ok && half.CloseWrite() == nil && c.conn.SetReadDeadline(time.Now().Add(linger)) == nil {
		p := pieces.Get().(*piece)
		defer pieces.Put(p)
		for {
			if _, err := c.conn.Read(p[:]); err != nil { // at last the deadline
				break
			}
		}
	}
}

// watch has the client watched if the handler takes long. The request was read to its end.
func (c *serverConn) watch() {
	if c.r.Buffered() == 0 {
		c.source.watchLater()
	}
}

// interrupt ends a Read of the connection that waits.
func (c *serverConn) interrupt() { _ = c.conn.SetReadDeadline(time.Unix(1, 0)) }

// source is what the client sends. While a handler runs it can be read in advance, to
// hear that the client has left.
type source struct {
	conn net.Conn
	in   io.Reader // over conn
	gone func()    // called when the client has left

	mu       sync.Mutex
	changed  sync.Cond
	timer    *time.Timer
	waiting  bool // the timer runs
	watching bool // a goroutine reads
	stopped  bool // it shall end
	has      bool // next was read
	next     [1]byte
	err      error // of reading
}

// Read implements io.Reader. Nobody watches.
func (s *source) Read(b []byte) (int, error) {
	if s.has && len(b) > 0 {
		b[0], s.has = s.next[0], false
		return 1, nil
	}
	if s.err != nil {
		return 0, s.err
	}
	return s.in.Read(b)
}

// watchLater begins to watch after watchAfter, until ignore.
func (s *source) watchLater() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = true
	if s.timer == nil {
		s.timer = time.AfterFunc(watchAfter, s.watch)
	} else {
		s.timer.Reset(watchAfter)
	}
}

func (s *source) watch() {
	s.mu.Lock()
	if !s.waiting || s.has || s.err != nil {
		s.mu.Unlock()
		return
	}
	s.waiting, s.watching, s.stopped = false, true, false
	s.mu.Unlock()
	n, err := s.in.Read(s.next[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	s.has = n > 0
	if err != nil && !s.stopped {
		s.err = err
		s.gone()
	}
	s.watching = false
	s.changed.Broadcast()
}

// ignore ends watching. When it has returned the connection can be read again.
func (s *source) ignore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting {
		s.waiting = false
		s.timer.Stop() // one that fires all the same finds that nothing waits
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
