package reference

import (
	"net/http"
	"testing"

	"github.com/doze-run/doze/egress/secret"
)

func TestMovedReferencesAreDetected(t *testing.T) {
	s := of(map[string]string{"theirs": "value-1", "mine": "value-2"})
	theirs, mine := must(t)(s.Secret(id("theirs"))), must(t)(s.Secret(id("mine")))
	inside := must(t)(s.Encode(Base64, "user:"+theirs))
	wanted := func(id secret.ID) bool { return id.Name == "theirs" }
	before := func() *http.Request {
		r := request(t, "https://api.example/a?key="+theirs)
		r.Header.Set("Authorization", "Bearer "+theirs)
		r.Trailer = http.Header{"X-Sum": {theirs}}
		return r
	}
	for name, c := range map[string]struct {
		change func(*http.Request)
		body   string
		moved  bool
	}{
		"nothing": {change: func(*http.Request) {}},
		"removed": {change: func(r *http.Request) { r.Header.Del("Authorization"); r.URL.RawQuery = "" }},
		"one's own": {change: func(r *http.Request) {
			r.Header.Set("X-Mine", mine)
			r.URL.RawQuery = "x=1&key=" + theirs + "&y=" + mine
		}, body: mine},
		"another header":    {change: func(r *http.Request) { r.Header.Set("X-Note", theirs) }, moved: true},
		"a longer value":    {change: func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+theirs+" or so") }, moved: true},
		"the other kind":    {change: func(r *http.Request) { r.Header.Set("X-Sum", theirs) }, moved: true},
		"trailer":           {change: func(r *http.Request) { r.Trailer.Set("X-More", theirs) }, moved: true},
		"path":              {change: func(r *http.Request) { r.URL.Path = "/" + theirs }, moved: true},
		"another parameter": {change: func(r *http.Request) { r.URL.RawQuery += "&text=" + theirs }, moved: true},
		"encoded":           {change: func(r *http.Request) { r.Header.Set("X-Note", inside) }, moved: true},
		"behind one's own":  {change: func(r *http.Request) { r.Header.Set("X-Note", mine+theirs) }, moved: true},
		"behind half a one": {change: func(r *http.Request) { r.Header.Set("X-Note", theirs[:len(theirs)-2]+"99"+theirs) }, moved: true},
		"body":              {change: func(*http.Request) {}, body: `{"text":"` + theirs + `"}`, moved: true},
	} {
		after := before()
		c.change(after)
		if got := s.Moved(before(), after, []byte(c.body), wanted); got != c.moved {
			t.Errorf("%s: moved %v", name, got)
		}
	}
	if of(nil).Moved(before(), request(t, "https://api.example/"+theirs), nil, wanted) {
		t.Error("references of another exchange move")
	}
}
