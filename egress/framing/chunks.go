package framing

import (
	"bufio"
	"bytes"
	"net/textproto"
	"strconv"
)

const (
	// maxChunkLine and maxTrailers, with their line breaks, are what net/http has room
	// for.
	maxChunkLine, maxTrailers = 4 << 10, 4 << 10
	// maxExcess is of bytes beside the data, more than excessFree for each chunk and
	// two for each byte of data: as net/http has it.
	maxExcess, excessFree = 16 << 10, 16
)

// chunks are a body's: RFC 9112, section 7.1.
type chunks struct {
	excess   int64
	trailers []byte // as they were sent so far
}

// size is told of the line before a chunk, without its line feed, and returns how many
// bytes the chunk has. The last has none.
func (c *chunks) size(line []byte) (n uint64, ok bool) {
	text, isLine := bytes.CutSuffix(line, []byte{'\r'})
	if !isLine || len(line) >= maxChunkLine || bytes.IndexByte(text, '\r') >= 0 {
		return 0, false
	}
	digits, _, _ := bytes.Cut(bytes.TrimRight(text, " \t"), []byte{';'})
	n, err := strconv.ParseUint(string(digits), 16, 62) // more are never sent
	if err != nil || len(digits) > 16 {
		return 0, false
	}
	c.excess = max(0, c.excess+int64(len(text)+len("\r\n"))-excessFree-2*int64(n))
	return n, c.excess <= maxExcess
}

// trailer is told of a line after the last chunk, without its line feed. The empty one
// is the end.
func (c *chunks) trailer(line []byte) (end, ok bool) {
	if c.trailers == nil && string(line) == "\r" {
		return true, true
	}
	c.trailers = append(append(c.trailers, line...), '\n')
	if len(c.trailers) > maxTrailers {
		return false, false
	}
	if len(line) > 0 && string(line) != "\r" {
		return false, true
	}
	if !bytes.HasSuffix(c.trailers, []byte("\r\n\r\n")) {
		return false, false
	}
	_, err := textproto.NewReader(bufio.NewReader(bytes.NewReader(c.trailers))).ReadMIMEHeader()
	return true, err == nil
}
