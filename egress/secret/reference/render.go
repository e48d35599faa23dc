package reference

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/doze-run/doze/egress/secret"
)

// MaxBody is the maximum length of a body in which references are rendered: a policy may
// write as much. The values in it may have as much again, because all of it is in memory.
const MaxBody = 1 << 20

// Render replaces references by values in the values of headers and trailers, in the path,
// in the query and, if a policy wrote it, in the body, and returns the secrets that are now
// in the request. In a path or query a value is percent-encoded, unless it was made with the
// encoding Percent; in a body it is as it is. A body that a client wrote has no references.
//
// The request must not be sent after an error: for a value that cannot stand in its place
// or for a reference in a place that is not rendered. No error has a part of a value.
func (s *Set) Render(r *http.Request, wroteBody bool) (used []secret.ID, err error) {
	if s == nil || s.prefix == "" {
		return nil, nil
	}
	if err := s.elsewhere(r); err != nil {
		return nil, err
	}
	t := &renderer{set: s, capacity: maxHeld}
	if err := t.headers(r.Header, "header "); err != nil {
		return nil, err
	}
	if err := t.headers(r.Trailer, "trailer "); err != nil {
		return nil, err
	}
	if err := t.url(r); err != nil {
		return nil, err
	}
	if wroteBody && r.Body != nil && r.Body != http.NoBody {
		t.capacity = MaxBody
		err = t.body(r)
	}
	return t.used, err
}

func (t *renderer) headers(h http.Header, kind string) error {
	for name, values := range h {
		for i, v := range values {
			var err error
			if values[i], err = t.text(v, inHeader); err != nil {
				return fmt.Errorf("%s%s: %w", kind, name, err)
			}
		}
	}
	return nil
}

// inHeader: a field value has no line break nor NUL (RFC 9110, section 5.5).
// Files often end with a line break. It is not cut off: that would be a guess
// about which bytes are the secret.
func inHeader(e *entry) (string, error) {
	for i := range len(e.value) {
		c := e.value[i]
		switch {
		case c >= ' ' && c != 0x7f || c == '\t':
		case i >= len(e.value)-2 && strings.Trim(e.value[i:], "\r\n") == "":
			return "", fmt.Errorf("secret %s ends with a line break: store it without one", names(e.secrets))
		default:
			return "", fmt.Errorf("secret %s has line breaks or control characters, which no header can hold", names(e.secrets))
		}
	}
	return e.value, nil
}

func names(ids []secret.ID) string {
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = id.Name
	}
	return strings.Join(list, ", ")
}

func inURL(e *entry) (string, error) {
	if e.escaped {
		return e.value, nil
	}
	return escape(e.value), nil
}

func (t *renderer) url(r *http.Request) error {
	if path := r.URL.EscapedPath(); t.set.in(path) {
		raw, err := t.text(path, inURL)
		if err != nil {
			return fmt.Errorf("path: %w", err)
		}
		if r.URL.Path, err = url.PathUnescape(raw); err != nil {
			return errors.New("path: it is not well-formed") // its error would quote
		}
		r.URL.RawPath = raw
	}
	var err error
	if r.URL.RawQuery, err = t.text(r.URL.RawQuery, inURL); err != nil {
		return fmt.Errorf("query: %w", err)
	}
	if r.RequestURI, err = t.text(r.RequestURI, inURL); err != nil {
		return fmt.Errorf("request target: %w", err)
	}
	return nil
}

// elsewhere returns an error for references in places where none is rendered: otherwise
// the request would be sent with them.
func (s *Set) elsewhere(r *http.Request) error {
	for _, text := range []string{r.Method, r.Host, r.URL.Scheme, r.URL.Opaque, r.URL.Host, r.URL.Fragment} {
		if s.in(text) {
			return errors.New("method, host or URL: no place for a secret")
		}
	}
	if r.URL.User != nil && s.in(r.URL.User.String()) {
		return errors.New("URL: no place for a secret: set the header Authorization")
	}
	for _, h := range []http.Header{r.Header, r.Trailer} {
		for name := range h {
			// Names are in canonical form, in which no reference is itself.
			if len(name) >= len(s.prefix) && strings.Contains(strings.ToLower(name), strings.ToLower(s.prefix)) {
				return errors.New("name of a header: no place for a secret")
			}
		}
	}
	return nil
}

// body renders the body and sets its length.
func (t *renderer) body(r *http.Request) error {
	body, err := io.ReadAll(io.LimitReader(r.Body, MaxBody+1))
	if err := errors.Join(err, r.Body.Close()); err != nil {
		return fmt.Errorf("read the body of a policy: %w", err)
	}
	if len(body) > MaxBody {
		return fmt.Errorf("body: more than %d bytes, which is too long for one with secrets", MaxBody)
	}
	if bytes.Contains(body, []byte(t.set.prefix)) {
		rendered, err := t.text(string(body), asIs)
		if err != nil {
			return fmt.Errorf("body: %w", err)
		}
		body = []byte(rendered)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.ContentLength = int64(len(body))
	r.TransferEncoding = nil
	if r.Header.Get("Content-Length") != "" {
		r.Header.Set("Content-Length", fmt.Sprint(len(body)))
	}
	return nil
}
