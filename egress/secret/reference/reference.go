// Package reference lets a policy place a secret in a request without holding a byte
// of it: the policy writes a reference, and the host replaces it with the value after the
// policy has ended.
package reference

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/secret"
)

const (
	// MaxReferences of one exchange. A request that authenticates in three
	// places with three encodings of two secrets has 18.
	MaxReferences = 64
	// MaxValue is the maximum length of the value of a reference: a value of the
	// vault, 64 KiB at most, in an encoding that triples it.
	MaxValue = 192 << 10
	// maxHeld is the maximum length of the values of all references of one exchange.
	maxHeld = 1 << 20
)

var (
	// ErrLimit: more references, or longer ones, than one request may have.
	ErrLimit = fmt.Errorf("%w: too many references, or too long ones", secret.ErrLimit)
	// ErrUnknown: a text begins like a reference of this request but is not one.
	ErrUnknown = fmt.Errorf("%w: incomplete or unknown reference", secret.ErrBadArgument)
)

// Encodings of a text that may hold references. The numbers are the ABI's.
const (
	Base64    int32 = 0 // RFC 4648, section 4, with padding
	Base64URL int32 = 1 // section 5, without padding
	Hex       int32 = 2 // lower case
	Percent   int32 = 3 // RFC 3986: all but letters, digits and -._~
)

// Set is the references of one request. Their text is random, and valid in this request
// only. The nil Set has no references. It is not safe for concurrent use.
type Set struct {
	resolve func(secret.ID) ([]byte, error)
	prefix  string // of every reference of this set, empty until there is one
	entries []entry
	held    int
	derived []secret.ID
}

// entry is a reference with its value.
type entry struct {
	text    string // the reference
	value   string
	secrets []secret.ID // whose values are in it
	plain   secret.ID   // the secret, if the value is just that
	escaped bool        // consists of characters that a URL need not escape
}

// NewSet returns an empty set. resolve is called for the first reference to a secret, and
// for each HMAC and signature with it. It decides whether the secret may be used in this
// request (its hosts, verified TLS).
func NewSet(resolve func(secret.ID) ([]byte, error)) *Set {
	return &Set{resolve: resolve}
}

// Secret returns the text that stands for a secret: of letters, digits and
// hyphens, the same for the same secret. Errors: any of resolve, ErrLimit.
func (s *Set) Secret(id secret.ID) (string, error) {
	for i := range s.entries {
		if s.entries[i].plain == id && id.Name != "" {
			return s.entries[i].text, nil
		}
	}
	value, err := s.resolve(id)
	if err != nil {
		return "", err
	}
	return s.add(entry{value: string(value), secrets: []secret.ID{id}, plain: id})
}

// Derived returns the secrets from which HMAC or Sign has derived something.
func (s *Set) Derived() []secret.ID {
	if s == nil {
		return nil
	}
	return s.derived
}

// Encode returns a reference to the encoding of a text. References in the text, also
// to encoded texts, are encoded as their values. Errors: secret.ErrBadArgument,
// ErrLimit, ErrUnknown.
func (s *Set) Encode(encoding int32, text string) (string, error) {
	if len(text) > MaxValue {
		return "", ErrLimit
	}
	r := renderer{set: s, capacity: MaxValue}
	value, err := r.text(text, asIs)
	if err != nil {
		return "", err
	}
	switch encoding {
	case Base64:
		value = base64.StdEncoding.EncodeToString([]byte(value))
	case Base64URL:
		value = base64.RawURLEncoding.EncodeToString([]byte(value))
	case Hex:
		value = hex.EncodeToString([]byte(value))
	case Percent:
		value = escape(value)
	default:
		return "", fmt.Errorf("%w: unknown encoding: %d", secret.ErrBadArgument, encoding)
	}
	return s.add(entry{value: value, secrets: r.used, escaped: encoding == Percent})
}

// The length of a reference: prefix, 26 random characters, two digits.
const (
	lead   = "doze-ref-"
	length = len(lead) + 26 + len("-00")
)

func (s *Set) add(e entry) (string, error) {
	if len(s.entries) == MaxReferences || len(e.value) > MaxValue || s.held+len(e.value) > maxHeld {
		return "", ErrLimit
	}
	if s.prefix == "" {
		s.prefix = lead + rand.Text() + "-" // 130 bits
	}
	n := len(s.entries) // below 100, as MaxReferences is
	e.text = s.prefix + string([]byte{byte('0' + n/10), byte('0' + n%10)})
	s.entries = append(s.entries, e)
	s.held += len(e.value)
	return e.text, nil
}

// lookup returns the entry of the reference with which a text begins.
func (s *Set) lookup(text string) (*entry, error) {
	if len(text) >= length {
		for i := range s.entries {
			if s.entries[i].text == text[:length] {
				return &s.entries[i], nil
			}
		}
	}
	return nil, ErrUnknown
}

// renderer replaces references by values, and records their secrets.
type renderer struct {
	set      *Set
	used     []secret.ID
	capacity int // for values: references are short, so that many fit into a text
}

// asIs returns the value unchanged.
func asIs(e *entry) (string, error) { return e.value, nil }

// text returns a text with values in place of its references. in returns the form that a
// value has in this text, or an error if the text cannot hold it. Values are not searched.
func (r *renderer) text(text string, in func(*entry) (string, error)) (string, error) {
	if !r.set.in(text) {
		return text, nil
	}
	var b strings.Builder
	for {
		before, _, found := strings.Cut(text, r.set.prefix)
		b.WriteString(before)
		if !found {
			return b.String(), nil
		}
		text = text[len(before):]
		e, err := r.set.lookup(text)
		if err != nil {
			return "", err
		}
		value, err := in(e)
		if err != nil {
			return "", err
		}
		if r.capacity -= len(value); r.capacity < 0 {
			return "", ErrLimit
		}
		b.WriteString(value)
		for _, id := range e.secrets {
			if !slices.Contains(r.used, id) {
				r.used = append(r.used, id)
			}
		}
		text = text[length:]
	}
}

// in reports whether a text has a reference, or the beginning of one.
func (s *Set) in(text string) bool {
	return s != nil && s.prefix != "" && strings.Contains(text, s.prefix)
}

// escape percent-encodes all but the unreserved characters of RFC 3986, as is valid in a
// path, a query and a form.
func escape(text string) string {
	const digits = "0123456789ABCDEF"
	b := make([]byte, 0, len(text)+len(text)/2)
	for i := range len(text) {
		switch c := text[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '.', c == '_', c == '~':
			b = append(b, c)
		default:
			b = append(b, '%', digits[c>>4], digits[c&15])
		}
	}
	return string(b)
}
