// Package framing follows the requests on a connection of HTTP/1.1 and knows of each
// whether its end is certain. It is not where a request says in two ways where it
// ends, so that two servers may disagree, and one of them takes for its body what the
// other takes for a request (RFC 9112, sections 6.1 and 11.2); nor is that of
// anything which comes after a body that is broken.
//
// Servers read such requests in one of the ways and say no more of the other, and
// some go on after a broken body. So a Scanner looks at what is read from the
// connection, beside the server that reads it.
package framing

import (
	"bytes"
	"sync/atomic"
)

// maxLine is more than any server takes: what follows a longer one is not looked at.
const maxLine = 128 << 10

// Scanner is told what a client sends. Its zero value is for a connection of which
// nothing was read yet.
//
// It follows what net/http reads. Of a header that net/http refuses it need not make
// sense, for then the connection ends; in a body it finds each error that net/http
// finds, for then the connection may go on.
type Scanner struct {
	state  state
	line   []byte // the start of a line of which there is more
	left   uint64 // bytes of a body or chunk
	head   head
	chunks chunks

	certain atomic.Int64
	twoEnds atomic.Bool
}

// state is what comes next.
type state int

const (
	requestLine state = iota // or line breaks before one
	fieldLine                // or the empty one after the last
	content                  // of the length that was given
	chunkSize
	chunk
	chunkEnd
	trailerLine // or the empty one after the last
	lost        // nothing that is looked at
)

// Certain returns how many of the connection's requests, counted from its first, have
// a certain end. A server that has read one more must not serve it. It may be called
// at any time; what a server has read counts from when Scan was told.
func (s *Scanner) Certain() int64 { return s.certain.Load() }

// TwoEnds says whether the request after the certain ones says in two ways where it
// ends. It may be called at any time.
func (s *Scanner) TwoEnds() bool { return s.twoEnds.Load() }

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
			s.read(line)
			s.line = nil
		}
	}
}

// next is after a body or a chunk.
func (s *Scanner) next() {
	if s.state == chunk {
		s.state = chunkEnd
	} else {
		s.state = requestLine
	}
}

func (s *Scanner) lose() { s.state, s.line, s.chunks = lost, nil, chunks{} }

// read is told of a line without its line feed.
func (s *Scanner) read(line []byte) {
	text := bytes.TrimSuffix(line, []byte{'\r'})
	ok := true
	switch s.state {
	case requestLine:
		if len(bytes.Trim(text, "\r")) > 0 {
			s.head = head{}
			s.head.first(text)
			s.state = fieldLine
		}
	case fieldLine:
		if len(text) > 0 {
			s.head.field(text)
		} else {
			ok = s.body()
		}
	case chunkSize:
		ok = s.size(line)
	case chunkEnd:
		s.state, ok = chunkSize, string(line) == "\r"
	case trailerLine:
		var end bool
		if end, ok = s.chunks.trailer(line); end {
			s.state, s.chunks = requestLine, chunks{}
		}
	}
	if !ok {
		s.lose()
	}
}

// body is after the header. It returns false where nothing after it is certain.
func (s *Scanner) body() (ok bool) {
	h := &s.head
	if h.chunked && (h.measured || h.old) {
		s.twoEnds.Store(true)
		return false
	}
	s.certain.Add(1)
	switch {
	case h.preface:
		return false
	case h.chunked:
		s.state, s.chunks = chunkSize, chunks{}
	case h.measured && !h.length.valid():
		return false
	case h.length.n > 0:
		s.state, s.left = content, h.length.n
	default:
		s.state = requestLine
	}
	return true
}

func (s *Scanner) size(line []byte) (ok bool) {
	s.left, ok = s.chunks.size(line)
	if s.state = chunk; s.left == 0 {
		s.state = trailerLine
	}
	return ok
}
