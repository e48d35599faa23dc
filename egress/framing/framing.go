// Package framing follows the requests on a connection of HTTP/1.1 and finds the
// first that says in two ways where it ends: of which two servers may disagree, so
// that one of them takes for its body what the other takes for a request (RFC 9112,
// sections 6.1 and 11.2).
//
// Servers read such requests in one of the ways and say no more of the other. So a
// Scanner looks at what is read from the connection, beside the server that reads it.
package framing

import (
	"bytes"
	"strconv"
	"sync/atomic"
)

// maxLine is more than any server takes: what follows a longer one is not looked at.
const maxLine = 128 << 10

// Scanner is told what a client sends. Its zero value is for a connection of which
// nothing was read yet.
//
// It follows what net/http reads: of what that refuses it need not make sense, for
// then the connection ends.
type Scanner struct {
	state    state
	requests int64  // of which the header has begun
	line     []byte // the start of a line of which there is more
	left     uint64 // bytes of a body or chunk
	head     head

	ambiguous atomic.Int64
}

// state is what comes next.
type state int

const (
	requestLine state = iota // or line breaks before one
	fieldLine                // or the empty one after the last
	content                  // of the length that was given
	chunkSize
	chunk       // and the line break after it
	trailerLine // or the empty one after the last
	lost        // nothing that is looked at
)

// head is what a request's header says of its end.
type head struct {
	old      bool // HTTP/1.0, which knows no chunks
	chunked  bool // it has a Transfer-Encoding
	measured bool // it has a Content-Length
	inLength bool // which the line before was about
	length   length
}

// Ambiguous returns which request it was that said in two ways where it ends: 1 is
// the first of the connection, 0 is none so far. What follows it is not looked at.
// It may be called at any time.
func (s *Scanner) Ambiguous() int64 { return s.ambiguous.Load() }

// Stop ends looking, for the connection has become one of another protocol. No Scan
// must be under way.
func (s *Scanner) Stop() { s.lose() }

// Scan is told of the next bytes, which are not kept. One is called at a time.
func (s *Scanner) Scan(b []byte) {
	for len(b) > 0 && s.state != lost {
		if s.state == content || s.state == chunk {
			n := min(uint64(len(b)), s.left)
			b = b[n:]
			if s.left -= n; s.left == 0 {
				s.next()
			}
			continue
		}
		part, rest, whole := bytes.Cut(b, []byte{'\n'})
		b = rest
		line := part
		if !whole || len(s.line) > 0 {
			s.line = append(s.line, part...)
			line = s.line
		}
		switch {
		case len(line) > maxLine:
			s.lose()
		case whole:
			s.read(bytes.TrimSuffix(line, []byte{'\r'}))
			s.line = nil
		}
	}
}

// next is after a body or a chunk.
func (s *Scanner) next() {
	if s.state == chunk {
		s.state = chunkSize
	} else {
		s.state = requestLine
	}
}

func (s *Scanner) lose() { s.state, s.line = lost, nil }

func (s *Scanner) read(line []byte) {
	switch s.state {
	case requestLine:
		s.begin(line)
	case fieldLine:
		if len(line) > 0 {
			s.head.field(line)
		} else {
			s.body()
		}
	case chunkSize:
		s.size(line)
	case trailerLine:
		if len(line) == 0 {
			s.state = requestLine
		}
	}
}

func (s *Scanner) begin(line []byte) {
	switch {
	case len(bytes.Trim(line, "\r")) == 0:
	case string(line) == "PRI * HTTP/2.0": // RFC 9113, section 3.4
		s.lose()
	default:
		s.requests++
		s.head = head{old: bytes.HasSuffix(line, []byte("HTTP/1.0"))}
		s.state = fieldLine
	}
}

// field is told of a line of the header.
func (h *head) field(line []byte) {
	value := line
	if line[0] != ' ' && line[0] != '\t' { // else the line before goes on: RFC 9112, section 5.2
		var name []byte
		name, value, _ = bytes.Cut(line, []byte{':'})
		h.inLength = bytes.EqualFold(name, []byte("Content-Length"))
		if h.inLength {
			h.measured, h.length = true, length{}
		}
		if bytes.EqualFold(name, []byte("Transfer-Encoding")) {
			h.chunked = true
		}
	}
	if h.inLength {
		h.length.read(value)
	}
}

// body is after the header.
func (s *Scanner) body() {
	h := &s.head
	switch {
	case h.chunked && (h.measured || h.old):
		s.ambiguous.Store(s.requests)
		s.lose()
	case h.chunked:
		s.state = chunkSize
	case h.measured && !h.length.valid():
		s.lose()
	case h.length.n > 0:
		s.state, s.left = content, h.length.n
	default:
		s.state = requestLine
	}
}

// size is told of the line before a chunk: RFC 9112, section 7.1.
func (s *Scanner) size(line []byte) {
	digits, _, _ := bytes.Cut(line, []byte{';'})
	n, err := strconv.ParseUint(string(bytes.TrimRight(digits, " \t")), 16, 63)
	switch {
	case err != nil:
		s.lose()
	case n == 0:
		s.state = trailerLine
	default:
		s.state, s.left = chunk, n+uint64(len("\r\n"))
	}
}

// length is the value of a Content-Length, which may go over several lines.
type length struct {
	n       uint64
	digits  int
	over    bool // white space after the digits
	invalid bool
}

func (l *length) read(value []byte) {
	for _, c := range value {
		switch {
		case c == ' ' || c == '\t':
			l.over = l.digits > 0
		case c < '0' || c > '9' || l.over || l.n > (1<<63-1)/10-1:
			l.invalid = true
		default:
			l.n, l.digits = 10*l.n+uint64(c-'0'), l.digits+1
		}
	}
}

func (l *length) valid() bool { return l.digits > 0 && !l.invalid }
