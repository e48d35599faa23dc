package api

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// deadlines counts how often a deadline is set.
type deadlines struct {
	http.ResponseWriter
	set int
}

func (d *deadlines) SetReadDeadline(time.Time) error { d.set++; return nil }

// HTTP/2 panics on a deadline that is set after the handler has returned.
func TestEndedBodySetsNoDeadline(t *testing.T) {
	w := &deadlines{ResponseWriter: httptest.NewRecorder()}
	body := newTimedBody(w, strings.NewReader("content"), time.Minute)
	buf := make([]byte, 4)
	if n, err := body.Read(buf); n != 4 || err != nil || w.set != 1 {
		t.Fatalf("read %d, %v, and set %d deadlines", n, err, w.set)
	}
	body.end()
	if n, err := body.Read(buf); n != 0 || !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("after the end: read %d, %v", n, err)
	}
	if w.set != 1 || body.failure() != nil {
		t.Errorf("after the end: %d deadlines, failure %v", w.set, body.failure())
	}
}
