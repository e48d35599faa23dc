// Package decode reads JSON into Go values. It does what a policy's configuration
// needs and no more: encoding/json would be 40 % of a small policy's module, and
// more than half of the time that the node needs to compile it.
//
// It is stricter: field names are case-sensitive, a name must not occur twice, and
// text must be UTF-8. Its errors contain the position and the remedy.
package decode

import (
	"errors"
	"reflect"
	"strconv"
	"strings"
)

// Strict decodes text into *v: a bool, string or number, or a slice, map with string
// keys, pointer or struct of these. Fields that *v does not have are errors. null
// leaves the value unchanged. If Strict returns an error, *v may be partly set.
func Strict(text []byte, v any) error { return run(text, v, true) }

// Lenient is Strict, but skips fields that *v does not have.
func Lenient(text []byte, v any) error { return run(text, v, false) }

// maxDepth bounds the nesting of a value that is skipped.
const maxDepth = 64

type decoder struct {
	text   []byte
	pos    int
	strict bool
	path   []string // of the current value, such as also, [1], .paths
}

func run(text []byte, v any, strict bool) error {
	d := &decoder{text: text, strict: strict}
	if err := d.value(reflect.ValueOf(v).Elem()); err != nil {
		return err
	}
	if d.peek() != 0 || d.pos < len(d.text) {
		return d.fail("there is more after the value")
	}
	return nil
}

// fail returns an error at the current position.
func (d *decoder) fail(reason string) error {
	line, column := 1, 1
	for _, c := range d.text[:min(d.pos, len(d.text))] {
		if column++; c == '\n' {
			line, column = line+1, 1
		}
	}
	return errors.New("line " + strconv.Itoa(line) + ", column " + strconv.Itoa(column) + ": " + reason)
}

// wrong returns an error about the current value.
func (d *decoder) wrong(reason string) error {
	path := strings.TrimPrefix(strings.Join(d.path, ""), ".")
	if path == "" {
		return errors.New(reason)
	}
	return errors.New(path + ": " + reason)
}

// peek skips white space and returns the next character, or 0 at the end.
func (d *decoder) peek() byte {
	for ; d.pos < len(d.text); d.pos++ {
		switch c := d.text[d.pos]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// accept skips c if it is next, and reports whether it was.
func (d *decoder) accept(c byte) bool {
	if d.peek() != c || d.pos == len(d.text) {
		return false
	}
	d.pos++
	return true
}

// word skips a word such as null if it is next, and reports whether it was.
func (d *decoder) word(w string) bool {
	if d.peek(); !strings.HasPrefix(string(d.text[d.pos:min(len(d.text), d.pos+len(w))]), w) {
		return false
	}
	d.pos += len(w)
	return true
}

// found returns the type of the next value, for errors. It returns "" if there is none.
func (d *decoder) found() string {
	switch c := d.peek(); {
	case c == '{':
		return "an object"
	case c == '[':
		return "a list"
	case c == '"':
		return "text"
	case c == 't' || c == 'f':
		return "true or false"
	case c == '-' || c >= '0' && c <= '9':
		return "a number"
	}
	return ""
}

// mismatch returns an error for a next value that is not of the wanted type.
func (d *decoder) mismatch(wanted string) error {
	found := d.found()
	if found == "" {
		return d.unexpected(wanted)
	}
	return d.wrong("this is " + wanted + ", not " + found)
}

func (d *decoder) unexpected(wanted string) error {
	if d.peek(); d.pos >= len(d.text) {
		return d.fail("the JSON ends where " + wanted + " should be")
	}
	return d.fail("there should be " + wanted)
}

func (d *decoder) value(v reflect.Value) error {
	if d.word("null") {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		return d.value(v.Elem())
	case reflect.Struct:
		return d.object(func(name string) error {
			field, ok := fieldOf(v, name)
			switch {
			case ok:
				return d.value(field)
			case d.strict:
				return d.unknown(v.Type(), name)
			}
			return d.skip(maxDepth)
		})
	case reflect.Map:
		if v.Type().Key() != reflect.TypeFor[string]() {
			return d.unfit(v)
		}
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		return d.object(func(name string) error {
			element := reflect.New(v.Type().Elem()).Elem()
			if err := d.value(element); err != nil {
				return err
			}
			v.SetMapIndex(reflect.ValueOf(name), element)
			return nil
		})
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 0, 0))
		return d.list(func() error {
			element := reflect.New(v.Type().Elem()).Elem()
			if err := d.value(element); err != nil {
				return err
			}
			v.Set(reflect.Append(v, element))
			return nil
		})
	case reflect.String:
		if d.peek() != '"' {
			return d.mismatch("text")
		}
		text, err := d.string()
		v.SetString(text)
		return err
	case reflect.Bool:
		isTrue := d.word("true")
		if !isTrue && !d.word("false") {
			return d.mismatch("true or false")
		}
		v.SetBool(isTrue)
		return nil
	}
	if !v.CanInt() && !v.CanUint() && !v.CanFloat() {
		return d.unfit(v)
	}
	return d.numberInto(v)
}

func (d *decoder) numberInto(v reflect.Value) error {
	text, err := d.number()
	if err != nil {
		return err
	}
	switch {
	case v.CanInt():
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || v.OverflowInt(n) {
			return d.wrong("this is a whole number, of a size that fits, not " + text)
		}
		v.SetInt(n)
	case v.CanUint():
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil || v.OverflowUint(n) {
			return d.wrong("this is a whole number from 0, of a size that fits, not " + text)
		}
		v.SetUint(n)
	default:
		n, err := strconv.ParseFloat(text, 64)
		if err != nil || v.OverflowFloat(n) {
			return d.wrong("this number is too large: " + text)
		}
		v.SetFloat(n)
	}
	return nil
}

// unfit returns an error about a type in the policy's code that has no form in JSON.
func (d *decoder) unfit(v reflect.Value) error {
	return d.wrong("the policy's type " + v.Type().String() + " cannot be given in JSON")
}

// object reads an object. It calls field to read the value of each name.
func (d *decoder) object(field func(name string) error) error {
	names := map[string]bool{}
	return d.elements('{', '}', "an object", func() error {
		if d.peek() != '"' {
			return d.unexpected("a name in quotes")
		}
		name, err := d.string()
		if err != nil {
			return err
		}
		d.path = append(d.path, "."+name)
		if names[name] {
			return d.wrong("duplicate name")
		}
		names[name] = true
		if !d.accept(':') {
			return d.unexpected("a colon")
		}
		return field(name)
	})
}

// list reads a list. It calls element to read each value.
func (d *decoder) list(element func() error) error {
	n := 0
	return d.elements('[', ']', "a list", func() error {
		d.path = append(d.path, "["+strconv.Itoa(n)+"]")
		n++
		return element()
	})
}

// elements reads an object or a list. It calls read for each element, which appends the
// element to the path.
func (d *decoder) elements(start, end byte, what string, read func() error) error {
	if !d.accept(start) {
		return d.mismatch(what)
	}
	for first := true; !d.accept(end); first = false {
		if !first && !d.accept(',') {
			return d.unexpected("a comma or " + string(end))
		}
		if err := read(); err != nil {
			return err
		}
		d.path = d.path[:len(d.path)-1]
	}
	return nil
}

// skip skips a value with at most depth levels.
func (d *decoder) skip(depth int) error {
	if depth == 0 {
		return d.fail("this is nested too deeply")
	}
	switch c := d.peek(); {
	case c == '{':
		return d.object(func(string) error { return d.skip(depth - 1) })
	case c == '[':
		return d.list(func() error { return d.skip(depth - 1) })
	case c == '"':
		_, err := d.string()
		return err
	case c == '-' || c >= '0' && c <= '9':
		_, err := d.number()
		return err
	case d.word("true"), d.word("false"), d.word("null"):
		return nil
	}
	return d.unexpected("a value")
}
