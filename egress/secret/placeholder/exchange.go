package placeholder

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/doze-run/doze/egress/secret"
)

// MaxBody is the maximum length of a body of known length that is held in memory to be
// sent with its new length. Login requests have some hundred bytes.
const MaxBody = 1 << 20

// Exchanged is the result of exchanging a request's placeholders. It is nil for a request
// without any.
type Exchanged struct {
	set *Set
	// placed is the length of all values.
	placed int

	mu      sync.Mutex
	values  map[secret.ID]string
	refused error
}

// Used returns the secrets that are in the request, by owner and name. Secrets in a body of
// unknown length are added while it is read.
func (x *Exchanged) Used() []secret.ID {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.SortedFunc(maps.Keys(x.values), func(a, b secret.ID) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Name, b.Name))
	})
}

// Refused returns the *RefusedError with which reading the body ended, if it did.
// The forwarder of the request may have wrapped or replaced it.
func (x *Exchanged) Refused() error {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.refused
}

// Exchange replaces placeholders by values in a request's header values, the user and
// password of Basic authentication, its query and its body, escaped where it is JSON or a
// form. Placeholders of other sandboxes are text like any other.
//
// A body of at most MaxBody bytes is read first and gets its new length; one of
// unknown length is exchanged while it is read. In a longer one of known length,
// whose length is part of a promise (S3 refuses another), a placeholder is refused,
// and in one beyond the limit of memory.
// Bodies of gRPC (whose messages have lengths of their own) and compressed ones are
// not searched, and neither is data after an upgrade.
//
// Errors: *RefusedError, after which the request must not be sent, and errors of
// reading the body. Errors of a body that is read later come from its Read, and
// Refused returns them.
func (s *Set) Exchange(r *http.Request) (*Exchanged, error) {
	if s == nil || len(s.offers) == 0 {
		return nil, nil
	}
	x := &Exchanged{set: s}
	if err := x.head(r); err != nil {
		return nil, err
	}
	streamed, err := x.body(r)
	if err != nil {
		return nil, err
	}
	if len(x.values) == 0 && !streamed {
		return nil, nil
	}
	return x, nil
}

func (x *Exchanged) head(r *http.Request) error {
	for name, values := range r.Header {
		for i, v := range values {
			if name == "Authorization" {
				if basic, err := x.basic(v); err != nil {
					return err
				} else if basic != "" {
					values[i] = basic
					continue
				}
			}
			var err error
			if values[i], err = x.text(v, inHeader); err != nil {
				return err
			}
		}
	}
	var err error
	if r.URL.RawQuery, err = x.text(r.URL.RawQuery, inQuery); err != nil {
		return err
	}
	if _, err = x.text(r.URL.Path, inPath); err != nil {
		return err
	}
	target, query, found := strings.Cut(r.RequestURI, "?")
	if !found {
		return nil
	}
	if query, err = x.text(query, inQuery); err == nil {
		r.RequestURI = target + "?" + query
	}
	return err
}

// basic returns the header of Basic authentication with values in it, or "".
func (x *Exchanged) basic(header string) (string, error) {
	scheme, encoded, found := strings.Cut(header, " ")
	if !found || !strings.EqualFold(scheme, "Basic") {
		return "", nil
	}
	encoded = strings.TrimLeft(encoded, " ")
	plain, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		plain, err = base64.RawStdEncoding.DecodeString(encoded)
	}
	if err != nil || !bytes.Contains(plain, []byte(Prefix)) {
		return "", nil
	}
	exchanged, err := x.text(string(plain), inHeader) // servers refuse control characters here too (RFC 7617)
	if err != nil {
		return "", err
	}
	return scheme + " " + base64.StdEncoding.EncodeToString([]byte(exchanged)), nil
}

// text returns a text with values instead of placeholders. in returns the form that a
// value has in this text, or an error if the text cannot hold it.
func (x *Exchanged) text(text string, in func(value string) (string, error)) (string, error) {
	if !strings.Contains(text, Prefix) {
		return text, nil
	}
	b := &body{x: x, in: in, limited: true, unsearched: []byte(text), err: io.EOF}
	var exchanged strings.Builder
	for b.next() {
		exchanged.Write(b.out)
	}
	if b.err != io.EOF {
		return "", b.err
	}
	return exchanged.String(), nil
}

func (x *Exchanged) valueOf(offer *Offer, in func(value string) (string, error)) (string, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	value, known := x.values[offer.Secret]
	if !known {
		b, err := x.set.value(offer.Secret)
		if err != nil {
			return "", &RefusedError{offer.Secret, err.Error()}
		}
		value = string(b)
	}
	placed, err := in(value)
	if err != nil {
		return "", &RefusedError{offer.Secret, err.Error()}
	}
	if x.values == nil {
		x.values = map[secret.ID]string{}
	}
	x.values[offer.Secret] = value
	return placed, nil
}

// inHeader: a field value has no line break nor NUL (RFC 9110, section 5.5).
func inHeader(value string) (string, error) {
	for i := range len(value) {
		if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
			return "", fmt.Errorf("its value has a line break or a control character, perhaps at its end, which no header can hold")
		}
	}
	return value, nil
}

func inQuery(value string) (string, error) { return url.QueryEscape(value), nil }

// inPath refuses a value: paths are logged everywhere, and rules decide on them.
func inPath(string) (string, error) {
	return "", fmt.Errorf("in a path, where it is not exchanged: send it in a header, or let a policy put the secret there")
}

// body exchanges in the body, or arranges for it, and reports whether it did.
func (x *Exchanged) body(r *http.Request) (streamed bool, err error) {
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 || opaque(r.Header) {
		return false, nil
	}
	streams := &body{x: x, src: r.Body, in: inBody(r.Header)}
	switch {
	case r.ContentLength > MaxBody:
		streams.fixed = "in a body of more than a megabyte with a declared length, where it is not exchanged: send it in a header"
	case r.ContentLength > 0 && !x.set.hold(r.ContentLength):
		streams.fixed = "in a body with a declared length while too many such bodies are in flight: send fewer at a time, or send it in a header"
	}
	if r.ContentLength < 0 || streams.fixed != "" {
		r.Body = streams
		return true, nil
	}
	whole := make([]byte, r.ContentLength)
	_, err = io.ReadFull(r.Body, whole)
	if closing := r.Body.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return false, fmt.Errorf("read the body of a request: %w", err)
	}
	if bytes.Contains(whole, []byte(Prefix)) {
		exchanged, err := x.text(string(whole), inBody(r.Header))
		if err != nil {
			return false, err
		}
		whole = []byte(exchanged)
	}
	r.Body = io.NopCloser(bytes.NewReader(whole))
	if r.ContentLength = int64(len(whole)); r.Header.Get("Content-Length") != "" {
		r.Header.Set("Content-Length", strconv.Itoa(len(whole)))
	}
	return false, nil
}

// inBody returns the form of a value in a body of this type: within a string of JSON, in a
// form, or unchanged.
func inBody(h http.Header) func(value string) (string, error) {
	switch kind := mediaType(h); {
	case kind == "application/x-www-form-urlencoded":
		return inQuery
	case strings.HasSuffix(kind, "json"), strings.HasSuffix(kind, "jsonl"): // +json and ndjson too
		return inJSON
	}
	return func(value string) (string, error) { return value, nil }
}

func inJSON(value string) (string, error) {
	quoted, err := json.Marshal(value)
	if err != nil || !utf8.ValidString(value) {
		return "", fmt.Errorf("its value is not text, so JSON cannot hold it")
	}
	return string(quoted[1 : len(quoted)-1]), nil
}

func mediaType(h http.Header) string {
	kind, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.ToLower(strings.TrimSpace(kind))
}

// opaque reports whether a body is not searched.
func opaque(h http.Header) bool {
	if e := h.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return true
	}
	return strings.HasPrefix(mediaType(h), "application/grpc")
}
