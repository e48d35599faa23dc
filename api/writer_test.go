package api

import (
	"bytes"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

// deadlines counts how often a deadline is set.
type deadlines struct {
	http.ResponseWriter
	set int
}

func (d *deadlines) SetReadDeadline(time.Time) error  { d.set++; return nil }
func (d *deadlines) SetWriteDeadline(time.Time) error { d.set++; return nil }

// A client that reads slowly, but all the time, gets a response of any size.
func TestLargeWriteHasManyDeadlines(t *testing.T) {
	sent := httptest.NewRecorder()
	w := &deadlines{ResponseWriter: sent}
	b := bytes.Repeat([]byte("0123456789"), 100_000)
	if n, err := newTimedWriter(w, time.Minute).Write(b); n != len(b) || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	if !bytes.Equal(sent.Body.Bytes(), b) {
		t.Error("something else was written")
	}
	if want := len(b)/maxWrite + 1; w.set != want {
		t.Errorf("%d deadlines were set, not %d", w.set, want)
	}
	broken := &brokenWriter{ResponseRecorder: httptest.NewRecorder(), left: 2}
	if n, err := newTimedWriter(broken, time.Minute).Write(b); n != 2*maxWrite || err == nil {
		t.Errorf("to a client that goes away: wrote %d, %v", n, err)
	}
}

// A client that sends slowly, but all the time, is served.
func TestEachReadOfJSONHasItsDeadline(t *testing.T) {
	w := &deadlines{ResponseWriter: httptest.NewRecorder()}
	const body = `{"name":"shop"}`
	r := httptest.NewRequest("POST", "/", iotest.OneByteReader(strings.NewReader(body)))
	api := &API{cfg: Config{Limits: Limits{}.withDefaults()}}
	if got, err := api.readBody(w, r, maxJSON, sendRaw); string(got) != body || err != nil {
		t.Fatalf("got %q, %v", got, err)
	}
	// The last one takes the deadline away.
	if want := len(body) + 2; w.set != want {
		t.Errorf("%d deadlines were set, not %d", w.set, want)
	}
}

// HTTP/2 panics on a deadline that is set after the handler has returned.
func TestEndedBodySetsNoDeadline(t *testing.T) {
	w := &deadlines{ResponseWriter: httptest.NewRecorder()}
	body := newTimedBody(w, strings.NewReader("content"), time.Minute)
	buf := make([]byte, 4)
	if n, err := body.Read(buf); n != 4 || err != nil || w.set != 1 {
		t.Fatalf("read %d, %v, and set %d deadlines", n, err, w.set)
	}
	body.detach()
	if n, err := body.Read(buf); n != 0 || !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("after the end: read %d, %v", n, err)
	}
	if w.set != 1 || body.failure() != nil {
		t.Errorf("after the end: %d deadlines, failure %v", w.set, body.failure())
	}
}
