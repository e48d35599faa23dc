// Package http1 speaks HTTP/1.1 (RFC 9112) as a proxy has to: it serves a client's
// connection and sends requests to servers in the goroutine that handles the request,
// and refuses every message whose end is not certain.
//
// net/http uses two more goroutines for each connection on either side, which costs an
// intercepted request more than everything else that is done with it. It also accepts
// requests that say in two ways where they end.
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
	// bufferSize is for what is read from and written to a connection: most heads fit.
	bufferSize = 4 << 10
	// pieceSize is read of a body at a time: two records of TLS.
	pieceSize = 32 << 10
	// maxTrailers bounds the trailer section of a body, in bytes. A line of it has at most
	// bufferSize.
	maxTrailers = 16 << 10
)

var errTooLarge = errors.New("http1: the head of the message is too large")

// limited bounds what is read from a connection for a head: left is how many bytes may
// still come.
type limited struct {
	r    io.Reader
	left int64
}

func (l *limited) Read(b []byte) (int, error) {
	if l.left <= 0 {
		return 0, errTooLarge
	}
	n, err := l.r.Read(b[:min(int64(len(b)), l.left)])
	l.left -= int64(n)
	return n, err
}

// room for a chunk's size and line break before the data, and the line break after it.
const beforeChunk, afterChunk = 8, 2

// piece is read of a body, with room to make a chunk of it in place.
type piece [beforeChunk + pieceSize + afterChunk]byte

var pieces = sync.Pool{New: func() any { return new(piece) }}

func (p *piece) data() []byte { return p[beforeChunk : beforeChunk+pieceSize] }

// chunk returns the chunk that has the first n bytes of the data (RFC 9112, section 7.1).
// n is not 0.
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

// writeFields writes a header without its end, in the order of names. Names and values
// are checked: what a policy sets must not begin another message.
func writeFields(w io.StringWriter, h http.Header) error {
	var room [24]string
	names := room[:0]
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return errors.New("http1: invalid name of a header field")
		}
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, value := range h[name] {
			if !httpguts.ValidHeaderFieldValue(value) {
				return fmt.Errorf("http1: invalid value of header field %s", name) // which may be a secret
			}
			writeField(w, name, value)
		}
	}
	return nil
}

// writeField writes a field whose name and value are valid. Errors show with the flush of w.
func writeField(w io.StringWriter, name, value string) {
	_, _ = w.WriteString(name)
	_, _ = w.WriteString(": ")
	_, _ = w.WriteString(strings.Trim(value, " \t"))
	_, _ = w.WriteString("\r\n")
}
