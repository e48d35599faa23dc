package intercept

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"

	"github.com/doze-run/doze/egress/framing"
)

// reasonFraming is why a request is refused whose end is not certain.
const reasonFraming = "it says in two ways where it ends: by Transfer-Encoding, and by Content-Length or HTTP/1.0 (RFC 9112, section 6.1)"

// codeMalformed is of refusals that the library's server words itself, so that no
// client sees it.
const codeMalformed = "malformed"

// plain is what a client and the library's server say to each other over HTTP/1.1, or
// over HTTP/2 that began without TLS. It notes what that server says to nobody else:
// requests whose end it found in one of two ways, and those that it refused.
type plain struct {
	net.Conn // wire, or TLS over it
	of       *connection
	requests framing.Scanner
	waits    atomic.Bool // for a request: none of HTTP/1.1 has a handler
}

// serve gives the connection to the library's server, which looks for HTTP/2 in TLS
// itself.
func (c *connection) serve() {
	switch {
	case c.tls == nil:
		c.speak(c.wire)
	case c.tls.ConnectionState().NegotiatedProtocol == "h2":
		c.served = c.tls
	default:
		c.speak(c.tls)
	}
}

func (c *connection) speak(conn net.Conn) {
	c.plain = &plain{Conn: conn, of: c}
	c.plain.waits.Store(true)
	c.served = c.plain
}

func (p *plain) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	p.requests.Scan(b[:n])
	return n, err
}

// Write implements net.Conn. What is written while no request has a handler is a
// refusal of the library's server.
func (p *plain) Write(b []byte) (int, error) {
	if p.waits.Load() && bytes.HasPrefix(b, []byte("HTTP/1.")) { // it is the last of the connection
		p.of.unreadable(b)
	}
	return p.Conn.Write(b)
}

// CloseWrite says that no more will be sent.
func (p *plain) CloseWrite() error {
	if half, ok := p.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// waits is told by the library's server that it has answered a request of HTTP/1.1
// and looks for the next one.
func waits(conn net.Conn, s http.ConnState) {
	if p, ok := conn.(*plain); ok && s == http.StateIdle {
		p.waits.Store(true)
	}
}

// ambiguous says whether r, the last request that entered, can be read in two ways.
func (c *connection) ambiguous(r *http.Request) bool {
	return c.plain != nil && r.ProtoMajor == 1 && c.plain.requests.Ambiguous() == c.entered.Load()
}

// unreadable tells of a request that the library's server has refused with an answer.
func (c *connection) unreadable(answer []byte) {
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
