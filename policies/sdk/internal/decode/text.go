package decode

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// number reads a number.
func (d *decoder) number() (string, error) {
	d.peek()
	start := d.pos
	d.one("-")
	if !d.one("0") && !d.digits() {
		d.pos = start
		return "", d.mismatch("a number")
	}
	valid := !d.one(".") || d.digits()
	if valid && d.one("eE") {
		d.one("+-")
		valid = d.digits()
	}
	if !valid {
		return "", d.unexpected("a digit")
	}
	return string(d.text[start:d.pos]), nil
}

// one skips one of the given characters if it is next, and reports whether it was.
func (d *decoder) one(of string) bool {
	if d.pos < len(d.text) && strings.IndexByte(of, d.text[d.pos]) >= 0 {
		d.pos++
		return true
	}
	return false
}

func (d *decoder) digits() bool {
	start := d.pos
	for d.one("0123456789") {
	}
	return d.pos > start
}

// escapes maps single-character escapes to their values.
var escapes = map[byte]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// string reads text in quotes. The next character must be the first quote.
func (d *decoder) string() (string, error) {
	d.pos++
	var b []byte
	for {
		if d.pos >= len(d.text) {
			return "", d.fail("the JSON ends within text")
		}
		switch c := d.text[d.pos]; {
		case c == '"':
			d.pos++
			return string(b), nil
		case c < ' ':
			return "", d.fail("control characters in text are written as escapes")
		case c == '\\':
			r, err := d.escape()
			if err != nil {
				return "", err
			}
			b = utf8.AppendRune(b, r)
		default:
			r, size := utf8.DecodeRune(d.text[d.pos:])
			if r == utf8.RuneError && size == 1 {
				return "", d.fail("this is not UTF-8")
			}
			b = append(b, d.text[d.pos:d.pos+size]...)
			d.pos += size
		}
	}
}

// escape reads an escape. The next character must be its backslash.
func (d *decoder) escape() (rune, error) {
	if d.pos+1 < len(d.text) {
		if c, ok := escapes[d.text[d.pos+1]]; ok {
			d.pos += 2
			return rune(c), nil
		}
	}
	r, ok := d.unit()
	if ok && utf16.IsSurrogate(r) {
		var low rune
		low, ok = d.unit()
		r = utf16.DecodeRune(r, low)
		ok = ok && r != utf8.RuneError
	}
	if !ok {
		return 0, d.fail("this is not an escape of JSON")
	}
	return r, nil
}

// unit reads \u and four digits.
func (d *decoder) unit() (rune, bool) {
	const size = len(`\u0000`)
	if len(d.text)-d.pos < size || d.text[d.pos] != '\\' || d.text[d.pos+1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(d.text[d.pos+2:d.pos+size]), 16, 16)
	if err != nil {
		return 0, false
	}
	d.pos += size
	return rune(n), true
}
