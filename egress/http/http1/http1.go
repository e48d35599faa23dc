// Package http1 implements HTTP/1.1 (RFC 9112) for an intercepting proxy. A request is
// read, sent upstream and responded to in one goroutine, and a message with ambiguous framing
// is refused.
//
// net/http uses two more goroutines per connection on either side. For small requests
// they cost more CPU time than everything else that the proxy does. net/http also accepts
// requests that have both Transfer-Encoding and Content-Length.
package http1

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"golang.org/x/net/http/httpguts"
)

const (
	// bufferSize is the size of a connection's read and write buffers. Most heads fit.
	bufferSize = 4 << 10
	// pieceSize is how much of a body is read at a time: two TLS records.
	pieceSize = 32 << 10
	unlimited = 1<<63 - 1
	// maxTrailers is the size limit of a trailer section. A line of it is at most
	// bufferSize long.
	maxTrailers = 16 << 10
)

var errTooLarge = errors.New("http1: message head too large")

// Space for a chunk's size and line break before the data, and for the line break after it.
const beforeChunk, afterChunk = 8, 2

// piece is a buffer for a part of a body that can be framed as a chunk in place.
type piece [beforeChunk + pieceSize + afterChunk]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

func (p *piece) data() []byte { return p[beforeChunk : beforeChunk+pieceSize] }

// chunk returns the first n bytes of the data as a chunk (RFC 9112, section 7.1). n is
// not 0.
func (p *piece) chunk(n int) []byte {
	const hex = "0123456789abcdef"
	start := beforeChunk
	start -= copy(p[start-2:], "\r\n")
	for size := n; size > 0; size >>= 4 {
		start--
		p[start] = hex[size&15]
	}
	end := beforeChunk + n
	end += copy(p[end:], "\r\n")
	return p[start:end]
}

// writeFields writes header fields sorted by name, without the empty line after them. It
// rejects invalid names and values, which could inject another message.
func writeFields(w io.StringWriter, h http.Header) error {
	var array [24]string // spares an allocation
	names := array[:0]
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return errors.New("http1: invalid header field name")
		}
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, value := range h[name] {
			if !httpguts.ValidHeaderFieldValue(value) {
				return fmt.Errorf("http1: invalid value of header field %s", name) // the value may be a secret
			}
			writeField(w, name, value)
		}
	}
	return nil
}

// writeField writes a valid field. The flush of w reports its error.
func writeField(w io.StringWriter, name, value string) {
	_, _ = w.WriteString(name)
	_, _ = w.WriteString(": ")
	_, _ = w.WriteString(strings.Trim(value, " \t"))
	_, _ = w.WriteString("\r\n")
}
