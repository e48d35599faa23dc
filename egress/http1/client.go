package http1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"
)

const (
	// continueTime is how long a server has to answer `Expect: 100-continue` before it
	// is sent the body unasked, as curl waits.
	continueTime = time.Second
	// uploadTime is how long what is written of a request may take after its response
	// has ended, for the connection to be kept.
	uploadTime = time.Second
	// maxInformational bounds the 1xx responses to a request.
	maxInformational = 32
)

// ErrStale is returned for a kept connection that the server had closed before it
// answered: the request may be sent again over another if it is idempotent.
var ErrStale = errors.New("http1: the server closed the kept connection")

var (
	errInformational = errors.New("http1: too many 1xx responses")
	errBodyLength    = errors.New("http1: the request's body has not the length that was announced")
	errNotContinued  = errors.New("http1: the response came before the body was asked for")
)

// Conn is a connection to a server. It carries one request at a time.
type Conn struct {
	conn net.Conn // TLS, or raw
	raw  net.Conn
	in   limited
	r    *bufio.Reader
	w    *bufio.Writer
	used bool // for an earlier request

	maxHead int64
	done    func(reusable bool) // of the request under way, called once
	closing sync.Once
}

// NewConn returns a connection over conn, which is TLS over raw or raw itself. The head
// of a response has at most maxHead bytes.
func NewConn(conn, raw net.Conn, maxHead int64) *Conn {
	c := &Conn{conn: conn, raw: raw, maxHead: maxHead, w: bufio.NewWriterSize(conn, bufferSize)}
	c.in.r = conn
	c.r = bufio.NewReaderSize(&c.in, bufferSize)
	return c
}

// RemoteAddr is the server's.
func (c *Conn) RemoteAddr() net.Addr { return c.raw.RemoteAddr() }

// Close closes the connection, at once. It may be called at any time and more than once.
func (c *Conn) Close() error {
	c.closing.Do(func() { _ = c.raw.Close() }) // TLS would wait for its goodbye to be written
	return nil
}

// alive reports whether the connection, over which no request is under way, can be used
// once more: the server has neither closed it nor sent anything.
func (c *Conn) alive() bool {
	if c.conn != c.raw { // TLS may have read more than it was asked for
		_ = c.raw.SetReadDeadline(time.Unix(1, 0))
		_, err := c.r.Peek(1)
		if !errors.Is(err, os.ErrDeadlineExceeded) || c.raw.SetReadDeadline(time.Time{}) != nil {
			return false
		}
	}
	s, ok := c.raw.(syscall.Conn)
	if !ok {
		return true // a failure shows as ErrStale
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

// RoundTrip sends a request and returns the head of its response, whose body the caller
// closes. The request's URL has the path and query; its Host is the authority, its
// header has neither Host nor anything about framing. informed is told of 1xx responses
// but 100 and 101. When the context of the request ends the connection is closed.
//
// The body of the request is not closed, and may still be read after the response has
// ended: the caller ends that. done is called once, after an error too: when the
// response has ended, and with whether another request may follow.
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

// exchange is a request under way, and its response.
type exchange struct {
	c        *Conn
	r        *http.Request
	release  func() bool // from the request's context
	finished func(reusable bool)
	uploads  *upload // nil: there is no body
	over     atomic.Bool
}

func (t *exchange) run(informed func(int, textproto.MIMEHeader) error) (*http.Response, error) {
	c := t.c
	if err := t.head(); err != nil {
		return nil, err
	}
	if t.uploads == nil {
		if err := c.w.Flush(); err != nil {
			return nil, t.unsent(err)
		}
	} else {
		go t.uploads.run()
	}
	for range maxInformational {
		c.in.left = c.maxHead
		if _, err := c.r.Peek(1); err != nil {
			return nil, t.unsent(err)
		}
		res, err := http.ReadResponse(c.r, t.r)
		if err != nil {
			if c.in.left <= 0 {
				err = errTooLarge
			}
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, t.broken(err)
		}
		switch status := res.StatusCode; {
		case status == http.StatusContinue:
			t.uploads.goOn(true)
		case status == http.StatusSwitchingProtocols, status < 100, status > 199:
			return t.response(res), nil
		default:
			if err := informed(status, textproto.MIMEHeader(res.Header)); err != nil {
				return nil, err
			}
		}
	}
	return nil, errInformational
}

// unsent is an error before the first byte of the response. A server that reads a
// kept connection closes it at the same time.
func (t *exchange) unsent(err error) error {
	if t.c.used && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)) {
		return fmt.Errorf("%w: %w", ErrStale, t.broken(err))
	}
	return t.broken(err)
}

// broken prefers the reason for which the upload has closed the connection.
func (t *exchange) broken(err error) error {
	if t.uploads != nil {
		if cause := t.uploads.failed.Load(); cause != nil {
			return *cause
		}
	}
	return err
}

// head writes what is before the body, and prepares that.
func (t *exchange) head() error {
	r, w := t.r, t.c.w
	target := r.URL.RequestURI()
	if strings.ContainsFunc(target, func(c rune) bool { return c <= ' ' || c == 0x7f }) {
		return errors.New("http1: the request's target has characters that are not allowed")
	}
	if !httpguts.ValidHostHeader(r.Host) {
		return errors.New("http1: the request's host is not valid")
	}
	_, _ = w.WriteString(r.Method)
	_ = w.WriteByte(' ')
	_, _ = w.WriteString(target)
	_, _ = w.WriteString(" HTTP/1.1\r\nHost: ")
	_, _ = w.WriteString(r.Host)
	_, _ = w.WriteString("\r\n")
	if err := writeFields(w, r.Header); err != nil {
		w.Reset(t.c.conn) // nothing of it is sent
		return err
	}
	hasBody := r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0
	switch {
	case hasBody && (r.ContentLength < 0 || len(r.Trailer) > 0):
		_, _ = w.WriteString("Transfer-Encoding: chunked\r\n")
		if len(r.Trailer) > 0 {
			names := make([]string, 0, len(r.Trailer))
			for name := range r.Trailer {
				names = append(names, name)
			}
			slices.Sort(names)
			writeField(w, "Trailer", strings.Join(names, ","))
		}
	case hasBody:
		writeField(w, "Content-Length", strconv.FormatInt(r.ContentLength, 10))
	case r.Method == http.MethodPost, r.Method == http.MethodPut, r.Method == http.MethodPatch:
		writeField(w, "Content-Length", "0") // servers expect it (RFC 9110, section 8.6)
	}
	_, err := w.WriteString("\r\n")
	if hasBody {
		t.uploads = &upload{c: t.c, r: r, over: make(chan struct{})}
		if httpguts.HeaderValuesContainsToken(r.Header["Expect"], "100-continue") {
			t.uploads.proceed = make(chan bool, 1)
		}
	}
	return err
}

// response returns the response as the caller reads it.
func (t *exchange) response(res *http.Response) *http.Response {
	t.c.in.left = 1<<63 - 1
	if res.StatusCode == http.StatusSwitchingProtocols {
		res.Body = &switched{Reader: t.c.r, t: t}
		return res
	}
	t.uploads.goOn(false) // the server does not want a body that it has not asked for
	reusable := !res.Close
	if res.Body == http.NoBody {
		t.end(reusable)
		return res
	}
	res.Body = &responseBody{t: t, body: res.Body, reusable: reusable}
	return res
}

// end is after the whole response was read.
func (t *exchange) end(reusable bool) {
	switch {
	case !reusable || t.c.r.Buffered() > 0: // what comes unasked answers nothing
		t.finish(false)
	case t.uploads == nil:
		t.finish(true)
	default:
		select {
		case <-t.uploads.over:
			t.finish(t.uploads.failed.Load() == nil)
		default:
			go func() {
				select {
				case <-t.uploads.over:
					t.finish(t.uploads.failed.Load() == nil)
				case <-time.After(uploadTime):
					t.finish(false)
				}
			}()
		}
	}
}

// finish ends the exchange. It may be called more than once.
func (t *exchange) finish(reusable bool) {
	if t.over.Swap(true) {
		return
	}
	if !t.release() || !reusable { // the context has ended, and closes the connection
		reusable = false
		_ = t.c.Close()
	}
	t.c.used = true
	t.finished(reusable)
}

// responseBody ends its exchange with its end.
type responseBody struct {
	t        *exchange
	body     io.ReadCloser
	reusable bool
	whole    atomic.Bool // it was read to its end
}

func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	switch {
	case err == io.EOF:
		if !b.whole.Swap(true) {
			b.t.end(b.reusable)
		}
	case err != nil:
		if cause := b.t.r.Context().Err(); cause != nil {
			err = cause
		}
		b.t.finish(false)
	}
	return n, err
}

// Close ends the response: before its end with its connection, for the rest may be long.
// It may be called while another goroutine reads.
func (b *responseBody) Close() error {
	if !b.whole.Load() {
		b.t.finish(false)
	}
	return nil
}

// switched is a connection that speaks another protocol from now on.
type switched struct {
	io.Reader
	t *exchange
}

func (s *switched) Write(b []byte) (int, error) { return s.t.c.conn.Write(b) }
func (s *switched) Close() error                { s.t.finish(false); return nil }

// CloseWrite says that no more will be sent.
func (s *switched) CloseWrite() error {
	if half, ok := s.t.c.conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// upload is the body of a request on its way to the server, in a goroutine of its own:
// the server may answer before its end.
type upload struct {
	c       *Conn
	r       *http.Request
	proceed chan bool // nil: the server is not asked first
	over    chan struct{}
	failed  atomic.Pointer[error]
}

// goOn says whether the body is wanted. It may be called on nil, and more than once: the
// first counts.
func (u *upload) goOn(wanted bool) {
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
		_ = u.c.Close() // the server would wait for the rest
	}
}

// writeError is of the connection to the server, which may have answered before it
// closed that.
type writeError struct{ error }

func (e *writeError) Unwrap() error { return e.error }

func (u *upload) send() error {
	if err := u.c.w.Flush(); err != nil {
		return &writeError{err}
	}
	if u.proceed != nil {
		wait := time.NewTimer(continueTime)
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
	if u.r.ContentLength >= 0 && len(u.r.Trailer) == 0 {
		return u.measured(p)
	}
	return u.chunked(p)
}

// measured sends a body whose length was announced.
func (u *upload) measured(p *piece) error {
	left := u.r.ContentLength
	for {
		n, err := u.r.Body.Read(p.data())
		if left -= int64(n); left < 0 {
			return errBodyLength
		}
		if n > 0 {
			if _, err := u.c.conn.Write(p.data()[:n]); err != nil {
				return &writeError{err}
			}
		}
		switch {
		case err == io.EOF && left > 0:
			return errBodyLength
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

func (u *upload) chunked(p *piece) error {
	for {
		n, err := u.r.Body.Read(p.data())
		if n > 0 {
			if _, err := u.c.conn.Write(p.chunk(n)); err != nil {
				return &writeError{err}
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	w := u.c.w // is empty
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
