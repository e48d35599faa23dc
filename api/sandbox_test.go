package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestCreateIsIdempotentByName(t *testing.T) {
	s := newServer(t, Limits{})
	body := map[string]any{
		"name": "shop", "image": "base", "size": "lite", "env": map[string]string{"A": "b"},
		"labels": map[string]string{"team": "red"}, "sleep_after": "90s", "stop_after": "1h",
	}
	made := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", body)
	if made.Name != "shop" || made.Owner != testOwner || made.Image != "base" || made.Size != "lite" || made.State != types.StateRunning ||
		made.Env["A"] != "b" || made.Labels["team"] != "red" || time.Duration(made.SleepAfter) != 90*time.Second || len(made.ID) != 12 {
		t.Errorf("made %+v", made)
	}
	again := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox", body)
	if again.ID != made.ID {
		t.Errorf("again it is %s, not %s", again.ID, made.ID)
	}
	s.refused(problem.SandboxConflict, "POST", "/sandbox", map[string]any{"name": "shop", "image": "other", "size": "lite"})
	s.refused(problem.SandboxConflict, "POST", "/sandbox", map[string]any{"name": "shop", "size": "basic"})

	for _, idOrName := range []string{"shop", string(made.ID)} {
		if got := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/"+idOrName, nil); got.ID != made.ID {
			t.Errorf("%s is %+v", idOrName, got)
		}
	}
}

func TestSandboxIsWrittenAsPromised(t *testing.T) {
	s := newServer(t, Limits{})
	got := s.do("POST", "/sandbox", `{"sleep_after":"5m","stop_after":"1500ms"}`)
	if got.status != http.StatusCreated {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	var fields map[string]any
	if err := json.Unmarshal(got.body, &fields); err != nil {
		t.Fatal(err)
	}
	for field, want := range map[string]string{"sleep_after": "300s", "stop_after": "1.5s", "state": "running"} {
		if fields[field] != want {
			t.Errorf("%s is %v, not %s", field, fields[field], want)
		}
	}
	if _, err := time.Parse(time.RFC3339, fmt.Sprint(fields["created_at"])); err != nil {
		t.Error(err)
	}
	if location := got.header.Get("Location"); location != fmt.Sprintf("/api/v1/sandbox/%s", fields["id"]) {
		t.Errorf("Location is %q", location)
	}
	if name := fmt.Sprint(fields["name"]); name == "" || name == "<nil>" {
		t.Errorf("no name was made up: %q", name)
	}
	if _, ok := fields["ports"].([]any); !ok {
		t.Errorf("ports is %v, not a list", fields["ports"])
	}
}

func TestConditionIsShownUntilItIsRight(t *testing.T) {
	s := newServer(t, Limits{})
	sb := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "web"})
	if sb.Condition != nil {
		t.Errorf("a new one has the condition %+v", sb.Condition)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/web/stop", nil)
	s.node.Engine.Fail("start", errors.New("exec format error"))
	if got := s.do("POST", "/sandbox/web/wake", ""); got.status < 500 {
		t.Fatalf("wake: status %d: %s", got.status, got.body)
	}
	sb = must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/web", nil)
	if c := sb.Condition; sb.State != types.StateStopped || c == nil || c.Code != "wake_failed" || !strings.Contains(c.Message, "exec format error") || c.Since.IsZero() {
		t.Errorf("it is %s with the condition %+v", sb.State, sb.Condition)
	}
	s.node.Engine.Fail("start", nil)
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/web/wake", nil); sb.Condition != nil {
		t.Errorf("woken, it has the condition %+v", sb.Condition)
	}
}

func TestListsPageFilterAndHideEnv(t *testing.T) {
	s := newServer(t, Limits{})
	for _, name := range []string{"c", "a", "d", "b"} {
		parity := map[string]string{"a": "odd", "c": "odd"}[name]
		must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{
			"name": name, "labels": map[string]string{"kind": "x", "parity": parity}, "env": map[string]string{"SECRET": "hush"}})
	}
	s.sleep("d")
	for _, tc := range []struct {
		query string
		want  []string
		next  bool
	}{
		{"", []string{"a", "b", "c", "d"}, false},
		{"?limit=3", []string{"a", "b", "c"}, true},
		{"?limit=4", []string{"a", "b", "c", "d"}, false},
		{"?limit=3&cursor=c", []string{"d"}, false},
		{"?label=parity%3Dodd", []string{"a", "c"}, false},
		{"?label=kind=x&label=parity=odd&limit=1", []string{"a"}, true},
		{"?label=kind=y", []string{}, false},
		{"?state=asleep", []string{"d"}, false},
		{"?state=running&label=parity=odd", []string{"a", "c"}, false},
		{"?state=stopped", []string{}, false},
	} {
		t.Run(tc.query, func(t *testing.T) {
			got := s.do("GET", "/sandbox"+tc.query, nil)
			var page types.SandboxList
			if err := json.Unmarshal(got.body, &page); err != nil || got.status != http.StatusOK {
				t.Fatalf("status %d: %s", got.status, got.body)
			}
			names := []string{}
			for _, sb := range page.Sandboxes {
				names = append(names, sb.Name)
			}
			if !slices.Equal(names, tc.want) || (page.NextCursor != "") != tc.next {
				t.Errorf("got %v, next %q", names, page.NextCursor)
			}
			if strings.Contains(string(got.body), "hush") || !strings.Contains(string(got.body), `"sandboxes":[`) {
				t.Errorf("the body is %s", got.body)
			}
		})
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/a", nil); sb.Env["SECRET"] != "hush" {
		t.Errorf("env of one sandbox is %v", sb.Env)
	}
}

func TestUpdateChangesWhatItNames(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("old")
	s.create("taken")
	sb := must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/old", map[string]any{
		"name": "new", "labels": map[string]string{"k": "v"}, "sleep_after": "0s"})
	if string(sb.ID) != id || sb.Name != "new" || sb.Labels["k"] != "v" || sb.SleepAfter != 0 {
		t.Errorf("got %+v", sb)
	}
	sb = must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/new", map[string]any{"stop_after": "2h"})
	if sb.Name != "new" || sb.Labels["k"] != "v" || time.Duration(sb.StopAfter) != 2*time.Hour {
		t.Errorf("got %+v", sb)
	}
	s.refused(problem.SandboxNotFound, "PATCH", "/sandbox/old", map[string]any{"stop_after": "2h"})
	s.refused(problem.SandboxConflict, "PATCH", "/sandbox/new", map[string]any{"name": "taken"})
	s.refused(problem.NameInvalid, "PATCH", "/sandbox/new", map[string]any{"name": "No Name"})
	s.refused(problem.RequestInvalid, "PATCH", "/sandbox/new", map[string]any{"image": "other"})
	if got := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/new", nil); got.Name != "new" || got.Labels["k"] != "v" {
		t.Errorf("refusals changed it: %+v", got)
	}
}

func TestDestroyedSandboxIsGone(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("brief")
	must[struct{}](s, http.StatusNoContent, "DELETE", "/sandbox/brief", nil)
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/"+id, nil)
	s.refused(problem.SandboxNotFound, "DELETE", "/sandbox/brief", nil)
	if n := s.node.Engine.Count(); n != 0 {
		t.Errorf("%d containers are left", n)
	}
}

func TestSleepWakeStopRespondWhenDone(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("life")
	for _, step := range []struct {
		verb string
		want types.State
	}{
		{"sleep", types.StateAsleep}, {"sleep", types.StateAsleep}, {"wake", types.StateRunning},
		{"stop", types.StateStopped}, {"wake", types.StateRunning},
	} {
		sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/"+id+"/"+step.verb, nil)
		if sb.State != step.want {
			t.Errorf("after %s it is %s", step.verb, sb.State)
		}
	}
	sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/life/hold", map[string]any{"duration": "10m"})
	if left := time.Until(sb.HoldUntil); left < 9*time.Minute || left > 10*time.Minute {
		t.Errorf("held for %s", left)
	}
	if sb = must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/life/hold", map[string]any{"duration": "0s"}); !sb.HoldUntil.IsZero() && time.Until(sb.HoldUntil) > 0 {
		t.Errorf("still held until %s", sb.HoldUntil)
	}
	for _, verb := range []string{"sleep", "wake", "stop"} {
		s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/"+verb, nil)
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/hold", map[string]any{"duration": "1m"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/life/hold", map[string]any{"duration": "1000h"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/life/hold", map[string]any{})
}

func TestSandboxInUseDoesNotSleep(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("used")
	stream := s.open("POST", "/sandbox/used/exec", map[string]any{"command": "sleep 100", "stream": true})
	stream.expect("start")
	for _, verb := range []string{"sleep", "stop"} {
		p := s.refused(problem.SandboxBusy, "POST", "/sandbox/used/"+verb, nil)
		if !strings.Contains(p.Detail, "1 request") {
			t.Errorf("detail is %q", p.Detail)
		}
	}
	stream.close()
	s.sleep(id)
}

func TestNodeReportsItsState(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("one")
	s.create("two")
	s.sleep("two")
	n := must[types.Node](s, http.StatusOK, "GET", "/node", nil)
	if n.Version != "test" || n.ID == "" || !n.Engine.OK || n.Sandboxes[types.StateRunning] != 1 || n.Sandboxes[types.StateAsleep] != 1 ||
		n.Sizes["lite"].MemoryBytes != 256<<20 || !slices.Contains(n.Images, "base") || n.EnforcedLimits == nil || n.StartedAt.IsZero() {
		t.Errorf("got %+v", n)
	}
	s.node.Engine.Fail("ping", sandbox.ErrEngineDown)
	if n = must[types.Node](s, http.StatusOK, "GET", "/node", nil); n.Engine.OK || n.Engine.Error == "" {
		t.Errorf("engine is %+v", n.Engine)
	}
}

// TestResponsesHaveTheDocumentedFields decodes responses without package types, as clients
// in other languages do.
func TestResponsesHaveTheDocumentedFields(t *testing.T) {
	s := newServer(t, Limits{})
	dir := t.TempDir()
	sandboxFields := []string{"id", "name", "owner", "image", "size", "state", "labels", "created_at", "last_active_at", "sleep_after", "stop_after", "archive_after"}
	processFields := []string{"id", "pid", "name", "state", "started_at", "log_file"}
	var process string
	for _, tc := range []struct {
		method, path, body string
		list               string // the fields are in its first entry
		fields             []string
	}{
		{"POST", "/sandbox", `{"name":"box"}`, "", sandboxFields},
		{"GET", "/sandbox", "", "sandboxes", sandboxFields},
		{"GET", "/sandbox/box", "", "", sandboxFields},
		{"PATCH", "/sandbox/box", `{}`, "", sandboxFields},
		{"POST", "/sandbox/box/sleep", "", "", sandboxFields},
		{"POST", "/sandbox/box/wake", "", "", sandboxFields},
		{"POST", "/sandbox/box/hold", `{"duration":"1m"}`, "", append([]string{"hold_until"}, sandboxFields...)},
		{"POST", "/sandbox/box/exec", `{"argv":["true"]}`, "", []string{"stdout", "stderr", "exit_code", "duration_ms", "truncated"}},
		{"PUT", "/sandbox/box/files/write", `{"path":"` + dir + `/f","content":"x"}`, "", []string{"name", "path", "type", "size", "mode", "modified_at"}},
		{"GET", "/sandbox/box/files?path=" + dir, "", "files", []string{"name", "path", "type", "size", "mode", "modified_at"}},
		{"POST", "/sandbox/box/process", `{"command":"echo x; sleep 1000"}`, "", processFields},
		{"GET", "/sandbox/box/processes", "", "processes", processFields},
		{"GET", "/sandbox/box/process/ID", "", "", processFields},
		{"DELETE", "/sandbox/box/process/ID", "", "", append([]string{"exit_code", "signal"}, processFields...)},
		{"GET", "/sandbox/box/process/ID/logs", "", "logs", []string{"stream", "data"}},
		{"POST", "/sandbox/box/expose", `{"port":3000}`, "", []string{"port", "url", "access", "wake", "host_header", "websocket"}},
		{"GET", "/sandbox/box/ports", "", "ports", []string{"port", "url", "access", "wake", "host_header", "websocket"}},
		{"GET", "/sandbox/box/events", "", "events", []string{"type", "time", "seq"}},
		{"POST", "/sandbox/box/stop", "", "", sandboxFields},
		{"GET", "/node", "", "", []string{"id", "version", "enforced_limits", "sandboxes", "leases", "waiters"}},
	} {
		got := s.do(tc.method, strings.Replace(tc.path, "/ID", "/"+process, 1), tc.body)
		var fields map[string]any
		if err := json.Unmarshal(got.body, &fields); err != nil || got.status >= 300 {
			t.Fatalf("%s %s: status %d: %s", tc.method, tc.path, got.status, got.body)
		}
		if strings.HasPrefix(fmt.Sprint(fields["id"]), "p-") {
			process = fields["id"].(string)
		}
		if strings.HasSuffix(tc.path, "/process") { // its output is in the logs below
			logs := s.open("GET", "/sandbox/box/process/"+process+"/logs", nil, "Accept", eventStreamType)
			logs.expect("stdout")
			logs.close()
		}
		if tc.list != "" {
			entries, ok := fields[tc.list].([]any)
			if !ok || len(entries) == 0 {
				t.Errorf("%s %s has no %s: %s", tc.method, tc.path, tc.list, got.body)
				continue
			}
			fields = entries[0].(map[string]any)
		}
		for _, field := range tc.fields {
			if _, ok := fields[field]; !ok {
				t.Errorf("%s %s has no field %s: %s", tc.method, tc.path, field, got.body)
			}
		}
	}
}

func TestFailuresOfTheNodeAreNotTheGuests(t *testing.T) {
	s := newServer(t, Limits{})
	must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "a"})
	for _, c := range []struct {
		err  error
		code problem.Code
	}{{syscall.EIO, problem.SleepFailed}, {&fs.PathError{Op: "open", Path: "cgroup.freeze", Err: syscall.EMFILE}, problem.DescriptorsExhausted}} {
		s.node.Freezer.Fail("freeze", c.err)
		s.refused(c.code, "POST", "/sandbox/a/sleep", nil)
	}
	s.node.Freezer.Fail("freeze", nil)
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/a/sleep", nil)
}

func TestSleepStopsASandboxWhoseMemoryDoesNotPersist(t *testing.T) {
	s := newServer(t, Limits{})
	if sb := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "job", "persist": "none"}); sb.Persist != types.PersistNone {
		t.Errorf("it persists %q", sb.Persist)
	}
	s.refused(problem.RequestInvalid, "PATCH", "/sandbox/job", map[string]any{"persist": "ram"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox", map[string]any{"persist": "ram"})
	if sb := must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/job", map[string]any{"persist": "disk"}); sb.Persist != types.PersistDisk {
		t.Errorf("it persists %q", sb.Persist)
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/job/sleep", nil); sb.State != types.StateStopped || sb.StateReason != types.StateReasonSlept {
		t.Errorf("it is %s (%s)", sb.State, sb.StateReason)
	}
	if sb := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{}); sb.Persist != types.PersistMemory {
		t.Errorf("by default it persists %q", sb.Persist)
	}
}
