package scrub

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// reading is a way to read a text: what its escapes mean. A text is read in one
// way from the beginning of an occurrence to its end.
type reading uint8

const (
	plain     reading = iota
	percent           // %2F (RFC 3986)
	form              // the same, and + for a space
	backslash         // \/ \n \u002f \x2f (JSON, JavaScript, Python)
	entity            // &amp; &#47; &#x2f; (HTML, XML)
	lines             // a line break is nothing (MIME, PEM)
	jsonLines         // the same in a JSON string: \n is nothing
	howMany           // readings
)

// readings is a set of them.
type readings uint8

func (r reading) in(set readings) bool { return set>>r&1 != 0 }

func (s readings) first() reading { return reading(bits.TrailingZeros8(uint8(s))) }

// withoutFirst is without the first.
func (s readings) withoutFirst() readings { return s & (s - 1) }

func set(of ...reading) (s readings) {
	for _, r := range of {
		s |= 1 << r
	}
	return s
}

// escapes are the characters with which escapes begin, and in which readings.
var escapes = [...]struct {
	char byte
	in   readings
}{
	{'%', set(percent, form)},
	{'\\', set(backslash, jsonLines)},
	{'&', set(entity)},
	{'\n', set(lines)}, // and \r before it
	{'+', set(form)},
}

// specials returns by character the readings in which it begins an escape.
// Forms are read only where values have spaces: else they are as percent.
func specials(spaces bool) (s [256]readings) {
	for _, e := range escapes {
		s[e.char] = e.in
		if !spaces {
			s[e.char] &^= set(form)
		}
	}
	s['\r'] = s['\n']
	return s
}

// unit is what stands at one place of a text.
type unit struct {
	bytes uint32 // that it means, the first one lowest
	n     uint8  // of bytes; 0: nothing, a line break
	width uint8  // of bytes in the text; 0: the text ends within it
}

// byte returns the byte i that a unit means.
func (u unit) byte(i uint8) byte { return byte(u.bytes >> (8 * i)) }

func one(c byte, width int) unit { return unit{uint32(c), 1, uint8(width)} }

func char(r rune, width int) unit {
	var b [utf8.UTFMax]byte
	n := utf8.EncodeRune(b[:], r)
	return unit{binary.LittleEndian.Uint32(b[:]), uint8(n), uint8(width)}
}

// unit returns the unit with which a text begins, which is not empty. A character outside
// of an escape stands for itself.
func (r reading) unit(text []byte) unit {
	switch c := text[0]; {
	case c == '%' && (r == percent || r == form):
		return hexUnit(text, 1, 2)
	case c == '+' && r == form:
		return one(' ', 1)
	case c == '\\' && (r == backslash || r == jsonLines):
		return backslashUnit(text, r == jsonLines)
	case c == '&' && r == entity:
		return entityUnit(text)
	case c == '\n' && r == lines:
		return unit{width: 1}
	case c == '\r' && r == lines:
		switch {
		case len(text) == 1:
			return unit{}
		case text[1] == '\n':
			return unit{width: 2}
		}
	}
	return one(text[0], 1)
}

// hexUnit reads digits of them after a mark of this many characters: a byte.
func hexUnit(text []byte, mark, digits int) unit {
	v, n := number(text[mark:], 16, digits)
	switch {
	case n == digits:
		return one(byte(v), mark+digits)
	case mark+n == len(text):
		return unit{}
	}
	return one(text[0], 1)
}

// number reads at most this many digits and returns how many there were.
func number(text []byte, base rune, digits int) (v rune, n int) {
	for n < digits && n < len(text) {
		digit := base
		switch c := text[n]; {
		case c >= '0' && c <= '9':
			digit = rune(c - '0')
		case c >= 'a' && c <= 'f', c >= 'A' && c <= 'F':
			digit = rune(c&^0x20 - 'A' + 10)
		}
		if digit >= base {
			break
		}
		v = v*base + digit
		n++
	}
	return v, n
}

// backslashed are the meanings of characters after a backslash, without line breaks.
var backslashed = [256]byte{'"': '"', '\'': '\'', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 't': '\t'}

func backslashUnit(text []byte, breaks bool) unit {
	if len(text) == 1 {
		return unit{}
	}
	if c := backslashed[text[1]]; c != 0 {
		return one(c, 2)
	}
	switch text[1] {
	case 'n':
		if breaks {
			return unit{width: 2}
		}
		return one('\n', 2)
	case 'r':
		if !breaks {
			return one('\r', 2)
		}
		if rest := string(text[2:min(4, len(text))]); rest == `\n` {
			return unit{width: 4}
		} else if rest == "" || rest == `\` {
			return unit{}
		}
	case 'x':
		return hexUnit(text, 2, 2)
	case 'u':
		return utf16Unit(text)
	}
	return one('\\', 1)
}

func utf16Unit(text []byte) unit {
	high, n := number(text[2:], 16, 4)
	switch {
	case n < 4 && 2+n == len(text):
		return unit{}
	case n < 4:
		return one('\\', 1)
	case !utf16.IsSurrogate(high):
		return char(high, 6)
	}
	rest := text[6:]
	if len(rest) < 2 {
		if len(rest) == 0 || rest[0] == '\\' {
			return unit{}
		}
		return one('\\', 1)
	}
	low, n := number(rest[2:], 16, 4)
	r := utf16.DecodeRune(high, low)
	switch {
	case rest[0] != '\\' || rest[1] != 'u' || n == 4 && r == utf8.RuneError:
		return one('\\', 1)
	case n == 4:
		return char(r, 12)
	case 8+n == len(text):
		return unit{}
	}
	return one('\\', 1)
}

// entities are those that every program which escapes HTML or XML writes.
var entities = []struct {
	text string
	char byte
}{{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}}

func entityUnit(text []byte) unit {
	if len(text) > 1 && text[1] == '#' {
		return numericUnit(text)
	}
	for _, e := range entities {
		n := min(len(e.text), len(text))
		if string(text[:n]) != e.text[:n] {
			continue
		}
		if n == len(e.text) {
			return one(e.char, n)
		}
		return unit{}
	}
	return one('&', 1)
}

// numericUnit reads &#47; and &#x2f;, with at most 7 digits: 10FFFF in decimal.
func numericUnit(text []byte) unit {
	const maxDigits = 7
	mark, base := 2, rune(10)
	if len(text) > 2 && text[2]&^0x20 == 'X' {
		mark, base = 3, 16
	}
	v, n := number(text[mark:], base, maxDigits)
	switch end := mark + n; {
	case end == len(text):
		return unit{}
	case n > 0 && text[end] == ';':
		return char(v, end+1)
	}
	return one('&', 1)
}
