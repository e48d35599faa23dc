package framing

import "bytes"

// head is what a request's header says of its end.
type head struct {
	preface  bool // nothing but the first line of HTTP/2's: RFC 9113, section 3.4
	old      bool // HTTP/1.0, which knows no chunks
	chunked  bool // it has a Transfer-Encoding
	measured bool // it has a Content-Length
	inLength bool // which the line before was about
	length   length
}

// first is told of the request line.
func (h *head) first(line []byte) {
	h.preface = string(line) == "PRI * HTTP/2.0"
	h.old = bytes.HasSuffix(line, []byte("HTTP/1.0"))
}

// field is told of a line of the header.
func (h *head) field(line []byte) {
	h.preface = false
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
