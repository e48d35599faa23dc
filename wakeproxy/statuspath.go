package wakeproxy

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// StatusPath is the second path of a preview's host that the node serves itself: its
// pages poll it before they load again. It does not count as activity and wakes no
// sandbox.
const StatusPath = "/.doze/status"

// previewStatus is the response body of StatusPath.
type previewStatus struct {
	// Listening is true if the sandbox is running and its port accepts connections.
	Listening bool `json:"listening"`
}

// statusTimeout bounds the attempt to connect, which takes no time on a loopback.
const statusTimeout = 2 * time.Second

func (h *Handler) serveStatus(w http.ResponseWriter, r *http.Request, id sandbox.ID, port sandbox.Port) {
	ctx, cancel := context.WithTimeout(r.Context(), statusTimeout)
	defer cancel()
	body, err := json.Marshal(previewStatus{Listening: h.proxy.sandboxes.Listens(ctx, id, port.Port)})
	if err != nil {
		panic(err) // a boolean
	}
	w.Header().Set("Vary", varies)
	writeOwn(w, "application/json", http.StatusOK, body)
}
