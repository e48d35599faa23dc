package wakeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// WakePath is one of the two paths of a preview's host that the node serves itself:
// the waiting page's event stream. It joins the wake that the page's request began,
// does not start a stopped sandbox, waits until the port accepts connections, and
// sends one event: `ready`, or `failed` with a problem document. When the wait limit
// passes first the stream ends, and EventSource reconnects.
const WakePath = "/.doze/wake"

func (h *Handler) serveWake(w http.ResponseWriter, r *http.Request, id sandbox.ID, port sandbox.Port) {
	x := h.newExchange(r, id, port)
	x.until = x.start.Add(x.waitTimeout)
	defer x.cleanUp()
	x.reach = min(x.reach, reachAsleep) // the page that waits has begun the wake
	if x.reach == reachRunning {
		if err := x.acquire(r.Context()); err != nil {
			writeProblem(w, r, x.problemOf(r.Context(), err))
			return
		}
	}

	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("X-Accel-Buffering", "no") // proxies before us
	// The visitor reconnects after a second, and sees immediately that the stream is open.
	if !sendEvent(w, "retry: 1000\n\n") {
		return
	}
	var err error
	if x.lease == nil {
		err = x.acquire(r.Context())
	}
	if err == nil {
		err = x.awaitPort(r.Context())
	}
	if x.cameTooLate(err) {
		if err = x.acquireNext(r.Context()); err == nil {
			err = x.awaitPort(r.Context())
		}
	}
	switch {
	case err == nil:
		sendEvent(w, "event: ready\ndata: {}\n\n")
	case errors.Is(err, errStillWaking), r.Context().Err() != nil:
		// The page reconnects, or has left.
	default:
		data, err := json.Marshal(x.wakeProblem(r.Context(), err))
		if err != nil {
			panic(err) // strings and numbers only
		}
		sendEvent(w, fmt.Sprintf("event: failed\ndata: %s\n\n", data))
	}
}

// wakeProblem is problemOf for a page whose wake may have failed before it
// connected.
func (x *exchange) wakeProblem(ctx context.Context, err error) *problem.Problem {
	p := x.problemOf(ctx, err)
	if p.Code == problem.PortNotReady { // the page has waited for as long as it may
		p = portNotListening
	}
	if sb, _ := x.proxy.sandboxes.ByID(x.id); p.Code == problem.SandboxStopped && sb.Condition.Code != "" {
		p = wakeFailed
		if x.port.Access != sandbox.AccessPublic {
			p = withContainerOutput(p, x.proxy.sandboxes.LastLog(ctx, x.id))
		}
	}
	return p
}

// sendEvent writes and flushes text; it reports false when the client has left.
func sendEvent(w http.ResponseWriter, text string) bool {
	if _, err := io.WriteString(w, text); err != nil {
		return false
	}
	return http.NewResponseController(w).Flush() == nil
}
