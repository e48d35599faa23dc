package intercept

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/framing"
)

// Why a request is refused whose end is not certain.
const (
	reasonTwoEnds = "it says in two ways where it ends: by Transfer-Encoding, and by Content-Length or HTTP/1.0 (RFC 9112, section 6.1)"
	reasonAfter   = "it comes after a body that is broken, so that nobody knows where it begins (RFC 9112, section 11.2)"
)

// codeMalformed is of refusals that the library's server words itself, so that no
// client sees it.
const codeMalformed = "malformed"

// plain is what a client and the library's server say to each other over HTTP/1.1, or
// over HTTP/2 that began without TLS. It notes what that server says to nobody else:
// requests whose end is not certain, and those that it refused.
type plain struct {
	net.Conn // wire, or TLS over it
	of       *connection
	requests framing.Scanner
	waits    atomic.Bool // for a request: none of HTTP/1.1 has a handler
	broken   atomic.Bool // reading has failed: what the library's server says then, it says of that
	lingers  atomic.Bool // when it is closed
	aborted  atomic.Bool // a handler has ended it: nothing more is read
}

// linger is how long what a client sends is thrown away after the last answer, as the
// library's server waits in such cases. Else the client's kernel would hear a reset, and
// the client maybe nothing of the answer (RFC 9112, section 9.6).
const linger = 500 * time.Millisecond

// plainTLS is a plain over TLS. Its method tells the library's server not to look for
// HTTP/2 in it, on which TLS would have agreed.
type plainTLS struct{ *plain }

// ConnectionState is of TLS, whose handshake is done.
func (p plainTLS) ConnectionState() tls.ConnectionState { return p.of.tls.ConnectionState() }

// serve gives the connection to the library's server, which looks for HTTP/2 in TLS
// itself.
func (c *connection) serve() {
	switch {
	case c.tls == nil:
		c.served = c.speak(c.wire)
	case c.tls.ConnectionState().NegotiatedProtocol == "h2":
		c.served = c.tls
	default:
		c.served = plainTLS{c.speak(c.tls)}
	}
}

func (c *connection) speak(conn net.Conn) *plain {
	c.plain = &plain{Conn: conn, of: c}
	c.plain.waits.Store(true)
	return c.plain
}

func (p *plain) Read(b []byte) (int, error) {
	if p.aborted.Load() {
		return 0, net.ErrClosed
	}
	n, err := p.Conn.Read(b)
	if n > 0 {
		p.requests.Scan(b[:n])
		return n, nil // an error comes again
	}
	if err != nil && err != io.EOF && !errors.Is(err, os.ErrDeadlineExceeded) { // by which the library's server interrupts itself
		p.broken.Store(true)
	}
	return n, err
}

// Write implements net.Conn. What is written while no request has a handler is a
// refusal of the library's server.
func (p *plain) Write(b []byte) (int, error) {
	if p.waits.Load() && !p.broken.Load() && bytes.HasPrefix(b, []byte("HTTP/1.")) { // it is the last of the connection
		p.of.unreadable(b)
	}
	return p.Conn.Write(b)
}

// Close implements net.Conn. It lasts for linger where the client may still send.
func (p *plain) Close() error {
	if p.lingers.Swap(false) && p.CloseWrite() == nil && p.SetReadDeadline(time.Now().Add(linger)) == nil {
		io.Copy(io.Discard, p.Conn) // fails at last, by the deadline or by the client's end
	}
	return p.Conn.Close()
}

// CloseWrite says that no more will be sent.
func (p *plain) CloseWrite() error {
	if half, ok := p.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

func (p *plain) idle() { p.waits.Store(true) }

// waits is told by the library's server that it has answered a request of HTTP/1.1
// and looks for the next one.
func waits(conn net.Conn, s http.ConnState) {
	if p, ok := conn.(interface{ idle() }); ok && s == http.StateIdle {
		p.idle()
	}
}

// uncertain says why the last request that entered, to be answered by w, may be
// another than the client sent; empty if it is not.
func (c *connection) uncertain(w http.ResponseWriter) string {
	if _, ok := w.(http.Hijacker); !ok || c.plain == nil { // it is of HTTP/2, which can do that in no way
		return ""
	}
	switch requests := &c.plain.requests; {
	case requests.Certain() >= c.entered.Load():
		return ""
	case requests.TwoEnds():
		return reasonTwoEnds
	default:
		return reasonAfter
	}
}

// unreadable tells of a request that the library's server has refused with an answer.
func (c *connection) unreadable(answer []byte) {
	if !c.begin() {
		return
	}
	defer c.leave()
	line, rest, _ := bytes.Cut(answer, []byte("\r\n"))
	_, status, _ := bytes.Cut(line, []byte{' '})
	code, _, _ := bytes.Cut(status, []byte{' '})
	number, _ := strconv.Atoi(string(code))
	if _, text, ok := bytes.Cut(rest, []byte("\r\n\r\n")); ok && len(text) > 0 {
		status = text // which says more
	}
	c.to.refused(&http.Request{URL: new(url.URL)}, number, Refusal{
		Code: codeMalformed, Reason: fmt.Sprintf("it is no request that can be carried: %.80s", status), Host: c.to.Host,
	})
}
