// Package display writes text that may come from a sandbox to a terminal, without
// letting it control the terminal.
package display

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// maxText bounds what Clean returns: what a sandbox can put into one cell of a table.
const maxText = 1000

// Clean replaces control characters, line ends and invalid UTF-8 by blanks and
// replacement characters, and cuts long text.
func Clean(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || !unicode.IsPrint(r) && r != ' ' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "�"))
}

// JSON writes v as one document and a line end. Characters that could control a
// terminal are escaped.
func JSON(w io.Writer, v any, indent string) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", indent)
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(escaped(text.Bytes()))
	return err
}

// escaped is the same JSON without characters that could control a terminal. JSON
// itself permits those above ASCII, which occur in strings only.
func escaped(text []byte) []byte {
	var out []byte
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r < 0x7f || unicode.IsPrint(r):
			out = append(out, text[:n]...)
		default:
			for _, unit := range utf16.Encode([]rune{r}) {
				out = fmt.Appendf(out, `\u%04x`, unit)
			}
		}
		text = text[n:]
	}
	return out
}
