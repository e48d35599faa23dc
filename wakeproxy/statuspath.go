package wakeproxy

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// StatusPath is the second path of a preview's host that the node serves itself: its
// pages poll it before they load again. It does not count as activity and wakes no
// sandbox.
const StatusPath = "/.doze/status"

// statusTimeout bounds the attempt to connect, which takes no time on a loopback.
const statusTimeout = 2 * time.Second

// serveStatus reports whether the sandbox is running and its port accepts connections.
func (h *Handler) serveStatus(w http.ResponseWriter, r *http.Request, id sandbox.ID, port sandbox.Port) {
	ctx, cancel := context.WithTimeout(r.Context(), statusTimeout)
	defer cancel()
	body := fmt.Appendf(nil, `{"listening":%t}`, h.proxy.sandboxes.Listens(ctx, id, port.Port))
	w.Header().Set("Vary", varies)
	writeOwn(w, "application/json", http.StatusOK, body)
}
