package server_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func subscribe(t *testing.T, c *guest.Client) *guest.EventStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	events, err := c.Events(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { events.Close(); cancel() })
	return events
}

func next(t *testing.T, events *guest.EventStream) guest.Event {
	t.Helper()
	ev, err := events.Next()
	if err != nil {
		t.Fatal(err)
	}
	return ev
}

// known returns the terminals and sessions that the guest knows, as a later reader of its events
// learns them.
func known(t *testing.T, c *guest.Client) (terminals []guest.Terminal, sessions []guest.Session) {
	t.Helper()
	open := func() *guest.EventStream {
		t.Helper()
		events, err := c.Events(testkit.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		return events
	}
	open().Close()
	events := open()
	defer events.Close()
	for {
		switch ev := next(t, events); ev.Type {
		case guest.EventTerminal:
			terminals = append(terminals, *ev.Terminal)
		case guest.EventSession:
			sessions = append(sessions, *ev.Session)
		case guest.EventSessions:
			return terminals, sessions
		}
	}
}

func TestEventsBeginWithTheKnownProcesses(t *testing.T) {
	c := start(t, nil)
	old := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exit 5"}})
	waitProcess(t, c, old.ID, "the first has ended", exited)
	running := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	events := subscribe(t, c)
	if ev := next(t, events); ev.Type != guest.EventProcess || ev.Process.PID != old.PID || *ev.Process.ExitCode != 5 {
		t.Errorf("first event %+v", ev.Process)
	}
	if ev := next(t, events); ev.Process.PID != running.PID || ev.Process.State != guest.ProcessRunning {
		t.Errorf("second event %+v", ev.Process)
	}
	if _, err := c.SignalProcess(t.Context(), running.ID, "KILL"); err != nil {
		t.Fatal(err)
	}
	if ev := next(t, events); ev.Process.PID != running.PID || ev.Process.Signal != "SIGKILL" || ev.Process.State != guest.ProcessExited {
		t.Errorf("event of the end %+v", ev.Process)
	}
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exit 1"}, Restart: guest.RestartAlways})
	for _, want := range []struct {
		state    guest.ProcessState
		restarts int
	}{{guest.ProcessRunning, 0}, {guest.ProcessExited, 0}, {guest.ProcessRunning, 1}, {guest.ProcessExited, 1}} {
		if ev := next(t, events); ev.Process.Name != p.Name || ev.Process.State != want.state || ev.Process.RestartCount != want.restarts {
			t.Errorf("got %+v, want %+v", ev.Process, want)
		}
	}
}

func TestEventsEndWithTheGuest(t *testing.T) {
	c, end := serve(t, nil)
	events := subscribe(t, c)
	end()
	if ev, err := events.Next(); !errors.Is(err, guest.ErrLost) {
		t.Errorf("after the end of the guest: %+v, %v", ev, err)
	}
}

func TestClosedStreamOfEventsHasNoNext(t *testing.T) {
	c := start(t, nil)
	events := subscribe(t, c)
	events.Close()
	if _, err := events.Next(); err == nil {
		t.Error("a closed stream has a next event")
	}
}

// ask sends one request to the socket for processes in the sandbox.
func ask(t *testing.T, runDir, method, path string) (status int, body string) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(runDir, guest.SandboxSocketName))
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://inside"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestHoldFromInside(t *testing.T) {
	var runDir string
	c := start(t, func(cfg *server.Config) { runDir = cfg.RunDir; cfg.AnyPeer = true })
	if status, body := ask(t, runDir, "POST", "/hold?for=10m"); status != 500 || !strings.Contains(body, "node") {
		t.Errorf("without a node: %d %s", status, body)
	}
	events := subscribe(t, c)
	for _, d := range []time.Duration{10 * time.Minute, 0, guest.MaxHold} {
		if status, body := ask(t, runDir, "POST", "/hold?for="+d.String()); status != 200 {
			t.Fatalf("hold %s: %d %s", d, status, body)
		}
		if ev := next(t, events); ev.Type != guest.EventHold || ev.Hold != d {
			t.Errorf("hold %s arrived as %+v", d, ev)
		}
	}
	for _, bad := range []string{"/hold", "/hold?for=x", "/hold?for=-1s", "/hold?for=25h"} {
		if status, _ := ask(t, runDir, "POST", bad); status != 400 {
			t.Errorf("%s: %d", bad, status)
		}
	}
	for _, other := range []string{guest.RouteHello, guest.RouteExec, guest.RouteProcess, guest.RouteFile + "?path=/etc/passwd", guest.RouteEvents} {
		if status, _ := ask(t, runDir, "GET", other); status != 404 {
			t.Errorf("GET %s is offered inside: %d", other, status)
		}
	}
	limited := false
	for range 30 {
		status, _ := ask(t, runDir, "POST", "/hold?for=1s")
		limited = limited || status == 429
	}
	if !limited {
		t.Error("holds are not limited in rate")
	}
}
