package server

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sockets"
)

// maxPortWait bounds how long one request waits for a port.
const maxPortWait = time.Hour

// portPolls are the pauses between polls of a port; the last one repeats. They
// do not grow: a server that is up should not wait for the guest.
var portPolls = [...]time.Duration{2 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond}

func (s *Server) portReady(r *http.Request) (any, error) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		return nil, refuse(guest.CodeInvalid, "port %.20q is unusable; it is a number from 1 to 65535", r.URL.Query().Get("port"))
	}
	wait, err := durationOf(r, "wait", maxPortWait)
	if err != nil {
		return nil, err
	}
	if !waitForPort(r.Context(), uint16(port), wait) {
		return nil, refuse(guest.CodePortNotReady, "nothing listens on port %d after %s", port, wait)
	}
	return struct{}{}, nil
}

// waitForPort polls after 0, 2, 5, 10, 20 and then every 25 ms.
func waitForPort(ctx context.Context, port uint16, wait time.Duration) bool {
	expired := time.After(wait)
	for i := 0; !listening(port); i = min(i+1, len(portPolls)-1) {
		select {
		case <-time.After(portPolls[i]):
		case <-expired:
			return listening(port)
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// listening reports whether a TCP socket listens on the port, on any address.
func listening(port uint16) bool { return len(sockets.Listeners("/proc/self", port)) > 0 }
