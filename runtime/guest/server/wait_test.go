package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// long is a timeout that no test reaches.
const long = time.Minute

func waitFor(t testing.TB, c *guest.Client, id string, w guest.Wait) guest.WaitResult {
	t.Helper()
	r, err := c.WaitProcess(t.Context(), id, w)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// inBackground begins a wait and returns a function that returns its result.
func inBackground(t testing.TB, c *guest.Client, id string, w guest.Wait) func() guest.WaitResult {
	t.Helper()
	type response struct {
		guest.WaitResult
		error
	}
	result := make(chan response, 1)
	go func() {
		r, err := c.WaitProcess(t.Context(), id, w)
		result <- response{r, err}
	}()
	return func() guest.WaitResult {
		t.Helper()
		r := <-result
		if r.error != nil {
			t.Fatal(r.error)
		}
		return r.WaitResult
	}
}

func touch(t testing.TB, file string) {
	t.Helper()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestWaitForAPort(t *testing.T) {
	for _, address := range []string{"127.0.0.1", "127.0.0.3", "[::1]", "0.0.0.0", "[::]"} {
		t.Run(address, func(t *testing.T) {
			c := start(t, nil)
			port, file := freePort(t), filepath.Join(t.TempDir(), "go")
			p := startProcess(t, c, guest.ProcessSpec{Command: later(file, helper(t, "listen", fmt.Sprint(address, ":", port)))})
			result := inBackground(t, c, p.ID, guest.Wait{Port: port, Timeout: long})
			touch(t, file)
			r := result()
			if r.Outcome != guest.WaitMet || r.Listening == nil || r.Listening.Port != port || r.Listening.PID != p.PID || r.Listening.Process != p.ID || r.Process.ID != p.ID || r.Detail != "" {
				t.Errorf("got %+v, %+v", r, r.Listening)
			}
			if again := waitFor(t, c, p.ID, guest.Wait{Port: port, Timeout: long}); again.Outcome != guest.WaitMet {
				t.Errorf("a later wait: %+v", again)
			}
		})
	}
}

func TestWaitCountsTheDescendantsOfAProcess(t *testing.T) {
	c := start(t, nil)
	port := freePort(t)
	command := helper(t, "listen", fmt.Sprint("127.0.0.1:", port))
	command.Command, command.Argv = "setsid "+command.Argv[0]+" & wait", nil
	p := startProcess(t, c, guest.ProcessSpec{Command: command})
	r := waitFor(t, c, p.ID, guest.Wait{Port: port, Timeout: long})
	if r.Outcome != guest.WaitMet || r.Listening.Process != p.ID || r.Listening.PID == p.PID {
		t.Errorf("got %+v, %+v", r, r.Listening)
	}
}

func TestPortOfAnotherProcessIsNotReady(t *testing.T) {
	c := start(t, nil)
	port := freePort(t)
	other := startProcess(t, c, guest.ProcessSpec{Name: "other", Command: helper(t, "listen", fmt.Sprint("127.0.0.1:", port))})
	waitFor(t, c, other.ID, guest.Wait{Port: port, Timeout: long})
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	r := waitFor(t, c, p.ID, guest.Wait{Port: port, Timeout: 50 * time.Millisecond})
	if r.Outcome != guest.WaitExpired || !strings.Contains(r.Detail, fmt.Sprint("another process listens on port ", port)) || !strings.Contains(r.Detail, fmt.Sprint("pid ", other.PID)) {
		t.Errorf("got %+v", r)
	}
	// One that cannot listen because of it ends, which is reported immediately.
	late := startProcess(t, c, guest.ProcessSpec{Command: helper(t, "listen", fmt.Sprint("127.0.0.1:", port))})
	r = waitFor(t, c, late.ID, guest.Wait{Port: port, Timeout: long})
	if r.Outcome != guest.WaitExited || *r.Process.ExitCode != 3 || !strings.Contains(r.Detail, "another process") {
		t.Errorf("got %+v", r)
	}
}

func TestWaitForAPortThatIsOpenedAgain(t *testing.T) {
	c := start(t, reportPorts)
	events := subscribe(t, c)
	port, file := freePort(t), filepath.Join(t.TempDir(), "go")
	first := startProcess(t, c, guest.ProcessSpec{Command: helper(t, "listen", fmt.Sprint("127.0.0.1:", port))})
	waitFor(t, c, first.ID, guest.Wait{Port: port, Timeout: long})
	nextPorts(t, events, port, func(l *guest.Listening) bool { return l != nil && l.Process == first.ID })
	if _, err := c.StopProcess(t.Context(), first.ID, 0); err != nil {
		t.Fatal(err)
	}
	second := startProcess(t, c, guest.ProcessSpec{Command: later(file, helper(t, "listen", fmt.Sprint("127.0.0.1:", port)))})
	if r := waitFor(t, c, second.ID, guest.Wait{Port: port, Timeout: 20 * time.Millisecond}); r.Outcome != guest.WaitExpired || !strings.Contains(r.Detail, "nothing listens") {
		t.Errorf("while it is closed: %+v", r)
	}
	result := inBackground(t, c, second.ID, guest.Wait{Port: port, Timeout: long})
	touch(t, file)
	if r := result(); r.Outcome != guest.WaitMet || r.Listening.PID != second.PID {
		t.Errorf("got %+v, %+v", r, r.Listening)
	}
	nextPorts(t, events, port, func(l *guest.Listening) bool { return l != nil && l.Process == second.ID })
}

func TestWaitEndsWhenTheProcessExits(t *testing.T) {
	c := start(t, nil)
	for name, w := range map[string]guest.Wait{
		"port": {Port: freePort(t)}, "log": {Log: "^ready$"}, "http": {HTTP: &guest.WaitHTTP{Port: freePort(t), Path: "/", Status: "2xx"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "go")
			p := startProcess(t, c, guest.ProcessSpec{Command: later(file, guest.Command{Argv: []string{"false"}})})
			w.Timeout = long
			result := inBackground(t, c, p.ID, w)
			touch(t, file)
			r := result()
			if r.Outcome != guest.WaitExited || r.Process.State != guest.ProcessExited || *r.Process.ExitCode != 1 || r.Detail == "" {
				t.Errorf("got %+v", r)
			}
			if again := waitFor(t, c, p.ID, w); again.Outcome != guest.WaitExited {
				t.Errorf("a wait for an ended process: %+v", again)
			}
		})
	}
}

func TestWaitForTheExit(t *testing.T) {
	c := start(t, nil)
	file := filepath.Join(t.TempDir(), "go")
	p := startProcess(t, c, guest.ProcessSpec{Command: later(file, guest.Command{Argv: []string{"false"}})})
	if r := waitFor(t, c, p.ID, guest.Wait{Exit: true, Timeout: 10 * time.Millisecond}); r.Outcome != guest.WaitExpired || r.Process.State != guest.ProcessRunning {
		t.Errorf("while it runs: %+v", r)
	}
	result := inBackground(t, c, p.ID, guest.Wait{Exit: true, Timeout: long})
	touch(t, file)
	if r := result(); r.Outcome != guest.WaitMet || *r.Process.ExitCode != 1 {
		t.Errorf("got %+v", r)
	}
	if r := waitFor(t, c, p.ID, guest.Wait{Exit: true}); r.Outcome != guest.WaitMet {
		t.Errorf("after its end: %+v", r)
	}
}

func TestWaitForALine(t *testing.T) {
	long8k := strings.Repeat("x", 8<<10)
	for _, tt := range []struct {
		name, command, expression string
		line                      string
		match                     []string
	}{
		{name: "stdout", command: "echo a; echo ready now; echo b", expression: "^ready", line: "ready now", match: []string{"ready"}},
		{name: "stderr", command: "echo ready >&2", expression: "ready", line: "ready", match: []string{"ready"}},
		{name: "groups", command: "echo 'on http://localhost:5173/ now'", expression: `http://(localhost):(\d+)(x)?`, line: "on http://localhost:5173/ now", match: []string{"http://localhost:5173", "localhost", "5173", ""}},
		{name: "colors", command: `printf '\033[32mLocal\033[0m: http://localhost:\033[1m5173\033[22m/\033]8;;http://x\033\\link\033]8;;\007\n'`, expression: `^Local: http://localhost:5173/link$`, line: "Local: http://localhost:5173/link", match: []string{"Local: http://localhost:5173/link"}},
		{name: "without a newline", command: "printf 'ready> '", expression: "^ready> $", line: "ready> ", match: []string{"ready> "}},
		{name: "in two parts", command: "printf rea; printf 'noise\n' >&2; printf 'dy\n'", expression: "^ready$", line: "ready", match: []string{"ready"}},
		{name: "carriage return", command: `printf 'ready\r\n'`, expression: "^ready$", line: "ready", match: []string{"ready"}},
		{name: "not UTF-8", command: `printf 'r\377ady\n'`, expression: `^r\?ady$`, line: "r?ady", match: []string{"r?ady"}},
		{name: "long line", command: "head -c 100000 /dev/zero | tr '\\0' x; echo; echo ready", expression: "^ready$", line: "ready", match: []string{"ready"}},
		{name: "beginning of a long line", command: "head -c 100000 /dev/zero | tr '\\0' x; echo ready", expression: "^x+$", line: long8k, match: []string{long8k}},
		{name: "empty line", command: "echo; sleep 1000", expression: "^$", line: "", match: []string{""}},
		{name: "after much output", command: "yes | head -c 3000000; echo ready", expression: "^ready$", line: "ready", match: []string{"ready"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: tt.command + "; exec sleep 1000"}})
			w := guest.Wait{Log: tt.expression, Timeout: long}
			r := waitFor(t, c, p.ID, w)
			if r.Outcome != guest.WaitMet || r.Line != tt.line || !slices.Equal(r.Match, tt.match) || r.Process.State != guest.ProcessRunning {
				t.Errorf("got %.200q", fmt.Sprint(r))
			}
			if again := waitFor(t, c, p.ID, w); again.Line != tt.line {
				t.Errorf("the line was written already: %+v", again)
			}
		})
	}
}

// TestSearchEndsAlthoughTheLogGrows has a process that writes faster than its lines are searched.
func TestWaitForALineEndsWhileTheProcessWrites(t *testing.T) {
	c, end := serve(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exec yes"}})
	waitFor(t, c, p.ID, guest.Wait{Log: "^y$", Timeout: long})
	r, err := c.WaitProcess(testkit.Context(t), p.ID, guest.Wait{Log: "^never$", Timeout: 20 * time.Millisecond})
	if err != nil || r.Outcome != guest.WaitExpired || r.Detail == "" {
		t.Errorf("got %+v, %v", r, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if r, err := c.WaitProcess(ctx, p.ID, guest.Wait{Log: "^never$", Timeout: long}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that was given up: %+v, %v", r, err)
	}
	end() // fails if a handler goes on
}

func TestLinesBeforeAWaitOfNoTimeCount(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "yes | head -c 200000; echo ready; exec sleep 1000"}})
	waitFor(t, c, p.ID, guest.Wait{Log: "^ready$", Timeout: long})
	if r := waitFor(t, c, p.ID, guest.Wait{Log: "^ready$"}); r.Outcome != guest.WaitMet {
		t.Errorf("got %+v", r)
	}
}

func TestLastLineOfAProcessCounts(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "printf done; exit 4"}})
	r := waitFor(t, c, p.ID, guest.Wait{Log: "^done$", Timeout: long})
	if r.Outcome != guest.WaitMet || r.Line != "done" {
		t.Errorf("got %+v", r)
	}
}

func TestWaitForAnHTTPStatus(t *testing.T) {
	for _, tt := range []struct{ statuses, want string }{
		{"200", "2xx"}, {"503 503 0 204", "2xx"}, {"200 404", "404"}, {"500 302", "3xx"},
	} {
		t.Run(tt.statuses, func(t *testing.T) {
			c := start(t, nil)
			port, file := freePort(t), filepath.Join(t.TempDir(), "go")
			p := startProcess(t, c, guest.ProcessSpec{Command: later(file, helper(t, "serve", fmt.Sprint("127.0.0.1:", port), tt.statuses))})
			result := inBackground(t, c, p.ID, guest.Wait{HTTP: &guest.WaitHTTP{Port: port, Path: "/health?x=1", Status: tt.want}, Timeout: long})
			touch(t, file)
			last := tt.statuses[strings.LastIndexByte(tt.statuses, ' ')+1:]
			if r := result(); r.Outcome != guest.WaitMet || fmt.Sprint(r.Status) != last || r.Listening == nil || r.Listening.Process != p.ID {
				t.Errorf("got %+v", r)
			}
		})
	}
}

func TestWaitForAnHTTPStatusReportsTheLastOne(t *testing.T) {
	c := start(t, nil)
	port := freePort(t)
	p := startProcess(t, c, guest.ProcessSpec{Command: helper(t, "serve", fmt.Sprint("[::1]:", port), "503")})
	waitFor(t, c, p.ID, guest.Wait{Port: port, Timeout: long})
	var r guest.WaitResult
	testkit.Eventually(t, "a response came before the timeout", func() bool {
		r = waitFor(t, c, p.ID, guest.Wait{HTTP: &guest.WaitHTTP{Port: port, Path: "/health?x=1", Status: "2xx"}, Timeout: 200 * time.Millisecond})
		return strings.Contains(r.Detail, "responds 503, not 2xx")
	})
	if r.Outcome != guest.WaitExpired || !strings.Contains(r.Detail, fmt.Sprintf("GET http://localhost:%d/health?x=1", port)) {
		t.Errorf("got %+v", r)
	}
	// A server that never responds does not outlast the wait.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	silent := uint16(l.Addr().(*net.TCPAddr).Port)
	r = waitFor(t, c, p.ID, guest.Wait{HTTP: &guest.WaitHTTP{Port: silent, Path: "/", Status: "2xx"}, Timeout: 50 * time.Millisecond})
	if r.Outcome != guest.WaitExpired || r.Detail == "" {
		t.Errorf("got %+v", r)
	}
}

func TestWaitGoesOnWhileAProcessIsRestarted(t *testing.T) {
	c := start(t, nil)
	port, dir := freePort(t), t.TempDir()
	command := helper(t, "listen", fmt.Sprint("127.0.0.1:", port))
	// The first run prints what the second one prints only when it is ready.
	command.Command, command.Argv = `cd `+dir+`; if [ ! -e second ]; then touch second; echo first; exit 1; fi; while [ ! -e go ]; do sleep 0.01; done; echo second; exec `+command.Argv[0], nil
	p := startProcess(t, c, guest.ProcessSpec{Command: command, Restart: guest.RestartAlways})
	waits := []func() guest.WaitResult{
		inBackground(t, c, p.ID, guest.Wait{Port: port, Timeout: long}),
		inBackground(t, c, p.ID, guest.Wait{Log: "^second$", Timeout: long}),
	}
	waitProcess(t, c, p.ID, "it was restarted", func(p guest.Process) bool { return p.RestartCount == 1 && p.State == guest.ProcessRunning })
	if r := waitFor(t, c, p.ID, guest.Wait{Log: "^first$", Timeout: 20 * time.Millisecond}); r.Outcome != guest.WaitExpired {
		t.Errorf("a line of the run before counts: %+v", r)
	}
	touch(t, filepath.Join(dir, "go"))
	for _, wait := range waits {
		if r := wait(); r.Outcome != guest.WaitMet || r.Process.RestartCount != 1 {
			t.Errorf("got %+v", r)
		}
	}
}

func TestWaitEndsInACrashLoop(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exit 7"}, Restart: guest.RestartAlways})
	r := waitFor(t, c, p.ID, guest.Wait{Port: freePort(t), Timeout: long})
	if r.Outcome != guest.WaitExited || *r.Process.ExitCode != 7 || r.Process.RestartCount < 3 {
		t.Errorf("got %+v", r)
	}
	if r := waitFor(t, c, p.ID, guest.Wait{Exit: true, Timeout: long}); r.Outcome != guest.WaitMet {
		t.Errorf("its exit: %+v", r)
	}
}

func TestWaitEndsWhenTheProcessIsStopped(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}, Restart: guest.RestartAlways})
	result := inBackground(t, c, p.ID, guest.Wait{Log: "x", Timeout: long})
	if _, err := c.StopProcess(t.Context(), p.ID, 0); err != nil {
		t.Fatal(err)
	}
	if r := result(); r.Outcome != guest.WaitExited || r.Process.Signal != "SIGKILL" {
		t.Errorf("got %+v", r)
	}
}

func TestManyConcurrentWaits(t *testing.T) {
	c := start(t, nil)
	port, file := freePort(t), filepath.Join(t.TempDir(), "go")
	p := startProcess(t, c, guest.ProcessSpec{Command: later(file, helper(t, "serve", fmt.Sprint("127.0.0.1:", port), "200"))})
	kinds := []guest.Wait{{Port: port}, {Log: "^listening$"}, {HTTP: &guest.WaitHTTP{Port: port, Path: "/health?x=1", Status: "200"}}, {Exit: true}}
	var results []func() guest.WaitResult
	for i := range 200 {
		w := kinds[i%len(kinds)]
		w.Timeout = long
		results = append(results, inBackground(t, c, p.ID, w))
	}
	touch(t, file)
	for i, result := range results {
		if kinds[i%len(kinds)].Exit {
			continue
		}
		if r := result(); r.Outcome != guest.WaitMet {
			t.Errorf("wait %d: %+v", i, r)
		}
	}
	if _, err := c.StopProcess(t.Context(), p.ID, 0); err != nil {
		t.Fatal(err)
	}
	for i, result := range results {
		if kinds[i%len(kinds)].Exit {
			if r := result(); r.Outcome != guest.WaitMet {
				t.Errorf("wait %d: %+v", i, r)
			}
		}
	}
}

func TestWaitThatIsGivenUpEnds(t *testing.T) {
	c, end := serve(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	ctx, cancel := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	for _, w := range []guest.Wait{{Port: 1}, {Log: "x"}, {Exit: true}, {HTTP: &guest.WaitHTTP{Port: 1, Path: "/", Status: "2xx"}}} {
		w.Timeout = long
		waits.Go(func() {
			if r, err := c.WaitProcess(ctx, p.ID, w); !errors.Is(err, context.Canceled) {
				t.Errorf("got %+v, %v", r, err)
			}
		})
	}
	cancel()
	waits.Wait()
	end() // fails if a handler goes on
}

func TestInvalidWaitsAreRefused(t *testing.T) {
	c := start(t, nil)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "1000"}}})
	for _, tt := range []struct {
		w    guest.Wait
		hint string
	}{
		{guest.Wait{}, "0 conditions"},
		{guest.Wait{Port: 1, Exit: true}, "2 conditions"},
		{guest.Wait{Log: "("}, "regular expression"},
		{guest.Wait{Port: 1, Log: "("}, "2 conditions"},
		{guest.Wait{Exit: true, Timeout: -1}, "timeout"},
		{guest.Wait{Exit: true, Timeout: guest.MaxWait + 1}, "timeout"},
	} {
		_, err := c.WaitProcess(t.Context(), p.ID, tt.w)
		wantCode(t, err, guest.CodeInvalid, tt.hint)
	}
	_, err := c.WaitProcess(t.Context(), "p-aaaaaaaa", guest.Wait{Exit: true})
	wantCode(t, err, guest.CodeNoProcess, "p-aaaaaaaa")
}

// The output of a process has any bytes.
func FuzzLogLines(f *testing.F) {
	f.Add([]byte("ready\n\x1b[1mnow\r\n"), uint16(3))
	f.Add(append(bytes.Repeat([]byte("x"), 9000), "\r\n\n\x1b]8;;\x1b\n"...), uint16(1))
	f.Fuzz(func(t *testing.T, output []byte, part uint16) {
		lines := server.Lines(output)
		if parts := server.Lines(slices.Collect(slices.Chunk(output, int(part)+1))...); !slices.Equal(lines, parts) {
			t.Errorf("in one part %q, in parts %q", lines, parts)
		}
		for _, line := range lines {
			if !utf8.ValidString(line) || strings.ContainsAny(line, "\n\x1b") || len(line) > 8<<10 {
				t.Errorf("line %.100q of %d bytes", line, len(line))
			}
		}
	})
}
