package http1

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/problem"
	"golang.org/x/net/http/httpguts"
)

// malformed returns the problem of a request that cannot be parsed. Details quote nothing of
// the request, which may contain a secret.
func malformed(what string) *problem.Problem {
	return problem.New(problem.RequestMalformed, "malformed "+what)
}

const reasonAmbiguous = "ambiguous framing: Transfer-Encoding together with Content-Length or HTTP/1.0 (RFC 9112, section 6.1)"

// readRequest reads the head of the next request. An error other than a *problem.Problem is
// the connection's: io.EOF between two requests.
func (c *serverConn) readRequest() (*http.Request, error) {
	c.in.N, c.minor = c.s.MaxHead+bufferSize, 1
	line, err := c.requestLine()
	if err != nil {
		return nil, c.headError(err)
	}
	method, rest, _ := strings.Cut(line, " ")
	target, version, ok := strings.Cut(rest, " ")
	if !ok || !httpguts.ValidHeaderFieldName(method) { // both are tokens
		return nil, malformed("request line")
	}
	r := &http.Request{Method: method, RequestURI: target, Proto: version, RemoteAddr: c.remote}
	if r.ProtoMajor, r.ProtoMinor, ok = http.ParseHTTPVersion(version); !ok {
		return nil, malformed("HTTP version")
	}
	if r.ProtoMajor == 1 {
		c.minor = r.ProtoMinor
	}
	if r.Header, err = fields(c.lines); err != nil {
		return nil, c.headError(err)
	}
	if r.ProtoMajor != 1 {
		return nil, problem.New(problem.HTTPVersionUnsupported, "unsupported protocol version")
	}
	if err := parseTarget(r); err != nil {
		return nil, err
	}
	if err := parseHost(r); err != nil {
		return nil, err
	}
	if err := c.frame(r); err != nil {
		return nil, err
	}
	r.Close = httpguts.HeaderValuesContainsToken(r.Header["Connection"], "close") ||
		r.ProtoMinor == 0 && !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "keep-alive")
	return r, nil
}

// requestLine reads the request line. It skips the empty lines that some clients send after
// a body (RFC 9112, section 2.2).
func (c *serverConn) requestLine() (string, error) {
	for range 4 {
		b, err := c.r.Peek(1)
		if err != nil {
			return "", err
		}
		if b[0] != '\r' && b[0] != '\n' {
			break
		}
		_, _ = c.r.Discard(1)
	}
	line, err := c.r.ReadString('\n')
	return strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r"), err
}

// fields reads a header or trailers.
func fields(lines *textproto.Reader) (http.Header, error) {
	fields, err := lines.ReadMIMEHeader()
	if err != nil {
		return nil, err
	}
	for name, values := range fields {
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, malformed("name of a header field")
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) {
				return nil, malformed("value of a header field")
			}
		}
	}
	return http.Header(fields), nil
}

// headError converts a parser's error to a *problem.Problem, and returns other errors unchanged.
func (c *serverConn) headError(err error) error {
	if c.in.N <= 0 {
		return problem.New(problem.HeaderTooLarge, http.StatusText(http.StatusRequestHeaderFieldsTooLarge))
	}
	if _, ok := errors.AsType[textproto.ProtocolError](err); ok {
		return malformed("header")
	}
	return err
}

func parseTarget(r *http.Request) *problem.Problem {
	target := r.RequestURI
	authority := r.Method == http.MethodConnect && !strings.HasPrefix(target, "/")
	if authority {
		target = "http://" + target
	}
	u, err := url.ParseRequestURI(target)
	if err != nil {
		return malformed("request target")
	}
	if authority {
		u.Scheme = ""
	}
	r.URL = u
	return nil
}

func parseHost(r *http.Request) *problem.Problem {
	hosts := r.Header["Host"]
	switch {
	case len(hosts) > 1:
		return problem.New(problem.RequestMalformed, "too many Host headers")
	case len(hosts) == 0 && r.ProtoMinor > 0 && r.Method != http.MethodConnect:
		return problem.New(problem.RequestMalformed, "missing required Host header")
	case len(hosts) == 1 && !httpguts.ValidHostHeader(hosts[0]):
		return malformed("Host header")
	}
	r.Host = r.URL.Host
	if r.Host == "" && len(hosts) == 1 {
		r.Host = hosts[0]
	}
	delete(r.Header, "Host")
	return nil
}

// frame sets the request's body and its length (RFC 9112, section 6.3).
func (c *serverConn) frame(r *http.Request) *problem.Problem {
	codings, isCoded := r.Header["Transfer-Encoding"]
	lengths, isMeasured := r.Header["Content-Length"]
	c.body = nil
	r.Body = http.NoBody
	switch {
	case isCoded && (isMeasured || r.ProtoMinor == 0):
		return problem.New(problem.RequestAmbiguous, reasonAmbiguous)
	case isCoded && (len(codings) != 1 || !strings.EqualFold(codings[0], "chunked")):
		return problem.New(problem.TransferEncodingUnsupported, "Unsupported transfer encoding")
	case isCoded:
		if err := announceTrailers(r); err != nil {
			return err
		}
		delete(r.Header, "Transfer-Encoding")
		r.TransferEncoding, r.ContentLength = []string{"chunked"}, -1
		c.body = &requestBody{c: c, r: r, from: httputil.NewChunkedReader(c.r)}
	case isMeasured:
		length, err := strconv.ParseUint(lengths[0], 10, 63)
		if err != nil || strings.TrimLeft(lengths[0], "0123456789") != "" {
			return malformed("Content-Length")
		}
		for _, other := range lengths[1:] {
			if other != lengths[0] {
				return malformed("Content-Length: different lengths")
			}
		}
		r.Header["Content-Length"] = lengths[:1]
		if r.ContentLength = int64(length); length > 0 {
			c.body = &requestBody{c: c, r: r, from: &io.LimitedReader{R: c.r, N: int64(length)}}
		}
	}
	expect := r.Header["Expect"]
	switch {
	case len(expect) == 0:
	case r.ProtoMinor == 0 || !strings.EqualFold(expect[0], "100-continue") || len(expect) > 1:
		return problem.New(problem.ExpectationUnsupported, http.StatusText(http.StatusExpectationFailed))
	case c.body != nil:
		c.body.awaited = true
	}
	if c.body != nil {
		r.Body = c.body
	}
	return nil
}

// framingFields are not allowed in trailers (RFC 9110, section 6.5.1).
var framingFields = []string{"Transfer-Encoding", "Content-Length", "Trailer", "Host"}

func announceTrailers(r *http.Request) *problem.Problem {
	announced, ok := r.Header["Trailer"]
	if !ok {
		return nil
	}
	delete(r.Header, "Trailer")
	r.Trailer = http.Header{}
	for _, name := range trailerNames(announced) {
		r.Trailer[name] = nil
	}
	for _, name := range framingFields {
		if _, ok := r.Trailer[name]; ok {
			return malformed("Trailer: " + name + " must not be one")
		}
	}
	return nil
}

// trailerNames returns the names that fields announce.
func trailerNames(fields []string) (names []string) {
	for _, field := range fields {
		for name := range strings.SplitSeq(field, ",") {
			if name = http.CanonicalHeaderKey(textproto.TrimString(name)); name != "" {
				names = append(names, name)
			}
		}
	}
	return names
}

// requestBody is the body of the current request. Any goroutine may read it until the
// handler returns.
type requestBody struct {
	c    *serverConn
	r    *http.Request // gets the trailers
	from io.Reader     // chunks, or as many bytes as Content-Length

	mu      sync.Mutex
	awaited bool  // the client waits for 100 Continue
	begun   bool  // Begin or Read was called
	err     error // sticky; io.EOF at the end
}

var errBodyClosed = errors.New("http1: request body read after the handler returned")

func (b *requestBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.begun = true
	if b.err != nil {
		return 0, b.err
	}
	if b.awaited {
		b.awaited = false
		if err := b.c.w.writeContinue(); err != nil {
			b.err = err
			return 0, err
		}
	}
	n, err := b.read(p)
	if b.err = err; err == io.EOF {
		b.c.watch()
	}
	return n, err
}

// Begin marks the body as being read, perhaps by another goroutine: a response before its
// end ends the connection.
func (b *requestBody) Begin() {
	b.mu.Lock()
	b.begun = true
	b.mu.Unlock()
}

// read reads from the connection. The caller holds b.mu, or nothing else can read.
func (b *requestBody) read(p []byte) (int, error) {
	n, err := b.from.Read(p)
	if measured, ok := b.from.(*io.LimitedReader); ok {
		switch {
		case measured.N == 0:
			err = io.EOF
		case err == io.EOF:
			err = io.ErrUnexpectedEOF
		}
	} else if err == io.EOF {
		err = b.readTrailers()
	}
	return n, err
}

// readTrailers reads the trailer section after the last chunk and returns io.EOF. As in
// chunks, a line must end with CRLF.
func (b *requestBody) readTrailers() error {
	var section []byte
	for {
		line, err := b.c.r.ReadSlice('\n')
		switch {
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return fmt.Errorf("http1: read trailers: %w", err)
		case !bytes.HasSuffix(line, []byte("\r\n")) || len(section)+len(line) > maxTrailers:
			return errors.New("http1: malformed or too long trailer section")
		}
		section = append(section, line...)
		if len(line) == len("\r\n") {
			break
		}
	}
	if len(section) == len("\r\n") {
		return io.EOF
	}
	trailer, err := fields(textproto.NewReader(bufio.NewReader(bytes.NewReader(section))))
	if err != nil {
		return err
	}
	for _, name := range framingFields {
		delete(trailer, name)
	}
	if b.r.Trailer == nil {
		b.r.Trailer = http.Header{}
	}
	maps.Copy(b.r.Trailer, trailer)
	return io.EOF
}

// Close implements io.Closer. The server discards the rest.
func (b *requestBody) Close() error { return nil }

// atEOF reports whether the body was read to its end.
func (b *requestBody) atEOF() bool {
	if b == nil {
		return true
	}
	if !b.mu.TryLock() { // it is being read
		return false
	}
	defer b.mu.Unlock()
	return b.err == io.EOF
}

// unfinished reports whether a part of the body may remain on the connection after the
// response: if reading has begun, or if the client waits for 100 Continue.
func (b *requestBody) unfinished() bool {
	if b == nil {
		return false
	}
	if !b.mu.TryLock() { // it is being read
		return true
	}
	defer b.mu.Unlock()
	return b.awaited || b.begun && b.err != io.EOF
}

// stop makes Read fail, and interrupts one that waits for the client. It returns the body's
// error until then: io.EOF at its end, nil if more of it follows.
func (b *requestBody) stop() error {
	if b == nil {
		return io.EOF
	}
	if !b.mu.TryLock() {
		_ = b.c.conn.SetReadDeadline(time.Unix(1, 0))
		b.mu.Lock()
		if b.err == nil { // the interrupted Read returned data
			b.err = errBodyClosed
		}
	}
	defer b.mu.Unlock()
	err := b.err
	if err == nil {
		b.err = errBodyClosed
	}
	return err
}
