package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

func TestProcessRunsAndEnds(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	started := s.do("POST", "/sandbox/box/process",
		map[string]any{"command": "echo up; exec sleep 1000", "name": "web", "restart": "on_wake", "cwd": "/", "env": map[string]string{"A": "b"}})
	var p types.Process
	if err := json.Unmarshal(started.body, &p); err != nil || started.status != http.StatusCreated {
		t.Fatalf("got %d %s", started.status, started.body)
	}
	if got := must[types.Process](s, http.StatusOK, "GET", strings.TrimPrefix(started.header.Get("Location"), Prefix), nil); got.ID != p.ID {
		t.Errorf("Location %s is %+v", started.header.Get("Location"), got)
	}
	if p.PID <= 0 || p.Name != "web" || p.State != types.ProcessStateRunning || p.Restart != types.RestartOnWake || p.LogFile == "" || p.StartedAt.IsZero() {
		t.Errorf("got %+v", p)
	}
	path := "/sandbox/box/process/" + p.ID
	if got := must[types.Process](s, http.StatusOK, "GET", path, nil); got.PID != p.PID || got.Name != "web" {
		t.Errorf("got %+v", got)
	}
	if list := must[types.ProcessList](s, http.StatusOK, "GET", "/sandbox/box/processes", nil); len(list.Processes) != 1 || list.Processes[0].PID != p.PID {
		t.Errorf("got %+v", list)
	}
	ended := must[types.Process](s, http.StatusOK, "DELETE", path, nil)
	if ended.State != types.ProcessStateExited || ended.ExitCode == nil || *ended.ExitCode != 143 || ended.Signal != "SIGTERM" {
		t.Errorf("got %+v", ended)
	}
	if got := must[types.Process](s, http.StatusOK, "GET", path, nil); got.State != types.ProcessStateExited {
		t.Errorf("got %+v", got)
	}
}

func TestNameStandsForAProcessInEveryRoute(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	start := func(command string) types.Process {
		return must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": command, "name": "web"})
	}
	first := start("echo first")
	s.eventually("the first has ended", func() bool {
		return must[types.Process](s, http.StatusOK, "GET", "/sandbox/box/process/"+first.ID, nil).State == types.ProcessStateExited
	})
	second := start("echo second; exec sleep 1000")
	if second.ID == first.ID {
		t.Fatalf("two processes have the id %s", first.ID)
	}
	if got := must[types.Process](s, http.StatusOK, "GET", "/sandbox/box/process/web", nil); got.ID != second.ID {
		t.Errorf("web is %+v, not the one that runs", got)
	}
	logs := s.open("GET", "/sandbox/box/process/web/logs", nil, "Accept", eventStreamType)
	if out := parse[types.Output](t, logs.expect("stdout")); out.Data != "second\n" {
		t.Errorf("the log of web has %+v", out)
	}
	if got := must[types.Process](s, http.StatusOK, "DELETE", "/sandbox/box/process/web", nil); got.ID != second.ID || got.Signal != "SIGTERM" {
		t.Errorf("ended %+v", got)
	}
	if got := must[types.Log](s, http.StatusOK, "GET", "/sandbox/box/process/"+first.ID+"/logs", nil); len(got.Logs) != 1 || got.Logs[0].Data != "first\n" {
		t.Errorf("the log of the first has %+v", got)
	}
}

func TestSignalIsOnlyDelivered(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process",
		map[string]any{"command": `trap 'echo hup' HUP; echo ready; while :; do sleep 0.01; done`})
	logs := s.open("GET", "/sandbox/box/process/"+p.ID+"/logs", nil, "Accept", eventStreamType)
	logs.expect("stdout")
	got := must[types.Process](s, http.StatusOK, "DELETE", "/sandbox/box/process/"+p.ID+"?signal=hup", nil)
	if got.State != types.ProcessStateRunning {
		t.Errorf("got %+v", got)
	}
	if out := parse[types.Output](t, logs.expect("stdout")); out.Data != "hup\n" {
		t.Errorf("got %+v", out)
	}
	must[types.Process](s, http.StatusOK, "DELETE", "/sandbox/box/process/"+p.ID+"?signal=SIGKILL", nil)
	exit := parse[types.Process](t, logs.expect("exit"))
	if exit.Signal != "SIGKILL" || exit.PID != p.PID {
		t.Errorf("got %+v", exit)
	}
	logs.expectEnd()
}

func TestLogsAreKeptInOrder(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": `printf 'héllo\n'; printf '\377' >&2; exit 4`})
	path := "/sandbox/box/process/" + p.ID + "/logs"
	follow := s.open("GET", path, nil, "Accept", eventStreamType)
	var exit types.Process
	for {
		ev, ok := follow.next()
		if !ok {
			t.Fatal("the logs ended without exit")
		}
		if ev.name == "exit" {
			exit = parse[types.Process](t, ev)
			break
		}
	}
	if exit.ExitCode == nil || *exit.ExitCode != 4 {
		t.Errorf("got %+v", exit)
	}
	logs := must[types.Log](s, http.StatusOK, "GET", path, nil)
	got := map[types.LogStream]types.Output{}
	for _, chunk := range logs.Logs {
		got[chunk.Stream] = chunk.Output
	}
	if got["stdout"] != (types.Output{Data: "héllo\n"}) || got["stderr"] != (types.Output{Data: "/w==", Encoding: "base64"}) || logs.Truncated {
		t.Errorf("got %+v", logs)
	}
	head := s.do("HEAD", path, nil, "Accept", eventStreamType)
	if head.status != http.StatusOK || len(head.body) > 0 {
		t.Errorf("HEAD: status %d: %q", head.status, head.body)
	}
}

func TestClientThatLeavesLogsLeaksNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo x; exec sleep 1000"})
	logs := s.open("GET", "/sandbox/box/process/"+p.ID+"/logs", nil, "Accept", eventStreamType)
	logs.expect("stdout")
	s.refused(problem.SandboxBusy, "POST", "/sandbox/box/sleep", nil)
	logs.close()
	s.sleep(id)
	if n := s.api.streams.pool.Used(); n != 0 {
		t.Errorf("%d streams are held", n)
	}
}

func TestForceSleepsAndStopsWhileACallIsUnderWay(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo x; exec sleep 1000"})
	logs := s.open("GET", "/sandbox/box/process/"+p.ID+"/logs", nil, "Accept", eventStreamType)
	logs.expect("stdout")
	for _, route := range []string{"sleep", "stop"} {
		if p := s.refused(problem.SandboxBusy, "POST", "/sandbox/box/"+route+"?force=false", nil); !strings.Contains(p.Detail, "force=true") {
			t.Errorf("%s: detail %q does not offer force", route, p.Detail)
		}
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/sleep?force=true", nil); sb.State != types.StateAsleep {
		t.Errorf("forced to sleep it is %s", sb.State)
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop?force=true", nil); sb.State != types.StateStopped {
		t.Errorf("forced to stop it is %s", sb.State)
	}
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/sleep?force=maybe", nil)
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/wake?force=true", nil)
}

func TestBadProcessRequestsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for body, code := range map[string]problem.Code{
		`{}`:                                    problem.RequestInvalid,
		`{"command":"a","argv":["b"]}`:          problem.RequestInvalid,
		`{"command":"a","restart":"sometimes"}`: problem.RequestInvalid,
		`{"command":"a","name":7}`:              problem.RequestInvalid,
		`{"command":"a","stream":true}`:         problem.RequestInvalid,
		`{"argv":["no-such-command-anywhere"]}`: problem.CommandNotFound,
		`{"command":"a","name":"` + strings.Repeat("x", 200) + `"}`: problem.RequestInvalid,
	} {
		s.refused(code, "POST", "/sandbox/box/process", body)
	}
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"sleep 1000","name":"one"}`)
	s.refused(problem.ProcessExists, "POST", "/sandbox/box/process", `{"command":"sleep 1000","name":"one"}`)
	for _, path := range []string{"/process/p-aaaaaaaa", "/process/two/logs", "/process/p-aaaaaaaa/logs"} {
		s.refused(problem.ProcessNotFound, "GET", "/sandbox/box"+path, nil)
		s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent"+path, nil)
	}
	s.refused(problem.ProcessNotFound, "DELETE", "/sandbox/box/process/p-aaaaaaaa", nil)
	one := must[types.ProcessList](s, http.StatusOK, "GET", "/sandbox/box/processes", nil).Processes[0]
	s.refused(problem.RequestInvalid, "DELETE", "/sandbox/box/process/one?signal=SIGNONSENSE", nil)
	// The routes refuse pids: after a wake the same pid may belong to another process.
	for _, name := range []string{"0", "-1", "x", "1.5", strconv.Itoa(one.PID), "%2e%2e", "p-"} {
		for _, p := range []problem.Problem{
			s.refused(problem.ProcessNotFound, "GET", "/sandbox/box/process/"+name, nil),
			s.refused(problem.ProcessNotFound, "DELETE", "/sandbox/box/process/"+name, nil),
			s.refused(problem.ProcessNotFound, "GET", "/sandbox/box/process/"+name+"/logs", nil),
		} {
			if !strings.Contains(p.Detail, "one ("+one.ID+")") {
				t.Errorf("detail is %q", p.Detail)
			}
		}
	}
	s.refused(problem.RequestInvalid, "GET", "/sandbox/box/process/"+strings.Repeat("x", 65), nil)
	s.refused(problem.NameInvalid, "POST", "/sandbox/box/process", `{"command":"true","name":"p-k3f9x2m7"}`)
	s.refused(problem.RequestInvalid, "GET", "/sandbox/box/process/one/logs?follow=true", nil)
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/processes", nil)
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/process", `{"command":"true"}`)
}

func TestTooManyProcessesAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for range 256 { // as many as a guest runs
		must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"argv":["sleep","1000"]}`)
	}
	s.refused(problem.ProcessLimitExceeded, "POST", "/sandbox/box/process", `{"argv":["sleep","1000"]}`)
}

// A process that replaced the guest may send this much.
func TestLogsWithoutEndAreCut(t *testing.T) {
	s := newServer(t, Limits{})
	s.node.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == guest.RouteHello:
			fmt.Fprintf(w, `{"protocol":%d}`, guest.ProtocolVersion)
		case strings.HasSuffix(r.URL.Path, guest.SuffixLogs):
			frame := bytes.Repeat([]byte("x"), guest.FrameHeader+guest.MaxFrame)
			guest.PutFrameHeader(frame, guest.FrameStdout, guest.MaxFrame)
			for err := error(nil); err == nil; {
				_, err = w.Write(frame)
			}
		case r.URL.Path == guest.RouteProcess:
			io.WriteString(w, `{"pid":1,"id":"p-aaaaaaaa","name":"web","state":"running","restart":"never"}`)
		default:
			http.NotFound(w, r)
		}
	}))
	s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"true"}`)
	if p.ID == "p-aaaaaaaa" {
		t.Error("the guest decides on the id")
	}
	logs := must[types.Log](s, http.StatusOK, "GET", "/sandbox/box/process/web/logs", nil)
	if len(logs.Logs) != 1 || len(logs.Logs[0].Data) != maxLogs-chunkCost || !logs.Truncated {
		t.Errorf("%d chunks, truncated %v", len(logs.Logs), logs.Truncated)
	}
}
