package api

import (
	"strings"
	"unicode/utf8"

	"github.com/doze-run/doze/api/types"
)

// decode decodes the text of a field of a request.
func decode(text string, encoding types.Encoding, location string) ([]byte, error) {
	b, err := encoding.Decode(text)
	if err != nil {
		return nil, invalid(location, "invalid base64: "+err.Error(), "use standard base64 with padding (RFC 4648 section 4)")
	}
	return b, nil
}

// runeJoiner forwards chunks of a byte stream so that no UTF-8 sequence is split between
// two of them: bytes that may be the start of a sequence wait for the next chunk.
type runeJoiner struct {
	partial [utf8.UTFMax - 1]byte
	n       int
}

// join returns the bytes to forward, which may be none. They are valid until the next call.
func (j *runeJoiner) join(chunk []byte) []byte {
	if j.n > 0 {
		chunk = append(j.partial[:j.n:j.n], chunk...)
		j.n = 0
	}
	tail := incompleteTail(chunk)
	j.n = copy(j.partial[:], chunk[len(chunk)-tail:])
	return chunk[:len(chunk)-tail]
}

// remainder returns the bytes that wait for a next chunk, at the end of the stream.
func (j *runeJoiner) remainder() []byte {
	b := j.partial[:j.n]
	j.n = 0
	return b
}

// incompleteTail is how many bytes at the end of b may be the start of a rune.
func incompleteTail(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		c := b[len(b)-n]
		if !utf8.RuneStart(c) {
			continue
		}
		if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
			return n
		}
		return 0
	}
	return 0
}

// capture stores the first bytes of a stream and drops the others.
type capture struct {
	bytes     []byte
	limit     int
	truncated bool
}

func (c *capture) add(b []byte) {
	if free := c.limit - len(c.bytes); len(b) > free {
		b, c.truncated = b[:free], true
	}
	c.bytes = append(c.bytes, b...)
}

// text returns the stored bytes. A rune that the limit split is dropped, so that the
// text does not become base64.
func (c *capture) text() (text string, encoding types.Encoding) {
	b := c.bytes
	if c.truncated {
		b = b[:len(b)-incompleteTail(b)]
	}
	return types.Encode(b)
}

// validText returns at most limit bytes of untrusted text as valid UTF-8.
func validText(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit] + "…"
	}
	return strings.ToValidUTF8(s, "�")
}
