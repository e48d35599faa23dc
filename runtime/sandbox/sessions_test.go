package sandbox_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// sends sends events as they come.
func sends(events <-chan guest.Event) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		lines := json.NewEncoder(w)
		for http.NewResponseController(w).Flush() == nil {
			select {
			case ev := <-events:
				_ = lines.Encode(ev)
			case <-r.Context().Done():
				return
			}
		}
	}
}

// A reader of events that was too slow may have missed that a session was closed.
func TestClosedSessionIsForgottenAlthoughItsEventWasMissed(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	events := make(chan guest.Event)
	n.Engine.HandleGuest(hostile(sends(events)))
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

// The guest frees an id when the close ends, so that another client may open it again before the
// response arrives.
func TestSessionAndTerminalThatAreOpenedAgainDuringTheirCloseStay(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	events := make(chan guest.Event)
	g := hostile(sends(events))
	first := time.Now().UTC()
	exit := 0
	session := guest.Session{ID: "dev", PID: 7, Shell: "bash", Cwd: "/", State: guest.ProcessRunning, StartedAt: first}
	terminal := guest.Terminal{ID: "main", PID: 8, Command: "sh", State: guest.ProcessRunning, StartedAt: first}
	var sb sandbox.Sandbox
	var closing bool
	known := func(s guest.Session, t guest.Terminal) bool {
		sb, _ := m.ByID(sb.ID)
		return len(sb.Sessions) == 1 && sb.Sessions[0].PID == s.PID && len(sb.Terminals) == 1 && sb.Terminals[0].PID == t.PID
	}
	reopen := func() (oldSession guest.Session, oldTerminal guest.Terminal) {
		oldSession, oldTerminal = session, terminal
		session.PID, session.StartedAt = session.PID+2, session.StartedAt.Add(time.Second)
		terminal.PID, terminal.StartedAt = terminal.PID+2, terminal.StartedAt.Add(time.Second)
		events <- guest.Event{Type: guest.EventSession, Session: &session}
		events <- guest.Event{Type: guest.EventTerminal, Terminal: &terminal}
		testkit.Eventually(t, "the new ones are known", func() bool { return known(session, terminal) })
		oldSession.State, oldSession.ExitCode, oldSession.Closed = guest.ProcessExited, &exit, true
		oldTerminal.State, oldTerminal.ExitCode, oldTerminal.Closed = guest.ProcessExited, &exit, true
		return oldSession, oldTerminal
	}
	n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodDelete {
			g.ServeHTTP(w, r)
			return
		}
		s, t := reopen()
		switch {
		case !closing: // it has ended meanwhile
			w.WriteHeader(http.StatusNotFound)
			code := guest.CodeNoSession
			if strings.HasPrefix(r.URL.Path, guest.RouteTerminal) {
				code = guest.CodeNoTerminal
			}
			fmt.Fprintf(w, `{"code":%q,"message":"unknown"}`, code)
		case strings.HasPrefix(r.URL.Path, guest.RouteTerminal):
			_ = json.NewEncoder(w).Encode(t)
		default:
			_ = json.NewEncoder(w).Encode(s)
		}
	}))
	sb = create(t, m, "app")
	for _, closing = range []bool{true, false} {
		reopen()
		if _, err := m.CloseSession(t.Context(), sb.ID, "dev"); err != nil {
			t.Error(err)
		}
		if !known(session, terminal) {
			t.Errorf("the new session is forgotten; closed by this request: %v", closing)
		}
		reopen()
		if _, err := m.CloseTerminal(t.Context(), sb.ID, "main"); err != nil {
			t.Error(err)
		}
		if !known(session, terminal) {
			t.Errorf("the new terminal is forgotten; closed by this request: %v", closing)
		}
	}
}

// The guest that knew it has ended.
func TestCloseOfAnExitedSessionDoesNotStartAStoppedSandbox(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	events, exit := make(chan guest.Event), 3
	n.Engine.HandleGuest(hostile(sends(events)))
	sb := create(t, n.Manager, "app")
	s := guest.Session{ID: "dev", PID: 7, Shell: "bash", Cwd: "/", State: guest.ProcessExited, ExitCode: &exit, StartedAt: time.Now()}
	events <- guest.Event{Type: guest.EventSession, Session: &s}
	known := func() int {
		sb, _ := n.Manager.ByID(sb.ID)
		return len(sb.Sessions)
	}
	testkit.Eventually(t, "the session is known", func() bool { return known() == 1 })
	mustStop(t, n.Manager, sb.ID)
	closed, err := n.Manager.CloseSession(t.Context(), sb.ID, "dev")
	if err != nil || closed.State != guest.ProcessExited || *closed.ExitCode != 3 {
		t.Errorf("closed %+v, %v", closed, err)
	}
	if got := stateOf(t, n.Manager, sb.ID); got != sandbox.StateStopped || known() != 0 {
		t.Errorf("the sandbox is %s, and has %d sessions", got, known())
	}
}
