package server

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

func TestNoRequestBeginsAfterTheLastWasWaitedFor(t *testing.T) {
	q := newRequests(func() {})
	served := false
	handler := q.watch(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served = true }))
	q.wait(time.Minute)
	defer func() {
		if v := recover(); v != http.ErrAbortHandler || served {
			t.Errorf("it was served: %t, and ended with %v", served, v)
		}
	}()
	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
}

// The event stream begins after the first requests, and lasts as long as the sandbox.
func TestMemoryIsTrimmedAlthoughARequestGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trims := 0
		q := newRequests(func() { trims++ })
		q.begin()
		q.endRequest(true)
		q.begin()
		time.Sleep(2 * trimAfter)
		synctest.Wait()
		if trims != 1 {
			t.Errorf("trimmed %d times", trims)
		}
		q.endRequest(true)
		q.wait(time.Minute)
	})
}

func TestNothingIsTrimmedAgainAfterAThaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trims := 0
		q := newRequests(func() { trims++ })
		handler := q.watch(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { q.trimNow() }))
		q.begin()
		q.endRequest(true)
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", guest.RouteTrim, nil))
		if trims != 1 {
			t.Errorf("a request to trim trimmed %d times", trims)
		}
		time.Sleep(2 * trimAfter)
		synctest.Wait()
		if trims != 1 {
			t.Errorf("trimmed %d times, all but one after a thaw", trims)
		}
	})
}
