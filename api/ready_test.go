package api

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestWaitRespondsWhenTheProcessIsReady(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	file := filepath.Join(t.TempDir(), "go")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process",
		map[string]any{"command": "while [ ! -e " + file + " ]; do sleep 0.01; done; printf '\\033[1mready\\033[0m in 12 ms\\n'; exec sleep 1000", "name": "web"})
	s.sleep(id)
	response := make(chan types.ReadyProcess, 1)
	go func() {
		response <- must[types.ReadyProcess](s, http.StatusOK, "POST", "/sandbox/box/process/web/wait", map[string]any{"log": `^ready in (\d+) ms$`})
	}()
	testkit.Eventually(t, "the wait wakes the sandbox", func() bool { return s.state(id) == sandbox.StateRunning })
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := testkit.Receive(t, "the wait ends", response)
	if r.Process.ID != p.ID || r.Line != "ready in 12 ms" || fmt.Sprint(r.Match) != "[ready in 12 ms 12]" || r.WaitedMS <= 0 {
		t.Errorf("got %+v", r)
	}
	again := must[types.ReadyProcess](s, http.StatusOK, "POST", "/sandbox/box/process/"+p.ID+"/wait", map[string]any{"log": "ready", "timeout": "10s"})
	if again.Line != r.Line {
		t.Errorf("a later wait: %+v", again)
	}
}

func TestWaitReportsAProcessThatIsNotReady(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"command": "echo compiling; exec sleep 1000", "name": "slow"})
	must[types.ReadyProcess](s, http.StatusOK, "POST", "/sandbox/box/process/slow/wait", map[string]any{"log": "compiling"})
	port := closedPort(t)
	p := s.refused(problem.ProcessNotReady, "POST", "/sandbox/box/process/slow/wait", map[string]any{"port": port, "timeout": "20ms"})
	if p.Process == nil || p.Process.Name != "slow" || p.Process.ID == "" || p.Process.ExitCode != nil || p.Process.Output != "compiling" ||
		!strings.Contains(p.Detail, fmt.Sprint("nothing listens on port ", port)) || !strings.Contains(p.Detail, "after 20ms") {
		t.Errorf("got %+v, %+v", p, p.Process)
	}
	if sb := must[types.Process](s, http.StatusOK, "GET", "/sandbox/box/process/slow", nil); sb.State != types.ProcessStateRunning {
		t.Errorf("it is %s", sb.State)
	}
}

func TestWaitReportsAProcessThatEnds(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	body := map[string]any{"command": "echo cannot find module >&2; exit 3", "name": "web", "ready": map[string]any{"port": closedPort(t), "timeout": "1h"}}
	p := s.refused(problem.ProcessExited, "POST", "/sandbox/box/process", body)
	if p.Process == nil || p.Process.Name != "web" || *p.Process.ExitCode != 3 || p.Process.Output != "cannot find module" || !strings.Contains(p.Detail, "exited with code 3 before it was ready") {
		t.Errorf("got %+v, %+v", p, p.Process)
	}
	if again := s.refused(problem.ProcessExited, "POST", "/sandbox/box/process/"+p.Process.ID+"/wait", map[string]any{"log": "never"}); again.Process.ID != p.Process.ID {
		t.Errorf("got %+v", again)
	}
	r := must[types.ReadyProcess](s, http.StatusOK, "POST", "/sandbox/box/process/web/wait", map[string]any{"exit": true})
	if r.Process.State != types.ProcessStateExited || *r.Process.ExitCode != 3 {
		t.Errorf("got %+v", r)
	}
}

func TestStartRespondsWhenTheProcessIsReady(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("box")
	p := must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process",
		map[string]any{"command": "echo ready; exec sleep 1000", "ready": map[string]any{"log": "^ready$"}})
	if p.State != types.ProcessStateRunning || p.ID == "" {
		t.Errorf("got %+v", p)
	}
}

// A client that disconnects ends its wait: in the guest, whose request to the process ends, and
// in the node, where it holds the sandbox awake.
func TestDisconnectEndsAWait(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	binary, err := os.Executable()
	testkit.NoError(t, "Executable", err)
	port := closedPort(t)
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{
		"argv": []string{binary}, "env": map[string]string{silentPort: strconv.Itoa(port)}, "name": "web", "ready": map[string]any{"port": port},
	})
	begin := func(condition map[string]any) (disconnect func()) {
		ctx, cancel := context.WithCancel(t.Context())
		condition["timeout"] = "1m"
		ended := make(chan error, 1)
		go func() {
			res, err := s.http.Client().Do(s.request(ctx, "POST", "/sandbox/box/process/web/wait", condition))
			if err == nil {
				res.Body.Close()
			}
			ended <- err
		}()
		return func() {
			cancel()
			testkit.ErrorIs(t, "wait", testkit.Receive(t, "the end of the request", ended), context.Canceled)
		}
	}
	printed := func(line string) {
		t.Helper()
		must[types.ReadyProcess](s, http.StatusOK, "POST", "/sandbox/box/process/web/wait", map[string]any{"log": line, "timeout": "20s"})
	}
	disconnect := begin(map[string]any{"http": map[string]any{"port": port}})
	printed("^requested$")
	disconnect()
	printed("^disconnected$")
	for _, condition := range []map[string]any{{"port": 1}, {"log": "never"}, {"exit": true}, {"http": map[string]any{"port": 1}}} {
		disconnect := begin(condition)
		s.eventually("the sandbox is held awake", func() bool { return s.node.Manager.Info(t.Context()).Leases == 1 })
		disconnect()
		s.eventually("the lease is released", func() bool { return s.node.Manager.Info(t.Context()).Leases == 0 })
	}
	s.sleep(id)
}

// silentPort is the variable with which the test's binary is an HTTP server that never responds.
const silentPort = "TEST_SILENT_PORT"

// silentMain is that server, if the variable is set. It prints when a request begins and when its
// client has disconnected.
func silentMain() {
	port := os.Getenv(silentPort)
	if port == "" {
		return
	}
	err := http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		fmt.Println("requested")
		<-r.Context().Done()
		fmt.Println("disconnected")
	}))
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// closedPort returns a port on which no process listens.
func closedPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func TestBadConditionsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	must[types.Process](s, http.StatusCreated, "POST", "/sandbox/box/process", map[string]any{"argv": []string{"sleep", "1000"}, "name": "web"})
	s.sleep(id)
	for body, hint := range map[string]string{
		`{}`:                             "0 conditions are given; send one of",
		`{"timeout":"1s"}`:               "0 conditions",
		`{"port":1,"exit":true}`:         "2 conditions",
		`{"exit":false}`:                 "0 conditions",
		`{"port":0}`:                     ">= 1",
		`{"port":65536}`:                 "65535",
		`{"port":"3000"}`:                "body.port",
		`{"log":"("}`:                    "missing closing",
		`{"log":"(?=x)"}`:                "RE2",
		`{"log":"((a{100}){100}){100}"}`: "repeat count",
		`{"log":"` + strings.Repeat("a{1000}", 20) + `"}`: "too large",
		`{"log":"` + strings.Repeat("a", 1001) + `"}`:     "1000",
		`{"http":{}}`:                                     "port",
		`{"http":{"port":1,"status":"6xx"}}`:              `"2xx"`,
		`{"http":{"port":1,"status":"2XX"}}`:              `"2xx"`,
		`{"http":{"port":1,"status":200}}`:                "string",
		`{"http":{"port":1,"path":"health"}}`:             `begin it with "/"`,
		`{"http":{"port":1,"path":"/ HTTP/1.1\r\nX: y"}}`: "percent-encode",
		`{"http":{"port":1,"path":"/é"}}`:                 "percent-encode",
		`{"exit":true,"timeout":"61m"}`:                   "at most 1h",
		`{"exit":true,"timeout":5}`:                       "body.timeout",
		`{"exit":true,"wait":1}`:                          "unknown field",
	} {
		if p := s.refused(problem.RequestInvalid, "POST", "/sandbox/box/process/web/wait", body); !strings.Contains(p.Detail, hint) {
			t.Errorf("%s: %s", body, p.Detail)
		}
	}
	p := s.refused(problem.RequestInvalid, "POST", "/sandbox/box/process", `{"command":"true","ready":{"log":"("}}`)
	if len(p.Errors) != 1 || p.Errors[0].Location != "body.ready.log" {
		t.Errorf("got %+v", p.Errors)
	}
	s.refused(problem.ProcessNotFound, "POST", "/sandbox/box/process/other/wait", `{"exit":true}`)
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/absent/process/web/wait", `{"exit":true}`)
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Errorf("it is %s", state)
	}
}

func TestPortsAreListedWithoutWaking(t *testing.T) {
	s := newServer(t, Limits{})
	s.node.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case guest.RouteHello:
			fmt.Fprintf(w, `{"protocol":%d}`, guest.ProtocolVersion)
		case guest.RouteEvents:
			fmt.Fprintln(w, `{"type":"ports","ports":[{"port":3000,"addresses":["127.0.0.1","::1"],"pid":7,"program":"node","process":"p-aaaaaaaa"},{"port":5432,"addresses":["::"]}]}`)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	id := s.create("web")
	must[types.Port](s, http.StatusOK, "POST", "/sandbox/web/expose", map[string]any{"port": 80})
	var list types.PortList
	testkit.Eventually(t, "the ports are known", func() bool {
		list = must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil)
		return len(list.Listening) == 2
	})
	testkit.Diff(t, "the ports", []types.ListeningPort{
		{Port: 3000, Addresses: []string{"127.0.0.1", "::1"}, PID: 7, Program: "node", Process: "p-aaaaaaaa"},
		{Port: 5432, Addresses: []string{"::"}},
	}, list.Listening)
	if len(list.Ports) != 1 || list.Ports[0].Port != 80 {
		t.Errorf("exposed: %+v", list.Ports)
	}
	opened := 0
	for _, ev := range must[types.EventList](s, http.StatusOK, "GET", "/sandbox/web/events", nil).Events {
		if ev.Type == types.EventTypePortOpened && ev.Listening != nil && ev.Port == ev.Listening.Port {
			opened++
		}
	}
	if opened != 2 {
		t.Errorf("%d events port_opened", opened)
	}
	s.sleep(id)
	if list := must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil); len(list.Listening) != 2 || s.state(id) != sandbox.StateAsleep {
		t.Errorf("got %+v, it is %s", list.Listening, s.state(id))
	}
	// No program listens in a sandbox that is stopped; the exposed ports stay.
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/web/stop", nil)
	if list := must[types.PortList](s, http.StatusOK, "GET", "/sandbox/web/ports", nil); list.Listening == nil || len(list.Listening) != 0 || len(list.Ports) != 1 {
		t.Errorf("after a stop: %+v", list)
	}
}
