package scrub

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// filter finds the places of a text where an occurrence may begin, at a fraction
// of the cost of comparing each: it samples groups of four bytes, so far apart
// that one of them is in the beginning of every occurrence.
type filter struct {
	window int // bytes at the beginning of each key that were taken in
	stride int // between samples
	// groups has by the hash of a group of four bytes at which of the first
	// places of a key it stands: bit i for place i. 16 KiB: together with the text
	// it stays in the first-level cache.
	groups *[1 << groupBits]uint8
	chars  [256]bool // are in a window
	// second has by the character of an escape which may follow it in one that
	// matters: for most places that is all there is to know.
	second [len(escapes)][256]bool

	special *[256]readings
}

const (
	groupBits = 14
	group     = 4 // bytes
	maxStride = 8 // bits of an element of groups
)

func load(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

func hash(group uint32) uint32 {
	return group * 0x9e3779b1 >> (32 - groupBits) // Knuth, 6.4: 2³² by the golden ratio
}

func newFilter(keys []key, special *[256]readings) *filter {
	f := &filter{window: maxStride + group - 1, groups: new([1 << groupBits]uint8), special: special}
	for _, k := range keys {
		f.window = min(f.window, len(k.text))
	}
	f.stride = f.window - group + 1
	for _, k := range keys {
		for i := range f.stride {
			f.groups[hash(load([]byte(k.text[i:i+group])))] |= 1 << i
		}
		for i := range f.window {
			f.chars[k.text[i]] = true
		}
	}
	for i, e := range escapes {
		for c := range 256 {
			f.second[i][c] = f.mayFollow(e.char, special[e.char], byte(c))
		}
	}
	return f
}

// mayFollow reports whether what begins with these two characters can be an escape in
// an occurrence's window.
func (f *filter) mayFollow(char byte, in readings, c byte) bool {
	for ; in != 0; in = in.withoutFirst() {
		r := in.first()
		switch u := r.unit([]byte{char, c}); {
		case u.n == 1 && u.width == 1 && u.byte(0) == char: // no escape
		case u.n > 0 && !f.chars[u.byte(0)]: // of a character that is in no window
		case u.width == 1 && u.n == 0 && !f.chars[c] && !r.in(f.special[c]): // c is behind a line break
		default:
			return true
		}
	}
	return false
}

// unescaped returns the first place from pos on where an occurrence may begin
// with a window of characters that stand for themselves, or len(text).
func (f *filter) unescaped(text []byte, pos int) int {
	for sample := pos + f.stride - 1; sample+group <= len(text); sample += f.stride {
		places := f.groups[hash(load(text[sample:sample+group]))]
		if places == 0 {
			continue
		}
		for i := f.stride - 1; i >= 0; i-- {
			start := sample - i
			if places>>i&1 != 0 && f.groups[hash(load(text[start:start+group]))]&1 != 0 {
				return start
			}
		}
	}
	return len(text)
}

// escaped are places where occurrences may begin that have their first escape
// within the window.
type escaped struct {
	at     int    // of the escape
	starts uint16 // bit i: i bytes before
	end    int    // behind the escape's first character; len(text) if there is none
}

// first returns the first of them from pos on, and whether there is one.
func (e *escaped) first(pos int) (start int, ok bool) {
	e.starts &= 1<<max(0, e.at-pos+1) - 1
	return e.at - bits.Len16(e.starts) + 1, e.starts != 0
}

// escape returns the places of the first escape of a kind from pos on that has any.
func (f *filter) escape(text []byte, pos, which int) escaped {
	char, second := escapes[which].char, &f.second[which]
	in := f.special[char]
	for at := pos; ; at++ {
		if at = index(text, at, char); at == len(text) {
			return escaped{end: at}
		}
		if at+1 < len(text) && !second[text[at+1]] {
			continue
		}
		e := escaped{at: at, end: at + 1}
		if char == '\n' && at > 0 && text[at-1] == '\r' {
			e.at-- // where the unit begins
		}
		for rest := in; rest != 0; rest = rest.withoutFirst() {
			e.starts |= f.starts(text, e.at, rest.first())
		}
		if e.starts != 0 {
			return e
		}
	}
}

// index returns the next place of a character, or len(text). Escapes that follow
// each other are found without a call that reads much more of the text.
func index(text []byte, at int, char byte) int {
	for near := min(at+4, len(text)); at < near; at++ {
		if text[at] == char {
			return at
		}
	}
	if i := bytes.IndexByte(text[at:], char); i >= 0 {
		return at + i
	}
	return len(text)
}

// starts returns how many bytes before an escape occurrences may begin in which
// it is the first: bit i for i bytes.
func (f *filter) starts(text []byte, at int, r reading) (starts uint16) {
	all := uint16(1)<<f.window - 1
	u := r.unit(text[at:])
	switch {
	case u.width == 0:
		return all
	case u.n == 0:
		if at == 0 || !f.chars[text[at-1]] {
			return 0
		}
		all-- // a line break begins nothing
	case u.n == 1 && u.width == 1 && u.byte(0) == text[at]:
		return 0 // no escape
	}
	// Up to four characters from the escape on, if they are in any window.
	after, n := uint32(0), 0
	for next := at; n < group; {
		for i := uint8(0); i < u.n && n < group; i++ {
			if !f.chars[u.byte(i)] {
				return f.around(text, at, after, n) & all
			}
			after |= uint32(u.byte(i)) << (8 * n)
			n++
		}
		if next += int(u.width); next == len(text) {
			return all
		}
		if c := text[next]; !r.in(f.special[c]) {
			u = one(c, 1)
		} else if u = r.unit(text[next:]); u.width == 0 {
			return all
		}
	}
	return (f.around(text, at, after, n) | uint16(f.groups[hash(after)])) & all
}

// around returns what starts does by groups that begin before the escape, with n
// characters from there on. They are needed near the end of the window, which is
// the last place that a group may have in it.
func (f *filter) around(text []byte, at int, after uint32, n int) (starts uint16) {
	last := f.stride - 1
	for before := max(1, group-n); before < group && before+last <= at; before++ {
		shift := 8 * (group - before)
		g := load(text[at-before:][:group])<<shift>>shift | after<<(8*before)
		if f.groups[hash(g)]>>last&1 != 0 {
			starts |= 1 << (before + last)
		}
	}
	return starts
}
