package api

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func TestSessionKeepsItsState(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	dir := t.TempDir()
	opened := s.do("POST", "/sandbox/box/sessions", map[string]any{"id": "dev", "cwd": dir, "env": map[string]string{"A": "1"}})
	var session types.Session
	if err := json.Unmarshal(opened.body, &session); err != nil || opened.status != http.StatusCreated {
		t.Fatalf("got %d %s", opened.status, opened.body)
	}
	if session.ID != "dev" || session.Cwd != dir || session.State != types.ProcessStateRunning || session.PID <= 0 || session.StartedAt.IsZero() {
		t.Errorf("got %+v", session)
	}
	if got := must[types.Session](s, http.StatusOK, "GET", strings.TrimPrefix(opened.header.Get("Location"), Prefix), nil); got.PID != session.PID {
		t.Errorf("Location %s is %+v", opened.header.Get("Location"), got)
	}
	exec := func(command string) types.ExecResult {
		t.Helper()
		return must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": command, "session": "dev"})
	}
	if got := exec("mkdir sub; cd sub; A=2; false"); got.ExitCode != 1 {
		t.Errorf("got %+v", got)
	}
	if got := exec("pwd; printenv A"); got.Stdout != dir+"/sub\n2\n" {
		t.Errorf("got %+v", got)
	}
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "echo $A", "session": "dev", "stream": true})
	if start := parse[types.ExecStart](t, stream.expect("start")); start.PID != session.PID {
		t.Errorf("started %+v", start)
	}
	if out := parse[types.Output](t, stream.expect("stdout")); out.Data != "2\n" {
		t.Errorf("got %+v", out)
	}
	if end := parse[types.ExecComplete](t, stream.expect("complete")); end.ExitCode != 0 {
		t.Errorf("got %+v", end)
	}
	if list := must[types.SessionList](s, http.StatusOK, "GET", "/sandbox/box/sessions", nil); len(list.Sessions) != 1 || list.Sessions[0].PID != session.PID {
		t.Errorf("got %+v", list)
	}
	if got := must[types.Session](s, http.StatusOK, "DELETE", "/sandbox/box/sessions/dev", nil); got.State != types.ProcessStateExited {
		t.Errorf("got %+v", got)
	}
	s.refused(problem.SessionNotFound, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": "dev"})
}

func TestTimeoutAndInterruptKeepTheSession(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev"})
	got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "x=1; sleep 1000; echo after", "session": "dev", "timeout": "100ms"})
	if !got.TimedOut || got.ExitCode != 130 || got.Stdout != "" {
		t.Errorf("got %+v", got)
	}
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "echo $x; sleep 1000; echo after", "session": "dev", "stream": true})
	stream.expect("start")
	if out := parse[types.Output](t, stream.expect("stdout")); out.Data != "1\n" {
		t.Errorf("got %+v", out)
	}
	must[types.Session](s, http.StatusOK, "POST", "/sandbox/box/sessions/dev/interrupt", nil)
	if end := parse[types.ExecComplete](t, stream.expect("complete")); end.ExitCode != 130 || end.TimedOut {
		t.Errorf("got %+v", end)
	}
	if got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "echo $x", "session": "dev"}); got.Stdout != "1\n" {
		t.Errorf("got %+v", got)
	}
}

func TestEndedSessionIsGoneWithTheReason(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, id := range []string{"dev", "other"} {
		must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": id})
	}
	if got := must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "exit 3", "session": "dev"}); got.ExitCode != 3 {
		t.Errorf("got %+v", got)
	}
	exec := map[string]any{"command": "true", "session": "dev"}
	if p := s.refused(problem.SessionLost, "POST", "/sandbox/box/exec", exec); !strings.Contains(p.Detail, `exited with code 3 in the command "exit 3"`) {
		t.Errorf("got %+v", p)
	}
	s.refused(problem.SessionLost, "POST", "/sandbox/box/sessions/dev/interrupt", nil)
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	for _, session := range []string{"dev", "other"} {
		p := s.refused(problem.SessionLost, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": session})
		if want := map[string]string{"dev": "code 3", "other": "its sandbox stopped (requested)"}[session]; !strings.Contains(p.Detail, want) {
			t.Errorf("got %q, not %q", p.Detail, want)
		}
	}
	s.refused(problem.SessionNotFound, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": "none"})
	address := s.signTerminal(map[string]any{})
	for session, want := range map[string]problem.Code{"dev": problem.SessionLost, "other": problem.SessionLost, "none": problem.SessionNotFound} {
		_, resp, err := websocket.Dial(t.Context(), s.http.URL+Prefix+"/sandbox/box/terminal?session="+session, &websocket.DialOptions{
			HTTPClient: s.http.Client(), HTTPHeader: http.Header{"Authorization": {"Bearer " + testToken}},
		})
		if resp == nil || resp.StatusCode != want.Definition().Status || resp.Header.Get(problem.HeaderError) != want.String() {
			t.Errorf("a terminal with the session %s: %v, %+v", session, err, resp)
		}
		w, _ := s.dialSigned(address+"&session="+session, "")
		w.expectFailed(want, session)
	}
	if state := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil).State; state != types.StateStopped {
		t.Errorf("the refused requests left it %s", state)
	}
	got := must[types.Session](s, http.StatusOK, "GET", "/sandbox/box/sessions/other", nil)
	if got.State != types.ProcessStateLost || got.Reason != "requested" || got.ExitCode != nil {
		t.Errorf("got %+v", got)
	}
	must[types.Session](s, http.StatusOK, "DELETE", "/sandbox/box/sessions/other", nil)
	if state := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil).State; state != types.StateStopped {
		t.Errorf("removing a lost session left it %s", state)
	}
	// The id can be used again.
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev"})
	must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", exec)
}

func TestSessionRefusals(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev"})
	s.refused(problem.SessionExists, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/sessions", map[string]any{"id": "a/b"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/sessions", map[string]any{"cwd": "relative"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/sessions", map[string]any{"env": map[string]string{"A=B": "c"}})
	s.refused(problem.PathNotFound, "POST", "/sandbox/box/sessions", map[string]any{"cwd": "/no/such"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": "dev", "cwd": "/"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": "dev", "env": map[string]string{"A": "b"}})
	s.refused(problem.SessionNotFound, "GET", "/sandbox/box/sessions/none", nil)
	s.refused(problem.SessionNotFound, "DELETE", "/sandbox/box/sessions/none", nil)
	stream := s.open("POST", "/sandbox/box/exec", map[string]any{"command": "sleep 1000", "session": "dev", "stream": true})
	stream.expect("start")
	s.refused(problem.SessionBusy, "POST", "/sandbox/box/exec", map[string]any{"command": "true", "session": "dev", "timeout": "50ms"})
}

func TestTerminalStartsInTheSurroundingsOfASession(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev", "env": map[string]string{"A": "1"}})
	must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", map[string]any{"command": "cd /usr; export B=2", "session": "dev"})
	query := terminalQuery("id", "main", "session", "dev", "command", `pwd; echo "$A $B"; exec cat`)
	const want = "/usr\r\n1 2\r\n"
	s.dialTerminal(query).sees(want)
	must[types.Session](s, http.StatusOK, "DELETE", "/sandbox/box/sessions/dev", nil)
	s.dialTerminal(query).sees(want) // joins it, without the session
	w, _ := s.dialSigned(s.signTerminal(map[string]any{})+"&session=dev", "")
	w.expectFailed(problem.SessionNotFound, "dev")
}
