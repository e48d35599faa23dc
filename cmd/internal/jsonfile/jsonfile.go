// Package jsonfile reads JSON files that people write, strictly: errors have the line and
// the column.
package jsonfile

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxFile bounds what Read reads.
const maxFile = 16 << 20

// Read decodes a file. Errors name it.
func Read(file string, v any) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return err
	case len(text) > maxFile:
		return fmt.Errorf("%s: more than %d MiB", file, maxFile>>20)
	}
	if err := Decode(text, v); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// Decode decodes one JSON value with the fields that v has. Errors begin with the line
// and the column of the mistake, where they are known.
func Decode(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return located(text, err)
	}
	end := int(d.InputOffset())
	if rest := bytes.TrimLeft(text[end:], " \t\r\n"); len(rest) > 0 {
		return mistake(text, len(text)-len(rest), "unexpected text after the JSON value")
	}
	return nil
}

// mistake is an error with the place of the byte at an offset. The column counts characters
// from 1.
func mistake(text []byte, offset int, problem string) error {
	before := text[:min(max(offset, 0), len(text))]
	line := bytes.LastIndexByte(before, '\n') + 1
	return fmt.Errorf("line %d, column %d: %s", bytes.Count(before, []byte("\n"))+1, utf8.RuneCount(before[line:])+1, problem)
}

func located(text []byte, err error) error {
	syntax, isSyntax := errors.AsType[*json.SyntaxError](err)
	kind, isKind := errors.AsType[*json.UnmarshalTypeError](err)
	switch {
	case errors.Is(err, io.EOF):
		return mistake(text, len(text), "the file is empty; write a JSON value")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return mistake(text, len(text), "the JSON value is incomplete")
	case isSyntax:
		return mistake(text, int(syntax.Offset)-1, "invalid JSON: "+syntax.Error())
	case isKind:
		// The offset is the end of the value, or after a bracket.
		return mistake(text, int(kind.Offset)-1, fmt.Sprintf("%s is a JSON %s; it should be %s", cmp.Or(kind.Field, "the value"), kind.Value, expected(kind)))
	}
	// encoding/json has no type for it.
	if quoted, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		if name, unquoteErr := strconv.Unquote(quoted); unquoteErr == nil {
			problem := "unknown field " + quoted
			if at := onlyKey(text, name); at >= 0 {
				return mistake(text, at, problem)
			}
			return errors.New(problem)
		}
	}
	return err
}

func expected(e *json.UnmarshalTypeError) string {
	switch e.Type.Kind().String() {
	case "struct", "map":
		return "an object"
	case "slice", "array":
		return "a list"
	case "string":
		return "text"
	case "bool":
		return "true or false"
	}
	return "a number"
}

// onlyKey returns the offset of a key that the text has once, or -1. A quote within a string
// has a backslash before it, so that it does not look like a key's.
func onlyKey(text []byte, name string) int {
	key := regexp.MustCompile(`[{,\s]("` + regexp.QuoteMeta(name) + `")\s*:`)
	if found := key.FindAllSubmatchIndex(text, 2); len(found) == 1 {
		return found[0][2]
	}
	return -1
}
