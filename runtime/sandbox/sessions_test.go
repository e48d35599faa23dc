package sandbox_test

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// A reader of events that was too slow may have missed that a session was closed.
func TestClosedSessionIsForgottenAlthoughItsEventWasMissed(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	events := make(chan guest.Event)
	n.Engine.HandleGuest(hostile(func(w http.ResponseWriter, r *http.Request) {
		lines := json.NewEncoder(w)
		for http.NewResponseController(w).Flush() == nil {
			select {
			case ev := <-events:
				_ = lines.Encode(ev)
			case <-r.Context().Done():
				return
			}
		}
	}))
	sb := create(t, n.Manager, "app")
	known := func() (ids []string) {
		sb, _ := n.Manager.ByID(sb.ID)
		for _, s := range sb.Sessions {
			ids = append(ids, s.ID)
		}
		return ids
	}
	for i, id := range []string{"dev", "build"} {
		s := guest.Session{ID: id, PID: 7 + i, Shell: "bash", Cwd: "/", State: guest.ProcessRunning, StartedAt: time.Now()}
		events <- guest.Event{Type: guest.EventSession, Session: &s}
	}
	testkit.Eventually(t, "both sessions are known", func() bool { return len(known()) == 2 })
	events <- guest.Event{Type: guest.EventSessions, Sessions: []string{"build"}}
	testkit.Eventually(t, "the closed session is forgotten", func() bool { return len(known()) == 1 && known()[0] == "build" })
	events <- guest.Event{Type: guest.EventSessions}
	testkit.Eventually(t, "no session is known", func() bool { return len(known()) == 0 })
}
