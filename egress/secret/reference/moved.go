package reference

import (
	"net/http"
	"slices"
	"strings"
)

// Moved says whether a request has a reference in a place where it was not before:
// one that stands for a secret, or for something with one in it, of which whose is
// true. A place is the value of a header or trailer, the path, or a parameter of the
// query. A body is new as a whole; nil: it was left as it was.
func (s *Set) Moved(before, after *http.Request, body []byte, whose func(secret string) bool) bool {
	if s == nil || s.prefix == "" {
		return false
	}
	if s.holds(string(body), whose) {
		return true
	}
	was, is := s.places(before, whose), s.places(after, whose)
	return slices.ContainsFunc(is, func(p place) bool { return !slices.Contains(was, p) })
}

// place is where a reference stands, with all that stands there.
type place struct{ where, text string }

func (s *Set) places(r *http.Request, whose func(string) bool) (found []place) {
	add := func(where, text string) {
		if s.holds(text, whose) {
			found = append(found, place{where, text})
		}
	}
	for kind, h := range map[string]http.Header{"header ": r.Header, "trailer ": r.Trailer} {
		for name, values := range h {
			for _, v := range values {
				add(kind+name, v)
			}
		}
	}
	add("path", r.URL.EscapedPath())
	for parameter := range strings.SplitSeq(r.URL.RawQuery, "&") {
		add("query", parameter)
	}
	return found
}

// holds says whether a text has such a reference. What is half of one is not
// rendered.
func (s *Set) holds(text string, whose func(string) bool) bool {
	for {
		_, after, found := strings.Cut(text, s.prefix)
		if !found {
			return false
		}
		e, err := s.lookup(text[len(text)-len(after)-len(s.prefix):])
		if err == nil && slices.ContainsFunc(e.secrets, whose) {
			return true
		}
		text = after
	}
}
