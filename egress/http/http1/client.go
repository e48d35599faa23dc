package http1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"
)

const (
	// continueTimeout is how long to wait for a response to `Expect: 100-continue` before
	// the body is sent anyway, as in curl.
	continueTimeout = time.Second
	// uploadTimeout is how long an upload may go on after the end of its response before
	// the connection is closed instead of reused.
	uploadTimeout = time.Second
	// maxInformational is the limit of 1xx responses to a request.
	maxInformational = 32
)

// ErrStale is the error of a reused connection that the server closed before the response.
// An idempotent request may be sent again over another connection.
var ErrStale = errors.New("http1: server closed idle connection")

var (
	errBodyLength   = errors.New("http1: request body does not match Content-Length")
	errNotContinued = errors.New("http1: final response instead of 100 Continue")
)

// Conn is a client connection. It carries one request at a time.
type Conn struct {
	conn net.Conn // TLS over raw, or raw itself
	raw  net.Conn
	in   io.LimitedReader // of a head
	r    *bufio.Reader
	w    *bufio.Writer
	used bool // it has carried a request before

	maxHead int64
}

// NewConn returns a client connection over conn, which is TLS over raw or raw itself. A
// response head is limited to maxHead bytes.
func NewConn(conn, raw net.Conn, maxHead int64) *Conn {
	c := &Conn{conn: conn, raw: raw, maxHead: maxHead, w: bufio.NewWriterSize(conn, bufferSize)}
	c.in.R = conn
	c.r = bufio.NewReaderSize(&c.in, bufferSize)
	return c
}

// RemoteAddr returns the server's address.
func (c *Conn) RemoteAddr() net.Addr { return c.raw.RemoteAddr() }

// Close closes the connection without a TLS close_notify. It may be called concurrently
// and more than once.
func (c *Conn) Close() error { return c.raw.Close() }

// alive reports whether the idle connection can be reused: the server has neither closed
// it nor sent anything unsolicited.
func (c *Conn) alive() bool {
	if c.r.Buffered() > 0 { // unsolicited data
		return false
	}
	if c.conn != c.raw { // TLS may have buffered more than was read
		_ = c.raw.SetReadDeadline(time.Unix(1, 0))
		_, err := c.r.Peek(1)
		if !errors.Is(err, os.ErrDeadlineExceeded) || c.raw.SetReadDeadline(time.Time{}) != nil {
			return false
		}
	}
	s, ok := c.raw.(syscall.Conn)
	if !ok {
		return true // if it is not alive, RoundTrip returns ErrStale
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	silent := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		silent = err == syscall.EAGAIN
	})
	return err == nil && silent
}

// RoundTrip sends a request and returns its response; the caller closes the body. Of the
// request it uses Method, the path and query of URL, Host, Header (without Host and
// framing), Body, ContentLength and Trailer. It calls informed for each 1xx response except
// 100 and 101. The end of the request's context closes the connection.
//
// RoundTrip does not close the request's body, and may read it until after the end of the
// response; the caller stops that. It calls done exactly once, when the exchange has
// ended or failed, and reports whether the connection is reusable.
func (c *Conn) RoundTrip(r *http.Request, informed func(int, textproto.MIMEHeader) error, done func(reusable bool)) (*http.Response, error) {
	t := &exchange{c: c, r: r, finished: done}
	t.release = context.AfterFunc(r.Context(), func() { _ = c.Close() })
	res, err := t.run(informed)
	if err != nil {
		if cause := r.Context().Err(); cause != nil {
			err = cause
		}
		t.finish(false)
		return nil, err
	}
	return res, nil
}

// exchange is a request in flight and its response.
type exchange struct {
	c        *Conn
	r        *http.Request
	release  func() bool // detaches the request's context
	finished func(reusable bool)
	upload   *upload // nil without a body
	over     atomic.Bool
}

func (t *exchange) run(informed func(int, textproto.MIMEHeader) error) (*http.Response, error) {
	c := t.c
	if err := t.writeHead(); err != nil {
		return nil, err
	}
	if t.upload == nil {
		if err := c.w.Flush(); err != nil {
			return nil, t.unanswered(err)
		}
	} else {
		go t.upload.run()
	}
	for range maxInformational {
		c.in.N = c.maxHead
		if _, err := c.r.Peek(1); err != nil {
			return nil, t.unanswered(err)
		}
		res, err := http.ReadResponse(c.r, t.r)
		if err != nil {
			if c.in.N <= 0 {
				err = errTooLarge
			}
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, t.cause(err)
		}
		switch status := res.StatusCode; {
		case status == http.StatusContinue:
			t.upload.decide(true)
		case status == http.StatusSwitchingProtocols, status < 100, status > 199:
			return t.response(res), nil
		default:
			if err := informed(status, textproto.MIMEHeader(res.Header)); err != nil {
				return nil, err
			}
		}
	}
	return nil, errors.New("http1: too many 1xx responses")
}

// unanswered describes an error before the first byte of the response: ErrStale if the
// server closed a reused connection.
func (t *exchange) unanswered(err error) error {
	if t.c.used && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)) {
		return fmt.Errorf("%w: %w", ErrStale, t.cause(err))
	}
	return t.cause(err)
}

// cause returns the error for which the upload closed the connection, or else err.
func (t *exchange) cause(err error) error {
	if t.upload != nil {
		if failure := t.upload.failed.Load(); failure != nil {
			return *failure
		}
	}
	return err
}

// writeHead writes the request line and the header, and prepares the upload.
func (t *exchange) writeHead() error {
	r, w := t.r, t.c.w
	target := r.URL.RequestURI()
	if strings.ContainsFunc(target, func(c rune) bool { return c <= ' ' || c == 0x7f }) {
		return errors.New("http1: invalid character in request target")
	}
	if !httpguts.ValidHostHeader(r.Host) {
		return errors.New("http1: invalid host")
	}
	_, _ = w.WriteString(r.Method)
	_ = w.WriteByte(' ')
	_, _ = w.WriteString(target)
	_, _ = w.WriteString(" HTTP/1.1\r\nHost: ")
	_, _ = w.WriteString(r.Host)
	_, _ = w.WriteString("\r\n")
	if err := writeFields(w, r.Header); err != nil {
		w.Reset(t.c.conn) // discard the partial head
		return err
	}
	hasBody := r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0
	switch {
	case hasBody && (r.ContentLength < 0 || len(r.Trailer) > 0):
		_, _ = w.WriteString("Transfer-Encoding: chunked\r\n")
		if len(r.Trailer) > 0 {
			writeField(w, "Trailer", strings.Join(slices.Sorted(maps.Keys(r.Trailer)), ","))
		}
	case hasBody:
		writeField(w, "Content-Length", strconv.FormatInt(r.ContentLength, 10))
	case r.Method == http.MethodPost, r.Method == http.MethodPut, r.Method == http.MethodPatch:
		writeField(w, "Content-Length", "0") // RFC 9110, section 8.6
	}
	_, err := w.WriteString("\r\n")
	if hasBody {
		t.upload = &upload{c: t.c, r: r, over: make(chan struct{})}
		if httpguts.HeaderValuesContainsToken(r.Header["Expect"], "100-continue") {
			t.upload.proceed = make(chan bool, 1)
		}
	}
	return err
}

// response wraps the body of a final response.
func (t *exchange) response(res *http.Response) *http.Response {
	t.c.in.N = unlimited
	if res.StatusCode == http.StatusSwitchingProtocols {
		res.Body = &switched{Reader: t.c.r, t: t}
		return res
	}
	t.upload.decide(false) // no 100: the server does not want the body
	reusable := !res.Close
	if res.Body == http.NoBody {
		t.complete(reusable)
		return res
	}
	res.Body = &responseBody{t: t, body: res.Body, reusable: reusable}
	return res
}

// complete ends the exchange after the whole response was read. The connection is
// reusable once the upload has ended, too.
func (t *exchange) complete(reusable bool) {
	switch {
	case !reusable || t.c.r.Buffered() > 0: // unsolicited data
		t.finish(false)
	case t.upload == nil:
		t.finish(true)
	default:
		select {
		case <-t.upload.over:
			t.finish(t.upload.failed.Load() == nil)
		default:
			go func() {
				select {
				case <-t.upload.over:
					t.finish(t.upload.failed.Load() == nil)
				case <-time.After(uploadTimeout):
					t.finish(false)
				}
			}()
		}
	}
}

// finish ends the exchange. Only the first call has an effect.
func (t *exchange) finish(reusable bool) {
	if t.over.Swap(true) {
		return
	}
	if !t.release() || !reusable { // the end of the context closes the connection, too
		reusable = false
		_ = t.c.Close()
	}
	t.c.used = true
	t.finished(reusable)
}

// responseBody completes its exchange at EOF.
type responseBody struct {
	t        *exchange
	body     io.ReadCloser
	reusable bool
	atEOF    atomic.Bool
}

func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	switch {
	case err == io.EOF:
		if !b.atEOF.Swap(true) {
			b.t.complete(b.reusable)
		}
	case err != nil:
		if cause := b.t.r.Context().Err(); cause != nil {
			err = cause
		}
		b.t.finish(false)
	}
	return n, err
}

// Close closes the connection unless the body was read to EOF. It may be called
// concurrently with Read.
func (b *responseBody) Close() error {
	if !b.atEOF.Load() {
		b.t.finish(false)
	}
	return nil
}

// switched is the body of a 101 response: the connection in its new protocol.
type switched struct {
	io.Reader
	t *exchange
}

func (s *switched) Write(b []byte) (int, error) { return s.t.c.conn.Write(b) }
func (s *switched) Close() error                { s.t.finish(false); return nil }

// CloseWrite closes the sending side.
func (s *switched) CloseWrite() error {
	if half, ok := s.t.c.conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// upload sends the body of a request in its own goroutine, since the server may respond
// before the end of the body.
type upload struct {
	c       *Conn
	r       *http.Request
	proceed chan bool // receives whether the body is wanted; nil without Expect
	over    chan struct{}
	failed  atomic.Pointer[error]
}

// decide reports whether the server wants the body. Only the first call has an effect. u may
// be nil.
func (u *upload) decide(wanted bool) {
	if u == nil || u.proceed == nil {
		return
	}
	select {
	case u.proceed <- wanted:
	default:
	}
}

func (u *upload) run() {
	defer close(u.over)
	err := u.send()
	if err == nil {
		return
	}
	u.failed.Store(&err)
	if !errors.Is(err, errNotContinued) && !errors.As(err, new(*writeError)) {
		_ = u.c.Close() // the server would wait for the rest of the body
	}
}

// writeError is a failed write to the server, which may have sent a response before it
// closed the connection.
type writeError struct{ error }

func (e *writeError) Unwrap() error { return e.error }

func (u *upload) send() error {
	if err := u.c.w.Flush(); err != nil {
		return &writeError{err}
	}
	if u.proceed != nil {
		wait := time.NewTimer(continueTimeout)
		defer wait.Stop()
		select {
		case wanted := <-u.proceed:
			if !wanted {
				return errNotContinued
			}
		case <-wait.C:
		}
	}
	p := pieces.Get().(*piece)
	defer pieces.Put(p)
	chunked := u.r.ContentLength < 0 || len(u.r.Trailer) > 0
	for left := u.r.ContentLength; ; {
		n, err := u.r.Body.Read(p.data())
		if left -= int64(n); left < 0 && !chunked {
			return errBodyLength
		}
		if n > 0 {
			part := p.data()[:n]
			if chunked {
				part = p.chunk(n)
			}
			if _, err := u.c.conn.Write(part); err != nil {
				return &writeError{err}
			}
		}
		switch {
		case err == nil:
		case err != io.EOF:
			return err
		case chunked:
			return u.sendTrailers()
		case left > 0:
			return errBodyLength
		default:
			return nil
		}
	}
}

// sendTrailers ends a body in chunks.
func (u *upload) sendTrailers() error {
	w := u.c.w // empty: the head was flushed
	_, _ = w.WriteString("0\r\n")
	if err := writeFields(w, u.r.Trailer); err != nil {
		return err
	}
	_, _ = w.WriteString("\r\n")
	if err := w.Flush(); err != nil {
		return &writeError{err}
	}
	return nil
}
