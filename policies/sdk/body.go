package sdk

import (
	"io"
	"strconv"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Body is the body of a request or response. If it is read without the matching
// Buffer feature, later readers do not get it.
type Body struct {
	kind  uint32
	ended bool
}

var _ io.ReadWriter = (*Body)(nil)

// chunk is the number of bytes that are read per call from a body of unknown length.
const chunk = 32 << 10

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	if b.ended {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := abi.Node().ReadBody(b.kind, p)
	b.ended = n&abi.EOF != 0
	if n = n &^ abi.EOF; n == 0 && b.ended {
		return 0, io.EOF
	}
	return int(n), nil
}

// Bytes returns the rest of the body, or ErrTooLarge if it has more than limit bytes.
func (b *Body) Bytes(limit int) ([]byte, error) {
	expected := chunk
	// A header has the same kind number as its body.
	if n, err := strconv.Atoi((Header{b.kind}).Get("Content-Length")); err == nil && n >= 0 {
		expected = n + 1 // one more, to detect the end
	}
	body := make([]byte, 0, min(limit+1, expected))
	for {
		if len(body) > limit {
			return nil, ErrTooLarge
		}
		if len(body) == cap(body) {
			grown := make([]byte, len(body), min(limit+1, 2*cap(body)+chunk))
			copy(grown, body)
			body = grown
		}
		n, err := b.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if err != nil {
			return body, nil // io.EOF: the host itself handles all other errors
		}
	}
}

// Write appends to the body that replaces the original. It implements io.Writer.
func (b *Body) Write(p []byte) (int, error) {
	abi.Node().WriteBody(b.kind, p)
	return len(p), nil
}

// Set replaces the body.
func (b *Body) Set(body []byte) { abi.Node().WriteBody(b.kind, body) }
