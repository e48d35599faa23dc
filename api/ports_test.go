package api

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestExposedPortKeepsItsURL(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("web")
	p := must[types.Port](s, http.StatusOK, "POST", "/sandbox/web/expose", map[string]any{"port": 3000})
	if p.Port != 3000 || p.URL == "" || p.Access != types.AccessToken || p.Wake != types.WakeModeNavigation || p.HostHeader != types.HostHeaderAuto || p.Protocol != types.ProtocolAuto ||
		p.WebSocket != types.WebSocketModeSleep || p.CreatedAt.IsZero() {
		t.Errorf("got %+v", p)
	}
	again := must[types.Port](s, http.StatusOK, "POST", "/sandbox/web/expose", map[string]any{"port": 3000, "wake": "never", "host_header": "preserve", "protocol": "h2c", "websocket": "keep_awake"})
	if again.URL != p.URL || again.Wake != types.WakeModeNever || again.HostHeader != types.HostHeaderPreserve || again.Protocol != types.ProtocolH2C || again.WebSocket != types.WebSocketModeKeepAwake {
		t.Errorf("got %+v", again)
	}
	must[types.Port](s, http.StatusOK, "POST", "/sandbox/web/expose", map[string]any{"port": 80, "access": "public"})
	list := must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil)
	if len(list.Ports) != 2 || list.Ports[0].Port != 80 || list.Ports[1] != again {
		t.Errorf("got %+v", list)
	}
	if sb := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/web", nil); len(sb.Ports) != 2 {
		t.Errorf("the sandbox has %+v", sb.Ports)
	}
	must[struct{}](s, http.StatusNoContent, "DELETE", "/sandbox/web/ports/3000", nil)
	s.refused(problem.PortNotExposed, "DELETE", "/sandbox/web/ports/3000", nil)
	if list = must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil); len(list.Ports) != 1 {
		t.Errorf("got %+v", list)
	}
}

func TestExposeWaitsForAServer(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("web")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	s.sleep(id)
	must[types.Port](s, http.StatusOK, "POST", "/sandbox/web/expose", map[string]any{"port": port, "wait_timeout": "10s"})
	if state := s.state(id); state != sandbox.StateRunning {
		t.Errorf("it is %s", state)
	}
	listener.Close()
	s.refused(problem.PortNotReady, "POST", "/sandbox/web/expose", map[string]any{"port": port, "wait_timeout": "20ms"})
	if list := must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil); len(list.Ports) != 1 {
		t.Errorf("got %+v", list)
	}
}

func TestExposeDoesNotWaitForAServerThatHasCrashed(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("web")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	listener.Close()
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/web/process",
		map[string]any{"command": "echo cannot find module >&2; exit 3", "name": "web", "restart": "on_wake"})
	p := s.refused(problem.PortNotReady, "POST", "/sandbox/web/expose", map[string]any{"port": port, "wait_timeout": "5m"})
	if !strings.Contains(p.Detail, "process web exited with code 3") || !strings.Contains(p.Detail, "cannot find module") {
		t.Errorf("detail %q", p.Detail)
	}
}

func TestBadPortsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("web")
	for _, body := range []string{
		`{}`, `{"port":0}`, `{"port":65536}`, `{"port":-1}`, `{"port":3.5}`, `{"port":"3000"}`, `{"port":null}`,
		`{"port":1,"access":"all"}`, `{"port":1,"wake":"maybe"}`, `{"port":1,"host_header":""}`, `{"port":1,"websocket":true}`,
		`{"port":1,"wait_timeout":"6m"}`, `{"port":1,"wait_timeout":"-1s"}`, `{"port":1,"wait_timeout":5}`, `{"port":1,"token":"mine"}`,
	} {
		s.refused(problem.RequestInvalid, "POST", "/sandbox/web/expose", body)
	}
	for _, port := range []string{"0", "65536", "x", "-1"} {
		s.refused(problem.RequestInvalid, "DELETE", "/sandbox/web/ports/"+port, nil)
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/expose", map[string]any{"port": 1})
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/ports", nil)
	s.refused(problem.SandboxNotFound, "DELETE", "/sandbox/absent/ports/1", nil)
	if list := must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil); len(list.Ports) != 0 {
		t.Errorf("refusals exposed %+v", list)
	}
}
