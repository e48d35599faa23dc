package server

import (
	"log"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/time/rate"

	"github.com/doze-run/doze/runtime/guest"
)

// A sandbox may request a burst of holdBurst holds, and one more every holdInterval: enough
// for a program that renews its hold, and no load for the node.
const (
	holdBurst    = 10
	holdInterval = time.Second
	// holdTimeout ends each connection, and no more than maxHoldConns are open at the
	// same time: the others wait in the kernel.
	holdTimeout  = 5 * time.Second
	maxHoldConns = 8
)

// newHoldServer serves the socket for processes in the sandbox. It offers a hold
// and nothing else:
//
//	POST /hold?for=10m
//
// for is a duration of at most guest.MaxHold; 0 ends the hold.
func (s *Server) newHoldServer(log *log.Logger) *http.Server {
	limit := rate.NewLimiter(rate.Every(holdInterval), holdBurst)
	hold := jsonHandler(func(r *http.Request) (any, error) {
		d, err := durationOf(r, "for", guest.MaxHold)
		if err != nil {
			return nil, err
		}
		if r.URL.Query().Get("for") == "" {
			return nil, refuse(guest.CodeInvalid, "the duration is missing; send one such as for=10m")
		}
		if !limit.Allow() {
			return nil, &guest.Error{Status: http.StatusTooManyRequests, Code: "too_many_requests",
				Message: "too many holds; one every second is enough"}
		}
		if s.events.send(guest.Event{Type: guest.EventHold, Hold: d}) == 0 {
			return nil, refuse(guest.CodeInternal, "the node is not listening just now; try again")
		}
		return struct{}{}, nil
	})
	mux := http.NewServeMux()
	mux.Handle("POST "+guest.RouteHold, s.handle(hold.respond))
	srv := &http.Server{
		Handler: mux, ErrorLog: log, MaxHeaderBytes: 4 << 10,
		ReadTimeout: holdTimeout, WriteTimeout: holdTimeout,
	}
	srv.SetKeepAlivesEnabled(false)
	return srv
}

func limitHolds(l net.Listener) net.Listener { return netutil.LimitListener(l, maxHoldConns) }
