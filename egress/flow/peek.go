package flow

import (
	"bytes"
	"errors"
	"io"
	"sync/atomic"

	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/egress/tls/clienthello"
)

// errSilent is the failure of a connection that ends before its first bytes decide where it goes.
var errSilent = errors.New("the client ended the connection before it sent anything")

// peekedConn is an accepted connection whose first bytes may have been read.
type peekedConn struct {
	proxy.Conn
	first        []byte      // already read, and to be returned by Read
	expectedHost string      // name that a ClientHello must have; empty once it was checked
	detached     atomic.Bool // it outlives the connection to the server
}

// protocol is the protocol that a client's first bytes indicate.
type protocol int

const (
	protocolOther protocol = iota
	protocolTLS
	protocolHTTP
)

// longestMethod is the number of letters up to which sniff waits for the end of a method:
// the longest registered one has 17 (RFC 4437). More letters count as a request, which is
// refused as one.
const longestMethod = 20

// sniff reads until the client's protocol is known. The bytes remain to be read.
func (p *peekedConn) sniff() (protocol, error) {
	buf := make([]byte, longestMethod+1)
	n := 0
	for n < len(buf) {
		k, err := p.Conn.Read(buf[n:])
		n += k
		p.first = buf[:n]
		if n > 0 {
			if clienthello.IsTLS(buf[0]) {
				return protocolTLS, nil
			}
			if kind, sure := requestLine(buf[:n]); sure {
				return kind, nil
			}
		}
		switch {
		case err == io.EOF && n > 0: // the client sends no more, and this is not a request
			return protocolOther, nil
		case err != nil:
			return protocolOther, err
		}
	}
	return protocolHTTP, nil
}

// requestLine reports whether b is the start of a request line, or of HTTP/2's preface, as
// some server may read it: letters of any case, and white space; line breaks may precede
// it. Stricter parsers refuse it later. It is not sure as long as all are letters. Digits,
// as in the banner of SSH, are in no method.
func requestLine(b []byte) (kind protocol, sure bool) {
	line := bytes.TrimLeft(b, "\r\n")
	for i, c := range line {
		switch {
		case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c == '-' || c == '_':
		case (c == ' ' || c == '\t') && i > 0:
			return protocolHTTP, true
		default:
			return protocolOther, true
		}
	}
	return protocolOther, false
}

// hello reads the ClientHello. The bytes remain to be read.
func (p *peekedConn) hello() (clienthello.Hello, error) {
	h, read, err := clienthello.Read(io.MultiReader(bytes.NewReader(p.first), p.Conn))
	p.first = read
	return h, err
}

// Read reads the client's data from its first byte on.
func (p *peekedConn) Read(b []byte) (int, error) {
	if len(p.first) > 0 {
		n := copy(b, p.first)
		p.first = p.first[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}
