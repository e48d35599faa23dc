package server

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

func TestNoRequestBeginsAfterTheLastWasWaitedFor(t *testing.T) {
	q := newRequests(false)
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
