package server

import (
	"log"
	"net/http"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/runtime/guest"
)

// What a sandbox may ask: holdBurst holds at once, and one more every
// holdInterval. Enough for a program that renews its hold, no load for the node.
const (
	holdBurst    = 10
	holdInterval = time.Second
	// insideTimeout ends a connection from inside, whatever it does, and no more
	// than insideConns are open at once: the others wait in the kernel.
	insideTimeout = 5 * time.Second
	insideConns   = 8
)

// newHoldServer serves the socket for processes in the sandbox. It offers a hold
// and nothing else:
//
//	POST /hold?for=10m
//
// for is a duration of at most guest.MaxHold; 0 ends the hold.
func newHoldServer(events *hub, log *log.Logger) *http.Server {
	limit := rate.NewLimiter(rate.Every(holdInterval), holdBurst)
	hold := handler(func(w http.ResponseWriter, r *http.Request) error {
		d, err := durationOf(r, "for", guest.MaxHold)
		if err != nil {
			return err
		}
		if r.URL.Query().Get("for") == "" {
			return refuse(guest.CodeInvalid, "say how long, such as for=10m")
		}
		if !limit.Allow() {
			return &guest.Error{Status: http.StatusTooManyRequests, Code: "too_many_requests",
				Message: "too many holds; one every second is enough"}
		}
		if events.send(guest.Event{Type: guest.EventHold, Hold: d}) == 0 {
			return refuse(guest.CodeInternal, "the node is not listening just now; try again")
		}
		return answer(w, struct{}{})
	})
	mux := http.NewServeMux()
	mux.Handle("POST "+guest.RouteHold, hold)
	srv := &http.Server{
		Handler: mux, ErrorLog: log, MaxHeaderBytes: 4 << 10,
		ReadTimeout: insideTimeout, WriteTimeout: insideTimeout,
	}
	srv.SetKeepAlivesEnabled(false)
	return srv
}
