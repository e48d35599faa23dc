package sandbox_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// reportingGuest sends the lists of ports that come through the channel.
func reportingGuest(n *sandboxtest.Node) chan<- []guest.Listening {
	lists := make(chan []guest.Listening)
	n.Engine.HandleGuest(hostile(func(w http.ResponseWriter, r *http.Request) {
		lines := json.NewEncoder(w)
		for http.NewResponseController(w).Flush() == nil {
			select {
			case list := <-lists:
				_ = lines.Encode(guest.Event{Type: guest.EventPorts, Ports: list})
			case <-r.Context().Done():
				return
			}
		}
	}))
	return lists
}

func listening(port uint16, pid int) guest.Listening {
	return guest.Listening{Port: port, Addresses: []string{"127.0.0.1"}, PID: pid, Program: "node"}
}

func TestPortsAreStoredAsLastKnown(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	lists := reportingGuest(n)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	ports := func() (list []uint16) {
		sb, _ := n.Manager.ByID(sb.ID)
		for _, l := range sb.Listening {
			list = append(list, l.Port)
		}
		return list
	}
	lists <- []guest.Listening{listening(3000, 7)}
	if ev := nextEvent(t, events, sandbox.EventPortOpened); ev.Port != 3000 || ev.Listening == nil || ev.Listening.PID != 7 {
		t.Errorf("got %+v", ev)
	}
	// The same, with more addresses, and another port.
	more := listening(3000, 7)
	more.Addresses = append(more.Addresses, "::1")
	lists <- []guest.Listening{more, listening(5173, 0)}
	if ev := nextEvent(t, events, sandbox.EventPortOpened); ev.Port != 5173 {
		t.Errorf("got %+v", ev)
	}
	// Another process has one of them.
	lists <- []guest.Listening{listening(3000, 8), listening(5173, 9)}
	if ev := nextEvent(t, events, sandbox.EventPortClosed); ev.Port != 3000 || ev.Listening.PID != 7 {
		t.Errorf("got %+v", ev)
	}
	if ev := nextEvent(t, events, sandbox.EventPortOpened); ev.Port != 3000 || ev.Listening.PID != 8 {
		t.Errorf("got %+v", ev)
	}
	mustSleep(t, n.Manager, sb.ID)
	if got := ports(); len(got) != 2 {
		t.Errorf("asleep it has %v", got)
	}
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Restart(t)
	if got := ports(); len(got) != 2 {
		t.Errorf("after a restart of the node it has %v", got)
	}
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := ports(); len(got) != 0 {
		t.Errorf("stopped it has %v", got)
	}
}

func TestPortsInALoopDoNotFillTheTimeline(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	lists := reportingGuest(n)
	sb := create(t, n.Manager, "app")
	began := time.Now()
	const loops = 400
	for i := range loops {
		lists <- []guest.Listening{listening(uint16(3000+i), 7)}
	}
	testkit.Eventually(t, "the last port is stored", func() bool {
		sb, _ := n.Manager.ByID(sb.ID)
		return len(sb.Listening) == 1 && sb.Listening[0].Port == 3000+loops-1
	})
	events, err := n.Manager.Events(t.Context(), sb.ID, 0, 2*loops)
	if err != nil {
		t.Fatal(err)
	}
	if most := 100 + int(time.Since(began)/time.Second) + 2; len(events) > most+2 {
		t.Errorf("%d events", len(events))
	}
}

func TestHostilePortsAreRefused(t *testing.T) {
	for name, line := range map[string]string{
		"port 0":           `{"type":"ports","ports":[{"port":0}]}`,
		"address":          `{"type":"ports","ports":[{"port":1,"addresses":["x"]}]}`,
		"zone":             `{"type":"ports","ports":[{"port":1,"addresses":["fe80::1%x"]}]}`,
		"many addresses":   `{"type":"ports","ports":[{"port":1,"addresses":["::","::","::","::","::"]}]}`,
		"long program":     `{"type":"ports","ports":[{"port":1,"program":"` + strings.Repeat("x", 65) + `"}]}`,
		"negative pid":     `{"type":"ports","ports":[{"port":1,"pid":-1}]}`,
		"unusable process": `{"type":"ports","ports":[{"port":1,"process":"../x"}]}`,
		"order":            `{"type":"ports","ports":[{"port":2},{"port":1}]}`,
		"many":             `{"type":"ports","ports":[` + strings.TrimSuffix(strings.Repeat(`{"port":1},`, guest.MaxListening+1), ",") + `]}`,
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			g := hostile(says(line))
			n.Engine.HandleGuest(g)
			sb := create(t, n.Manager, "app")
			testkit.Eventually(t, "its stream is closed", func() bool { return g.streams.Load() >= 2 })
			if sb, _ := n.Manager.ByID(sb.ID); len(sb.Listening) != 0 {
				t.Errorf("stored %+v", sb.Listening)
			}
		})
	}
}

func TestWaitWakesTheSandboxAndKeepsItAwake(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "go")
	p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "web", Command: guest.Command{Command: "echo begun; while [ ! -e " + file + " ]; do sleep 0.01; done; echo ready; exec sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	mustSleep(t, m, sb.ID)
	type response struct {
		sandbox.WaitResult
		error
	}
	result := make(chan response, 1)
	go func() {
		r, err := m.WaitProcess(t.Context(), sb.ID, "web", guest.Wait{Log: "^ready$", Timeout: time.Minute})
		result <- response{r, err}
	}()
	testkit.Eventually(t, "it is awake and in use", func() bool {
		_, err := m.Sleep(t.Context(), sb.ID)
		return errors.Is(err, sandbox.ErrBusy)
	})
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := <-result; r.error != nil || r.Outcome != guest.WaitMet || r.Line != "ready" || r.Process.ID != p.ID || r.Output != "" {
		t.Errorf("got %+v", r)
	}
	mustSleep(t, m, sb.ID)
	r, err := m.WaitProcess(t.Context(), sb.ID, p.ID, guest.Wait{Log: "never", Timeout: time.Millisecond})
	if err != nil || r.Outcome != guest.WaitExpired || r.Output != "begun\nready" {
		t.Errorf("got %+v, %v", r, err)
	}
	_, err = m.WaitProcess(t.Context(), sb.ID, "other", guest.Wait{Exit: true})
	if _, ok := errors.AsType[*sandbox.ProcessError](err); !ok {
		t.Errorf("an unknown process: %v", err)
	}
}

func TestWaitForAProcessOfAnEarlierRunWakesNothing(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	ended, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "ended", Command: guest.Command{Command: "exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := m.WaitProcess(t.Context(), sb.ID, ended.ID, guest.Wait{Exit: true, Timeout: time.Minute}); err != nil || *r.Process.ExitCode != 3 {
		t.Fatalf("got %+v, %v", r, err)
	}
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "server", Command: guest.Command{Argv: []string{"sleep", "1000"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		process string
		w       guest.Wait
		want    guest.WaitOutcome
	}{
		{"ended", guest.Wait{Exit: true, Timeout: time.Minute}, guest.WaitMet},
		{"ended", guest.Wait{Port: 1, Timeout: time.Minute}, guest.WaitExited},
		{"server", guest.Wait{Port: 1, Timeout: time.Minute}, guest.WaitExited},
		{"server", guest.Wait{Exit: true, Timeout: time.Minute}, guest.WaitMet}, // it ended with the sandbox
	} {
		if r, err := m.WaitProcess(t.Context(), sb.ID, tt.process, tt.w); err != nil || r.Outcome != tt.want || r.Process.Name != tt.process {
			t.Errorf("%s %+v: %+v, %v", tt.process, tt.w, r, err)
		}
	}
	if sb, _ := m.ByID(sb.ID); sb.State != sandbox.StateStopped {
		t.Errorf("it is %s", sb.State)
	}
	acquire(t, m, sb.ID).Release()
	if r, err := m.WaitProcess(t.Context(), sb.ID, "server", guest.Wait{Port: 1, Timeout: time.Minute}); err != nil || r.Outcome != guest.WaitExited {
		t.Errorf("after a cold wake: %+v, %v", r, err)
	}
}

func TestWaitForADeclaredProcessStartsAStoppedSandbox(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "web", Command: guest.Command{Command: "echo ready; exec sleep 1000"}, Restart: guest.RestartOnWake})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	r, err := m.WaitProcess(t.Context(), sb.ID, "web", guest.Wait{Log: "ready", Timeout: time.Minute})
	if err != nil || r.Outcome != guest.WaitMet || r.Process.ID != p.ID || !r.Process.StartedAt.After(p.StartedAt) {
		t.Errorf("got %+v, %v", r, err)
	}
}

// As of a sandbox that was put to sleep during the wait.
func TestWaitWithoutAResponseOfTheGuestEnds(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	events := hostile(says(`{"type":"process","process":{"id":"p-aaaaaaaa","name":"web","pid":7,"state":"running","restart":"never","started_at":"2100-01-01T00:00:00Z"}}`))
	n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, guest.SuffixWait) {
			io.Copy(io.Discard, r.Body) // else the server does not notice the client's end
			<-r.Context().Done()
			return
		}
		events.ServeHTTP(w, r)
	}))
	sb := create(t, n.Manager, "app")
	testkit.Eventually(t, "the process is known", func() bool {
		sb, _ := n.Manager.ByID(sb.ID)
		return len(sb.Processes) == 1
	})
	r, err := n.Manager.WaitProcess(t.Context(), sb.ID, "web", guest.Wait{Exit: true, Timeout: time.Millisecond})
	if err != nil || r.Outcome != guest.WaitExpired || r.Process.Name != "web" || r.Detail == "" {
		t.Errorf("got %+v, %v", r, err)
	}
}

// The guest's result of a wait is not trusted.
func TestHostileWaitResultsAreRefused(t *testing.T) {
	const process = `"process":{"id":"p-aaaaaaaa","name":"web","pid":7,"state":"running","restart":"never"}`
	for name, body := range map[string]string{
		"no process":        `{"outcome":"met"}`,
		"outcome":           `{"outcome":"won",` + process + `}`,
		"long line":         `{"outcome":"met",` + process + `,"line":"` + strings.Repeat("x", 9000) + `"}`,
		"foreign match":     `{"outcome":"met",` + process + `,"line":"a","match":["b"]}`,
		"many groups":       `{"outcome":"met",` + process + `,"line":"a","match":[` + strings.Repeat(`"",`, 16) + `""]}`,
		"status":            `{"outcome":"met",` + process + `,"status":7}`,
		"listening":         `{"outcome":"met",` + process + `,"listening":{"port":0}}`,
		"not JSON":          `{`,
		"more than allowed": `{"outcome":"met",` + process + `,"detail":"` + strings.Repeat("x", guest.MaxJSON) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.HasSuffix(r.URL.Path, guest.SuffixWait) {
					fmt.Fprint(w, body)
					return
				}
				hostile(says(`{"type":"ports"}`)).ServeHTTP(w, r)
			}))
			sb := create(t, n.Manager, "app")
			lease := acquire(t, n.Manager, sb.ID)
			defer lease.Release()
			if r, err := lease.Guest().WaitProcess(t.Context(), "p-aaaaaaaa", guest.Wait{Exit: true, Timeout: time.Minute}); err == nil {
				t.Errorf("got %+v", r)
			}
		})
	}
}
