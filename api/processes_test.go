package api

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestProcessRunsAndEnds(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process",
		map[string]any{"command": "echo up; exec sleep 1000", "name": "web", "restart": "on-wake", "cwd": "/", "env": map[string]string{"A": "b"}})
	if p.PID <= 0 || p.Name != "web" || p.State != guest.ProcessRunning || p.Restart != guest.RestartOnWake || p.LogFile == "" || p.StartedAt.IsZero() {
		t.Errorf("got %+v", p)
	}
	path := fmt.Sprintf("/sandbox/box/process/%d", p.PID)
	if got := must[guest.Process](s, http.StatusOK, "GET", path, nil); got.PID != p.PID || got.Name != "web" {
		t.Errorf("got %+v", got)
	}
	if list := must[ProcessList](s, http.StatusOK, "GET", "/sandbox/box/processes", nil); len(list.Processes) != 1 || list.Processes[0].PID != p.PID {
		t.Errorf("got %+v", list)
	}
	ended := must[guest.Process](s, http.StatusOK, "DELETE", path, nil)
	if ended.State != guest.ProcessExited || ended.ExitCode == nil || *ended.ExitCode != 143 || ended.Signal != "SIGTERM" {
		t.Errorf("got %+v", ended)
	}
	if got := must[guest.Process](s, http.StatusOK, "GET", path, nil); got.State != guest.ProcessExited {
		t.Errorf("got %+v", got)
	}
}

func TestSignalIsOnlyDelivered(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process",
		map[string]any{"command": `trap 'echo hup' HUP; echo ready; while :; do sleep 0.01; done`})
	logs := s.open("GET", fmt.Sprintf("/sandbox/box/process/%d/logs?follow=true", p.PID), nil)
	logs.expect("stdout")
	got := must[guest.Process](s, http.StatusOK, "DELETE", fmt.Sprintf("/sandbox/box/process/%d?signal=hup", p.PID), nil)
	if got.State != guest.ProcessRunning {
		t.Errorf("got %+v", got)
	}
	if out := parse[Output](t, logs.expect("stdout")); out.Data != "hup\n" {
		t.Errorf("got %+v", out)
	}
	must[guest.Process](s, http.StatusOK, "DELETE", fmt.Sprintf("/sandbox/box/process/%d?signal=SIGKILL", p.PID), nil)
	exit := parse[guest.Process](t, logs.expect("exit"))
	if exit.Signal != "SIGKILL" || exit.PID != p.PID {
		t.Errorf("got %+v", exit)
	}
	logs.expectEnd()
}

func TestLogsAreKeptInOrder(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": `printf 'héllo\n'; printf '\377' >&2; exit 4`})
	path := fmt.Sprintf("/sandbox/box/process/%d/logs", p.PID)
	follow := s.open("GET", path+"?follow=true", nil)
	var exit guest.Process
	for {
		ev, ok := follow.next()
		if !ok {
			t.Fatal("the logs ended without exit")
		}
		if ev.name == "exit" {
			exit = parse[guest.Process](t, ev)
			break
		}
	}
	if exit.ExitCode == nil || *exit.ExitCode != 4 {
		t.Errorf("got %+v", exit)
	}
	logs := must[Logs](s, http.StatusOK, "GET", path, nil)
	got := map[string]Output{}
	for _, chunk := range logs.Logs {
		got[chunk.Stream] = chunk.Output
	}
	if got["stdout"] != (Output{Data: "héllo\n"}) || got["stderr"] != (Output{Data: "/w==", Encoding: "base64"}) || logs.Truncated {
		t.Errorf("got %+v", logs)
	}
	head := s.do("HEAD", path+"?follow=true", nil)
	if head.status != http.StatusOK || len(head.body) > 0 {
		t.Errorf("HEAD: status %d: %q", head.status, head.body)
	}
}

func TestClientThatLeavesLogsLeaksNothing(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	p := must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo x; exec sleep 1000"})
	logs := s.open("GET", fmt.Sprintf("/sandbox/box/process/%d/logs?follow=1", p.PID), nil)
	logs.expect("stdout")
	s.refused(CodeBusy, "POST", "/sandbox/box/sleep", nil)
	logs.close()
	s.sleep(id)
	if n := s.api.streams.held.Load(); n != 0 {
		t.Errorf("%d streams are held", n)
	}
}

func TestForceSleepsAndStopsWhileACallIsUnderWay(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo x; exec sleep 1000"})
	logs := s.open("GET", fmt.Sprintf("/sandbox/box/process/%d/logs?follow=1", p.PID), nil)
	logs.expect("stdout")
	for _, route := range []string{"sleep", "stop"} {
		if p := s.refused(CodeBusy, "POST", "/sandbox/box/"+route+"?force=false", nil); !strings.Contains(p.Detail, "force=true") {
			t.Errorf("%s: detail %q does not offer force", route, p.Detail)
		}
	}
	if sb := must[Sandbox](s, http.StatusOK, "POST", "/sandbox/box/sleep?force=true", nil); sb.State != sandbox.StateAsleep {
		t.Errorf("forced to sleep it is %s", sb.State)
	}
	if sb := must[Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop?force=true", nil); sb.State != sandbox.StateStopped {
		t.Errorf("forced to stop it is %s", sb.State)
	}
	s.refused(CodeInvalidRequest, "POST", "/sandbox/box/sleep?force=maybe", nil)
	s.refused(CodeInvalidRequest, "POST", "/sandbox/box/wake?force=true", nil)
}

func TestBadProcessRequestsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for body, code := range map[string]Code{
		`{}`:                                    CodeInvalidRequest,
		`{"command":"a","argv":["b"]}`:          CodeInvalidRequest,
		`{"command":"a","restart":"sometimes"}`: CodeInvalidRequest,
		`{"command":"a","name":7}`:              CodeInvalidRequest,
		`{"command":"a","stream":true}`:         CodeInvalidRequest,
		`{"argv":["no-such-command-anywhere"]}`: CodeCommandNotFound,
		`{"command":"a","name":"` + strings.Repeat("x", 200) + `"}`: CodeInvalidRequest,
	} {
		s.refused(code, "POST", "/sandbox/box/process", body)
	}
	must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"command":"sleep 1000","name":"one"}`)
	s.refused(CodeAlreadyExists, "POST", "/sandbox/box/process", `{"command":"sleep 1000","name":"one"}`)
	for _, path := range []string{"/process/999999", "/process/999999/logs", "/process/999999/logs?follow=true"} {
		s.refused(CodeProcessNotFound, "GET", "/sandbox/box"+path, nil)
		s.refused(CodeSandboxNotFound, "GET", "/sandbox/nobody"+path, nil)
	}
	s.refused(CodeProcessNotFound, "DELETE", "/sandbox/box/process/999999", nil)
	pid := must[ProcessList](s, http.StatusOK, "GET", "/sandbox/box/processes", nil).Processes[0].PID
	s.refused(CodeInvalidRequest, "DELETE", fmt.Sprintf("/sandbox/box/process/%d?signal=SIGNONSENSE", pid), nil)
	for _, pid := range []string{"0", "-1", "x", "1.5", "99999999999999999999"} {
		s.refused(CodeInvalidRequest, "GET", "/sandbox/box/process/"+pid, nil)
		s.refused(CodeInvalidRequest, "DELETE", "/sandbox/box/process/"+pid, nil)
		s.refused(CodeInvalidRequest, "GET", "/sandbox/box/process/"+pid+"/logs", nil)
	}
	s.refused(CodeInvalidRequest, "GET", fmt.Sprintf("/sandbox/box/process/%d/logs?follow=maybe", pid), nil)
	s.refused(CodeSandboxNotFound, "GET", "/sandbox/nobody/processes", nil)
	s.refused(CodeSandboxNotFound, "POST", "/sandbox/nobody/process", `{"command":"true"}`)
}

func TestTooManyProcessesIsSaid(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	for range 256 { // as many as a guest runs
		must[guest.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", `{"argv":["sleep","1000"]}`)
	}
	s.refused(CodeTooManyProcesses, "POST", "/sandbox/box/process", `{"argv":["sleep","1000"]}`)
}

// A process in the sandbox that took the guest's place may say so much.
func TestLogsWithoutEndAreCut(t *testing.T) {
	s := newServer(t, Limits{})
	s.node.Engine.Answer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == guest.RouteHello:
			fmt.Fprintf(w, `{"protocol":%d}`, guest.ProtocolVersion)
		case strings.HasSuffix(r.URL.Path, guest.SuffixLogs):
			frame := bytes.Repeat([]byte("x"), guest.FrameHeader+guest.MaxFrame)
			guest.PutFrameHeader(frame, guest.FrameStdout, guest.MaxFrame)
			for err := error(nil); err == nil; {
				_, err = w.Write(frame)
			}
		default:
			http.NotFound(w, r)
		}
	}))
	s.create("box")
	logs := must[Logs](s, http.StatusOK, "GET", "/sandbox/box/process/1/logs", nil)
	if len(logs.Logs) != 1 || len(logs.Logs[0].Data) != maxLogs || !logs.Truncated {
		t.Errorf("%d chunks, truncated %v", len(logs.Logs), logs.Truncated)
	}
}
