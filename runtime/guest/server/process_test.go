package server_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func startProcess(t testing.TB, c *guest.Client, spec guest.ProcessSpec) guest.Process {
	t.Helper()
	p, err := c.StartProcess(t.Context(), spec)
	if err != nil {
		t.Fatalf("%+v: %v", spec, err)
	}
	return p
}

// waitProcess waits until a process is as the condition wants it.
func waitProcess(t testing.TB, c *guest.Client, id, what string, condition func(guest.Process) bool) guest.Process {
	t.Helper()
	var p guest.Process
	testkit.Eventually(t, what, func() bool {
		var err error
		if p, err = guesttest.Process(t.Context(), c, id); err != nil {
			t.Fatal(err)
		}
		return condition(p)
	})
	return p
}

func exited(p guest.Process) bool { return p.State == guest.ProcessExited }

// readLog reads a log to its end.
func readLog(t testing.TB, c *guest.Client, id string, follow bool) (stdout, stderr string, end *guest.Process) {
	t.Helper()
	s, err := c.Logs(t.Context(), id, follow)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out, errs bytes.Buffer
	for {
		ev, err := s.Next()
		if err == io.EOF {
			return out.String(), errs.String(), end
		}
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case ev.Process != nil:
			end = ev.Process
		case ev.Stream == "stdout":
			out.Write(ev.Data)
		case ev.Stream == "stderr":
			errs.Write(ev.Data)
		}
	}
}

func TestProcessRunsAndEnds(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "echo out; echo err >&2; exit 3", Env: map[string]string{"A": "b"}}, Name: "short"})
	if p.PID <= 0 || p.Name != "short" || p.Restart != guest.RestartNever || p.LogFile == "" || p.StartedAt.IsZero() {
		t.Errorf("started as %+v", p)
	}
	stdout, stderr, end := readLog(t, c, p.ID, true)
	if stdout != "out\n" || stderr != "err\n" {
		t.Errorf("log %q, %q", stdout, stderr)
	}
	if end == nil || end.State != guest.ProcessExited || end.ExitCode == nil || *end.ExitCode != 3 || end.ExitedAt == nil {
		t.Fatalf("ended as %+v", end)
	}
	file, err := os.ReadFile(p.LogFile)
	if err != nil || len(file) != len("out\nerr\n") {
		t.Errorf("log file has %q, %v", file, err)
	}
	again, _, end := readLog(t, c, p.ID, false)
	if again != "out\n" || end == nil {
		t.Errorf("an ended process's log is %q, %+v", again, end)
	}
}

func TestProcessRefusals(t *testing.T) {
	for _, tt := range []struct {
		name       string
		spec       guest.ProcessSpec
		code, hint string
	}{
		{"nothing to run", guest.ProcessSpec{}, guest.CodeInvalid, "set command or argv"},
		{"missing program", guest.ProcessSpec{Command: guest.Command{Argv: []string{"no-such"}}}, guest.CodeNoCommand, "PATH"},
		{"unknown restart", guest.ProcessSpec{Command: guest.Command{Command: "true"}, Restart: "sometimes"}, guest.CodeInvalid, "on_wake"},
		{"name with a slash", guest.ProcessSpec{Command: guest.Command{Command: "true"}, Name: "../x"}, guest.CodeInvalid, "name"},
		{"hidden name", guest.ProcessSpec{Command: guest.Command{Command: "true"}, Name: ".x"}, guest.CodeInvalid, "name"},
		{"long name", guest.ProcessSpec{Command: guest.Command{Command: "true"}, Name: strings.Repeat("x", 1<<20)}, guest.CodeInvalid, "64"},
		{"missing cwd", guest.ProcessSpec{Command: guest.Command{Command: "true", Cwd: "/no/such"}}, guest.CodeNotFound, "cwd"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			logs := t.TempDir()
			c := start(t, func(cfg *server.Config) { cfg.LogDir = logs })
			_, err := c.StartProcess(t.Context(), tt.spec)
			wantCode(t, err, tt.code, tt.hint)
			onlyEntries(t, logs)
			if list, err := c.Processes(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("a process that did not start is listed: %+v, %v", list, err)
			}
		})
	}
}

func TestNamesAreUniqueAmongTheRunning(t *testing.T) {
	c := start(t, nil)
	spec := guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}, Name: "web"}
	first := startProcess(t, c, spec)
	_, err := c.StartProcess(t.Context(), spec)
	wantCode(t, err, guest.CodeExists, "web")
	if _, err := c.StopProcess(t.Context(), first.ID, time.Second); err != nil {
		t.Fatal(err)
	}
	second := startProcess(t, c, spec)
	list, err := c.Processes(t.Context())
	if err != nil || len(list) != 2 || list[0].PID != first.PID || list[1].PID != second.PID {
		t.Errorf("list is %+v, %v", list, err)
	}
	unnamed := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	if unnamed.Name == "" {
		t.Error("a process without a name got none")
	}
}

func TestUnknownID(t *testing.T) {
	c := start(t, nil)
	_, err := guesttest.Process(t.Context(), c, "p-aaaaaaaa")
	wantCode(t, err, guest.CodeNoProcess, "p-aaaaaaaa")
	_, err = c.StopProcess(t.Context(), strconv.Itoa(os.Getpid()), 0)
	wantCode(t, err, guest.CodeNoProcess, "")
	_, err = c.SignalProcess(t.Context(), "../events", "KILL")
	wantCode(t, err, guest.CodeNoProcess, "")
	_, err = c.Logs(t.Context(), "1", false)
	wantCode(t, err, guest.CodeNoProcess, "")
}

func TestIDIsTheClients(t *testing.T) {
	c := start(t, nil)
	spec := guest.ProcessSpec{ID: guest.NewProcessID(), Command: guest.Command{Argv: []string{"sleep", "1000"}}}
	if p := startProcess(t, c, spec); p.ID != spec.ID {
		t.Errorf("got the id %q, not %q", p.ID, spec.ID)
	}
	_, err := c.StartProcess(t.Context(), spec)
	wantCode(t, err, guest.CodeExists, spec.ID)
	spec.ID = "p-1"
	_, err = c.StartProcess(t.Context(), spec)
	wantCode(t, err, guest.CodeInvalid, "p-1")
}

func TestStopProcess(t *testing.T) {
	for _, tt := range []struct {
		name    string
		command string
		grace   time.Duration
		want    string // signal, or none
		code    int
	}{
		{"ends by itself on SIGTERM", `trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done`, 20 * time.Second, "", 7},
		{"dies of SIGTERM", `echo up; exec sleep 1000`, 20 * time.Second, "SIGTERM", 143},
		{"ignores SIGTERM", `trap '' TERM; echo up; while :; do sleep 1000; done`, 200 * time.Millisecond, "SIGKILL", 137},
		{"no grace", `trap '' TERM; echo up; exec sleep 1000`, 0, "SIGKILL", 137},
		{"stopped", `echo up; kill -STOP $$`, 20 * time.Second, "SIGTERM", 143},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: tt.command}, Restart: guest.RestartAlways})
			testkit.Eventually(t, "it is up", func() bool { out, _, _ := readLog(t, c, p.ID, false); return out == "up\n" })
			got, err := c.StopProcess(t.Context(), p.ID, tt.grace)
			if err != nil {
				t.Fatal(err)
			}
			if got.State != guest.ProcessExited || got.Signal != tt.want || got.ExitCode == nil || *got.ExitCode != tt.code || got.RestartCount != 0 {
				t.Errorf("stopped as %+v", got)
			}
			if again, err := c.StopProcess(t.Context(), p.ID, tt.grace); err != nil || again.State != guest.ProcessExited {
				t.Errorf("stopping it again: %+v, %v", again, err)
			}
		})
	}
}

func TestStopKillsTheTree(t *testing.T) {
	for _, tt := range escapees {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			dir := t.TempDir()
			p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: tt.command, Cwd: dir}})
			testkit.Eventually(t, "it has children", func() bool { return server.AliveIn(dir) > 1 })
			if _, err := c.StopProcess(t.Context(), p.ID, 100*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			if n := server.AliveIn(dir); n > 0 {
				t.Errorf("%d processes of the tree are left", n)
			}
		})
	}
}

func TestSignalProcess(t *testing.T) {
	c := start(t, nil)
	const traps = `trap 'echo hup' HUP; trap 'echo int' INT; echo up; while :; do sleep 0.01; done`
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: traps}, Restart: guest.RestartAlways})
	wait := func(want string) {
		testkit.Eventually(t, want, func() bool { out, _, _ := readLog(t, c, p.ID, false); return strings.Contains(out, want) })
	}
	wait("up")
	for _, name := range []string{"SIGHUP", "hup"} {
		if got, err := c.SignalProcess(t.Context(), p.ID, name); err != nil || got.State != guest.ProcessRunning {
			t.Fatalf("%s: %+v, %v", name, got, err)
		}
	}
	wait("hup")
	_, err := c.SignalProcess(t.Context(), p.ID, "SIGNOTHING")
	wantCode(t, err, guest.CodeInvalid, "SIGHUP")
	if _, err := c.SignalProcess(t.Context(), p.ID, "USR1"); err != nil {
		t.Fatal(err)
	}
	got := waitProcess(t, c, p.ID, "it died of the signal", exited)
	_, _, end := readLog(t, c, p.ID, true) // ends only when there is no restart
	if got.Signal != "SIGUSR1" || end == nil || end.RestartCount != 0 {
		t.Fatalf("ended as %+v, log %+v", got, end)
	}
	_, err = c.SignalProcess(t.Context(), p.ID, "TERM")
	wantCode(t, err, guest.CodeNoProcess, "ended")
}

// Each run prints a word, leaves a background process and ends at a signal of the test.
func TestRestartAlways(t *testing.T) {
	c := start(t, nil)
	mark := fmt.Sprint("restart-", time.Now().UnixNano())
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "setsid sleep 1000 & echo life; read x < fifo; exit 1", Cwd: fifoFolder(t), Env: map[string]string{"RESTART": mark}}, Name: "crash", Restart: guest.RestartAlways})
	log, err := c.Logs(t.Context(), p.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	const restarts = 2
	for n := 0; ; n++ {
		if ev, err := log.Next(); err != nil || string(ev.Data) != "life\n" {
			t.Fatalf("life %d says %q, %+v, %v", n, ev.Data, ev.Process, err)
		}
		now, err := guesttest.Process(t.Context(), c, p.ID)
		if err != nil || now.State != guest.ProcessRunning || now.RestartCount != n || now.Name != "crash" || (now.PID == p.PID) != (n == 0) || now.ExitCode != nil {
			t.Fatalf("in life %d it is %+v, %v", n, now, err)
		}
		testkit.Eventually(t, "its shell and its sleep are alive, and nothing of earlier lives", func() bool { return aliveWith(t, mark) == 2 })
		if n == restarts {
			break
		}
		openFIFO(t, p.Cwd)
	}
	stopped, err := c.StopProcess(t.Context(), p.ID, 20*time.Second)
	if err != nil || stopped.State != guest.ProcessExited || stopped.RestartCount != restarts || stopped.Signal != "SIGTERM" {
		t.Fatalf("stopped as %+v, %v", stopped, err)
	}
	if ev, err := log.Next(); err != nil || ev.Process == nil || ev.Process.RestartCount != restarts {
		t.Errorf("the log ends with %q, %+v, %v", ev.Data, ev.Process, err)
	}
	if n := aliveWith(t, mark); n != 0 {
		t.Errorf("%d processes are left", n)
	}
}

func TestRestartOnWakeAndNoAreNotRestarted(t *testing.T) {
	for _, restart := range []guest.Restart{guest.RestartNever, guest.RestartOnWake} {
		t.Run(string(restart), func(t *testing.T) {
			c := start(t, nil)
			p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exit 1"}, Restart: restart})
			if _, _, end := readLog(t, c, p.ID, true); end == nil || end.RestartCount != 0 || end.Restart != restart {
				t.Fatalf("ended as %+v", end)
			}
		})
	}
}

func TestLogsFollowWithoutLossAfterReplay(t *testing.T) {
	c := start(t, nil)
	const lines = 20_000
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo $i; i=$((i+1)); done", lines)}})
	var want strings.Builder
	for i := range lines {
		fmt.Fprintln(&want, i)
	}
	for range 3 { // begun at different moments
		if out, _, end := readLog(t, c, p.ID, true); out != want.String() || end == nil {
			t.Fatalf("got %d bytes that end in %q, want %d", len(out), out[max(0, len(out)-20):], want.Len())
		}
	}
}

func TestSlowFollowerLearnsHowMuchItMissed(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "read x < fifo; head -c 30000000 /dev/zero", Cwd: fifoFolder(t)}})
	s, err := c.Logs(t.Context(), p.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	openFIFO(t, p.Cwd)
	waitProcess(t, c, p.ID, "it has ended, although its log has no reader", exited)
	var got, skipped int64
	for {
		ev, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got, skipped = got+int64(len(ev.Data)), skipped+ev.Skipped
	}
	if skipped == 0 || got+skipped != 30_000_000 {
		t.Errorf("got %d bytes and a note of %d skipped ones", got, skipped)
	}
}

func fifoFolder(t *testing.T) string {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func openFIFO(t *testing.T, dir string) {
	if err := os.WriteFile(filepath.Join(dir, "fifo"), []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	c := start(t, nil)
	first := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"true"}}})
	waitProcess(t, c, first.ID, "the first has ended", exited)
	for range 64 {
		p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"true"}}})
		readLog(t, c, p.ID, true)
	}
	testkit.Eventually(t, "the first is forgotten", func() bool {
		_, err := guesttest.Process(t.Context(), c, first.ID)
		return codeOf(err) == guest.CodeNoProcess
	})
	if _, err := os.Stat(first.LogFile); !os.IsNotExist(err) {
		t.Errorf("its log file: %v", err)
	}
	list, err := c.Processes(t.Context())
	if err != nil || len(list) != 64 {
		t.Errorf("%d processes are listed, %v", len(list), err)
	}
}

func TestProcessesAreLimited(t *testing.T) {
	c := start(t, nil)
	for range 256 {
		startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	}
	_, err := c.StartProcess(t.Context(), guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	wantCode(t, err, guest.CodeTooMany, "256")
}

func TestLongCommandsFitInAList(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sh", "-c", "exec sleep 1000", strings.Repeat("\x01", 100_000)}}})
	list, err := c.Processes(t.Context())
	if err != nil || len(list) != 1 || len(list[0].Argv) != 4 || list[0].Argv[3] != "…" {
		t.Fatalf("listed as %+.300v, %v", list, err)
	}
	if _, err := c.StopProcess(t.Context(), p.ID, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, end := readLog(t, c, p.ID, true); end == nil {
		t.Error("its log has no end")
	}
}

func TestLogsWithoutDisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c := start(t, func(cfg *server.Config) { cfg.LogDir = filepath.Join(file, "log") })
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "echo kept"}})
	if out, _, _ := readLog(t, c, p.ID, true); out != "kept\n" {
		t.Errorf("log is %q", out)
	}
}

func TestServeEndsEverything(t *testing.T) {
	mark := fmt.Sprint("serve-", time.Now().UnixNano())
	srv, err := server.New(server.Config{RunDir: t.TempDir(), LogDir: t.TempDir(), Env: append(os.Environ(), "SERVE="+mark), AnyPeer: true, Grace: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx) }()
	c := guest.NewClient(srv.Socket())
	defer c.Close()
	startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "trap '' TERM; setsid sleep 1000 & while :; do sleep 1000; done"}, Restart: guest.RestartAlways})
	startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exit 1"}, Restart: guest.RestartAlways})
	s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Command: "setsid sleep 1000 & sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	events, err := c.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	cancel()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	if n := aliveWith(t, mark); n > 0 {
		t.Errorf("%d processes are left", n)
	}
	for err = nil; err == nil; {
		_, err = s.Next()
	}
	if err == io.EOF {
		t.Error("a command that was cut off looks complete")
	}
}
