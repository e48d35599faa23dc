package reference

import (
	"net/http"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/secret"
)

// Moved reports whether a request has a reference in a place where it was not before,
// considering references to secrets, or to something that contains one, for which wanted
// returns true. A place is the value of a header or trailer, the path, or a parameter of
// the query. A body is new as a whole; nil: it did not change.
func (s *Set) Moved(before, after *http.Request, body []byte, wanted func(secret.ID) bool) bool {
	if s == nil || s.prefix == "" {
		return false
	}
	if s.holds(string(body), wanted) {
		return true
	}
	was, is := s.occurrences(before, wanted), s.occurrences(after, wanted)
	return slices.ContainsFunc(is, func(p occurrence) bool { return !slices.Contains(was, p) })
}

// occurrence is where a reference stands, with all that stands there.
type occurrence struct{ where, text string }

func (s *Set) occurrences(r *http.Request, wanted func(secret.ID) bool) (found []occurrence) {
	add := func(where, text string) {
		if s.holds(text, wanted) {
			found = append(found, occurrence{where, text})
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

// holds reports whether a text has such a reference. Parts of references are never
// rendered.
func (s *Set) holds(text string, wanted func(secret.ID) bool) bool {
	for {
		_, after, found := strings.Cut(text, s.prefix)
		if !found {
			return false
		}
		e, err := s.lookup(text[len(text)-len(after)-len(s.prefix):])
		if err == nil && slices.ContainsFunc(e.secrets, wanted) {
			return true
		}
		text = after
	}
}
