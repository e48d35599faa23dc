package api

import (
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
)

func TestEnvironmentAppliesToLaterCommands(t *testing.T) {
	s := newServer(t, Limits{})
	must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "box", "env": map[string]string{"A": "created", "B": "created"}})
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "before"})
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	got := must[types.Environment](s, http.StatusOK, "PATCH", "/sandbox/box/env", map[string]any{"env": map[string]any{"A": "changed", "B": nil, "C": "new", "D": nil}})
	want := map[string]string{"A": "changed", "C": "new"}
	if !maps.Equal(got.Env, want) {
		t.Errorf("got %+v", got)
	}
	if got := must[types.Environment](s, http.StatusOK, "GET", "/sandbox/box/env", nil); !maps.Equal(got.Env, want) {
		t.Errorf("got %+v", got)
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil); !maps.Equal(sb.Env, want) || sb.State != types.StateStopped {
		t.Errorf("got %+v in state %s", sb.Env, sb.State)
	}
	const show = `echo "[$A][$B][$C]"`
	exec := func(body map[string]any) string {
		t.Helper()
		body["command"] = show
		return must[types.ExecResult](s, http.StatusOK, "POST", "/sandbox/box/exec", body).Stdout
	}
	if got := exec(map[string]any{}); got != "[changed][][new]\n" {
		t.Errorf("a command printed %q", got)
	}
	if got := exec(map[string]any{"env": map[string]string{"A": "own", "B": "own"}}); got != "[own][own][new]\n" {
		t.Errorf("a command with variables of its own printed %q", got)
	}
	must[types.Session](s, http.StatusCreated, "POST", "/sandbox/box/sessions", map[string]any{"id": "dev", "env": map[string]string{"C": "own"}})
	if got := exec(map[string]any{"session": "dev"}); got != "[changed][][own]\n" {
		t.Errorf("a session printed %q", got)
	}
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": show, "name": "p"})
	s.eventually("the process has printed it", func() bool {
		log := must[types.Log](s, http.StatusOK, "GET", "/sandbox/box/process/p/logs", nil)
		return len(log.Logs) == 1 && log.Logs[0].Data == "[changed][][new]\n"
	})
	// A session that is open keeps its environment.
	must[types.Environment](s, http.StatusOK, "PATCH", "/sandbox/box/env", map[string]any{"env": map[string]any{"A": nil, "B": "again", "C": nil}})
	if got := exec(map[string]any{"session": "dev"}); got != "[changed][][own]\n" {
		t.Errorf("the session printed %q", got)
	}
	if got := exec(map[string]any{}); got != "[][again][]\n" {
		t.Errorf("a command printed %q", got)
	}
}

func TestEnvironmentOfAColdWake(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": `echo "[$A]"; sleep 1000`, "name": "web", "restart": "on_wake"})
	must[types.Environment](s, http.StatusOK, "PATCH", "/sandbox/box/env", map[string]any{"env": map[string]any{"A": "later"}})
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/wake", nil)
	s.eventually("the declared process has the new environment", func() bool {
		log := must[types.Log](s, http.StatusOK, "GET", "/sandbox/box/process/web/logs", nil)
		return len(log.Logs) > 0 && strings.Contains(log.Logs[len(log.Logs)-1].Data, "[later]")
	})
}

func TestEnvironmentIsBounded(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for _, env := range []map[string]any{{"A=B": "c"}, {"": "c"}, {"1A": "c"}, {"A": "\x00"}, {"A": strings.Repeat("x", 65<<10)}} {
		s.refused(problem.RequestInvalid, "PATCH", "/sandbox/box/env", map[string]any{"env": env})
	}
	s.refused(problem.RequestInvalid, "PATCH", "/sandbox/box/env", map[string]any{"env": map[string]any{"A": 1}})
	s.refused(problem.RequestInvalid, "PATCH", "/sandbox/box/env", map[string]any{})
	if got := must[types.Environment](s, http.StatusOK, "GET", "/sandbox/box/env", nil); len(got.Env) != 0 {
		t.Errorf("got %+v", got)
	}
}
