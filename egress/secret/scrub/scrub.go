// Package scrub removes secrets from responses to a sandbox: an upstream may echo a
// header, an error page may quote a request.
//
// An occurrence is a value as it is, in base64 (standard or URL alphabet, at each
// of the three alignments) or in hex (lower or upper case); and each of these as
// it stands, percent-encoded, with backslash escapes (JSON, JavaScript), with HTML
// character references, or with a line break between any two characters, plain or
// as \n in a JSON string. In an escaped occurrence any character may be escaped or
// not. An occurrence becomes as many asterisks: lengths stay.
//
// Of base64 the characters are matched that depend on the value alone: at an edge
// where its bits share a character with a neighbor, up to four bits remain.
//
// Not found are, and cannot be in a program that does not know what the upstream
// will do: parts of a value, values in two encodings one in the other (base64 of
// hex), in mixed-case hex, with separators between digits, in UTF-16, in other
// alphabets (base32, base85, quoted-printable), reversed, hashed or encrypted,
// compressed within the body (a PNG, a zip file; the transfer's own
// Content-Encoding is undone before), and across messages, such as frames of a
// WebSocket, parts of a multipart body or ranges of a file.
package scrub

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// shortest values that are searched for. The vault accepts none below 8; below 4 a
// response would be more asterisks than text.
const shortest = 4

// Scrubber replaces occurrences of values. It is immutable, and safe for
// concurrent use. The nil Scrubber has no values and changes nothing.
type Scrubber struct {
	tree    *tree
	filter  *filter
	folded  []string // keys in lower case, shortest first: for names of headers
	special [256]readings
}

// New returns a Scrubber for these values, without the white space around them
// (files end with line breaks, responses often do not). Values of less than 4
// bytes are left out; without any other New returns nil.
//
// It costs some 30 to 100 µs a value, and 20 KB with 5 KB and its length for each:
// make one per set of values, and keep it.
func New(values [][]byte) *Scrubber {
	s := &Scrubber{}
	var patterns []pattern
	spaces := false // which forms write as +
	for _, v := range values {
		if v = bytes.TrimSpace(v); len(v) >= shortest {
			patterns = append(patterns, encodings(bytes.Clone(v))...)
			spaces = spaces || bytes.IndexByte(v, ' ') >= 0
		}
	}
	if len(patterns) == 0 {
		return nil
	}
	keys := sorted(patterns)
	s.tree = newTree(keys)
	s.special = specials(spaces)
	s.filter = newFilter(keys, &s.special)
	for _, k := range keys {
		s.folded = append(s.folded, strings.ToLower(k.text))
	}
	slices.SortFunc(s.folded, func(a, b string) int { return len(a) - len(b) })
	s.folded = slices.Compact(s.folded)
	return s
}

// Text returns a text without occurrences, itself if it has none.
func (s *Scrubber) Text(text string) string {
	if s == nil || len(text) < s.filter.window {
		return text
	}
	x := scans.Get().(*scan)
	defer func() {
		x.s = nil
		scans.Put(x)
	}()
	*x = scan{s: s, text: append(x.text[:0], text...), final: true, spans: x.spans[:0], tails: x.tails[:0]}
	x.run(0)
	if len(x.spans) == 0 {
		return text
	}
	x.spans.star(x.text, 0, len(text))
	return string(x.text)
}

// scans of texts are reused.
var scans = sync.Pool{New: func() any { return new(scan) }}

// Header takes occurrences out of values, in place. A header whose name has one,
// in any case of letters, is removed.
func (s *Scrubber) Header(h http.Header) {
	if s == nil {
		return
	}
	for name, values := range h {
		if s.inName(name) {
			delete(h, name)
			continue
		}
		for i, v := range values {
			values[i] = s.Text(v)
		}
	}
}

// inName: names have been brought into a canonical form, with other letters in
// upper case than were sent.
func (s *Scrubber) inName(name string) bool {
	if len(name) < len(s.folded[0]) {
		return false
	}
	name = strings.ToLower(name)
	for _, key := range s.folded {
		if len(key) > len(name) {
			return false
		}
		if strings.Contains(name, key) {
			return true
		}
	}
	return false
}
