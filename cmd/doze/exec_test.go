package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

func TestExecPassesEverything(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	dir := t.TempDir()
	t.Setenv("FROM_SHELL", "shell value")
	tests := []struct {
		name  string
		stdin string
		args  []string
		want  result
	}{
		{"words as they are", "", []string{"exec", "a", "--", "echo", "$HOME", "-n", "a  b"}, result{out: "$HOME -n a  b\n"}},
		{"one word", "", []string{"exec", "a", "true"}, result{}},
		{"one argument with spaces", "", []string{"exec", "a", "echo $((6*7)); exit 3"}, result{out: "42\n", code: 3}},
		{"script", "", []string{"exec", "a", "-c", "echo out; echo err >&2; exit 7"}, result{out: "out\n", err: "err\n", code: 7}},
		{"input", "piped\x00\xff", []string{"exec", "a", "--", "cat"}, result{out: "piped\x00\xff"}},
		{"no input", "piped", []string{"exec", "--no-stdin", "a", "--", "cat"}, result{}},
		{"folder", "", []string{"exec", "a", "--cwd", dir, "--", "pwd"}, result{out: dir + "\n"}},
		{"environment", "", []string{"exec", "a", "-e", "X=1 2", "-e", "FROM_SHELL", "-c", `echo "$X $FROM_SHELL"`}, result{out: "1 2 shell value\n"}},
		{"signal", "", []string{"exec", "a", "-c", "kill -9 $$"}, result{code: 137}},
		{"output that is not UTF-8", "", []string{"exec", "a", "-c", `printf '\377\000'`}, result{out: "\xff\x00"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := r.dozeWith(tt.stdin, tt.args...); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestExecTimeout(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	got := r.doze("exec", "a", "--timeout", "200ms", "--", "sleep", "1000")
	if got.code != 137 || !strings.Contains(got.err, "exceeded its timeout") {
		t.Errorf("got %+v", got)
	}
}

func TestExecJSON(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	got := r.doze("exec", "--json", "a", "-c", "echo out; echo err >&2; exit 4")
	res := decodeJSON[types.ExecResult](t, got.out)
	if got.code != 4 || res.Stdout != "out\n" || res.Stderr != "err\n" || res.ExitCode != 4 {
		t.Errorf("got %+v", got)
	}
}

func TestExecRefusals(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	refused := func(code int, words string, args ...string) {
		t.Helper()
		got := r.doze(args...)
		if got.code != code || !strings.Contains(got.err, words) || !strings.HasPrefix(got.err, "doze: ") || got.out != "" {
			t.Errorf("doze %s: got %+v; want %d and an error with %q", strings.Join(args, " "), got, code, words)
		}
	}
	for words, args := range map[string][]string{
		"put -- before":           {"exec", "a", "ls", "-l"},
		"no command":              {"exec", "a"},
		"SANDBOX is missing":      {"exec"},
		"give one of them":        {"exec", "a", "-c", "true", "--", "true"},
		"add -d":                  {"exec", "--name", "x", "a", "true"},
		"--timeout is not for":    {"exec", "-d", "--timeout", "1s", "a", "true"},
		"the variable is not set": {"exec", "-e", "NO_SUCH_VARIABLE_HERE", "a", "true"},
		"write --env KEY=VALUE":   {"exec", "-e", "=x", "a", "true"},
		"sandbox_not_found: ":     {"exec", "missing", "true"},
		"/relative":               {"exec", "a", "--cwd", "nowhere/relative", "true"},
		"path_not_found: ":        {"exec", "a", "--cwd", "/nowhere", "true"},
	} {
		refused(exitExecFailed, words, args...)
	}
	for _, flag := range []string{"-it", "-i", "-t", "-ti", "--interactive", "--tty"} {
		refused(exitExecFailed, "omit -i and -t", "exec", flag, "a", "bash")
	}
	for _, detach := range [][]string{nil, {"-d"}} {
		exec := append([]string{"exec", "a"}, detach...)
		refused(exitNotFound, "command_not_found: ", append(exec, "--", "no-such-command-here", "x")...)
		refused(exitNotExecutable, "command_not_executable: ", append(exec, "--", plain)...)
		refused(exitNotExecutable, "command_not_executable: ", append(exec, "--", "/")...)
	}
}

// A failure of doze has an exit code that no command has: an unreachable node, and a
// stream that ends early.
func TestExecFailuresHaveACodeOfTheirOwn(t *testing.T) {
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		respondExec(w, req, "half", `{"type":"start","pid":1}`)
	})
	if got := r.doze("exec", "-n", "a", "true"); got.code != exitExecFailed || got.out != "half" || !strings.Contains(got.err, "ended before") {
		t.Errorf("broken off: got %+v", got)
	}
	r.server.Close()
	if got := r.doze("exec", "-n", "a", "true"); got.code != exitExecFailed || !strings.Contains(got.err, "does not respond") {
		t.Errorf("no node: got %+v", got)
	}
	if got := r.doze("ls"); got.code != exitFailed {
		t.Errorf("ls: got %+v", got)
	}
}

func TestExecEndsWithTheCommandsCodeAsAProgram(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	for _, want := range []int{0, 1, 42, 255} {
		cmd := r.program("exec", "a", "--", "sh", "-c", "cat; exit "+strconv.Itoa(want))
		cmd.Stdin = strings.NewReader("piped")
		out, err := cmd.Output()
		var exit *exec.ExitError
		code := 0
		if errors.As(err, &exit) {
			code = exit.ExitCode()
		}
		if code != want || string(out) != "piped" {
			t.Errorf("got exit code %d and %q, want %d", code, out, want)
		}
	}
}

// execProgram is doze exec as a process of its own, with pipes.
type execProgram struct {
	*exec.Cmd
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader
}

func (r *rig) execProgram(args ...string) *execProgram {
	r.t.Helper()
	p := &execProgram{Cmd: r.program(args...), t: r.t}
	var err error
	if p.in, err = p.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	p.Stderr = os.Stderr
	if err := p.Start(); err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (p *execProgram) expectLine(want string) {
	p.t.Helper()
	if line, err := p.out.ReadString('\n'); line != want+"\n" {
		p.t.Fatalf("got %q, %v; want %q", line, err, want)
	}
}

func (p *execProgram) write(text string) {
	p.t.Helper()
	if _, err := io.WriteString(p.in, text); err != nil {
		p.t.Fatal(err)
	}
}

func (p *execProgram) expectExit(code int) {
	p.t.Helper()
	if rest, err := io.ReadAll(p.out); err != nil || len(rest) > 0 {
		p.t.Errorf("more output: %.100q, %v", rest, err)
	}
	p.Wait()
	if got := p.ProcessState.ExitCode(); got != code {
		p.t.Errorf("exit code %d, want %d", got, code)
	}
}

// As programs start others: with a pipe for input that stays open.
func TestExecRunsWhileItsInputIsOpen(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	p := r.execProgram("exec", "a", "-c", "echo up; exit 3")
	p.expectLine("up")
	p.expectExit(3)
}

func TestExecIsAConversation(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	p := r.execProgram("exec", "a", "-c", `while read a b; do echo $((a+b)); done; echo end`)
	for i := range 5 {
		p.write(fmt.Sprintf("%d %d\n", i, 40))
		p.expectLine(strconv.Itoa(i + 40))
	}
	p.in.Close()
	p.expectLine("end")
	p.expectExit(0)
}

// Of a script's own input, exec -n takes nothing.
func TestExecWithoutStdinLeavesItToTheScript(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	if _, err := write.WriteString("first\nsecond\n"); err != nil {
		t.Fatal(err)
	}
	write.Close()
	cmd := r.program("exec", "-n", "a", "--", "cat")
	cmd.Stdin = read
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("got %q, %v", out, err)
	}
	if rest, _ := io.ReadAll(read); string(rest) != "first\nsecond\n" {
		t.Errorf("%q is left", rest)
	}
}

// A command that reads little does not have all of a large input read for it.
func TestExecReadsNoMoreThanTheCommandTakes(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	p := r.execProgram("exec", "a", "-c", "read go; sleep 1000")
	p.write("go\n")
	chunk := strings.Repeat("x", 64<<10)
	stuck := make(chan int, 1)
	written := 0
	var mu sync.Mutex
	go func() {
		for {
			n, err := io.WriteString(p.in, chunk)
			mu.Lock()
			written += n
			mu.Unlock()
			if err != nil {
				stuck <- written
				return
			}
		}
	}()
	testkit.Eventually(t, "the window is full", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return written >= 1<<20
	})
	p.Process.Signal(os.Interrupt)
	p.Wait()
	if n := <-stuck; n > 2<<20 {
		t.Errorf("%d bytes were taken for a command that reads nothing", n)
	}
	if code := p.ProcessState.ExitCode(); code != exitInterrupted {
		t.Errorf("exit code %d", code)
	}
}

func TestCtrlCEndsTheCommandInTheSandbox(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	cmd := r.program("exec", "a", "-c", "sleep 1000 & echo $!; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != exitInterrupted || errs.Len() > 0 {
		t.Errorf("got exit code %d and error %q, want %d and no word", code, errs.String(), exitInterrupted)
	}
	testkit.Eventually(t, "the command's child is gone", func() bool { return !testkit.Alive(pid) })
}

// execCommand is what a client asks of a node.
type execCommand struct{ Timeout string }

// respondExec responds to the exec of a client with output and a last message.
func respondExec(w http.ResponseWriter, req *http.Request, output, last string) (command execCommand) {
	conn, err := websocket.Accept(w, req, nil)
	if err != nil {
		return command
	}
	defer conn.CloseNow()
	_, message, _ := conn.Read(req.Context())
	json.Unmarshal(message, &command)
	conn.Write(req.Context(), websocket.MessageBinary, []byte("\x01"+output))
	conn.Write(req.Context(), websocket.MessageText, []byte(last))
	if strings.Contains(last, `"complete"`) {
		conn.Read(context.Background()) // until the client has gone
	}
	return command
}

func TestInvalidExitCodesAreFailures(t *testing.T) {
	for _, code := range []int{256, 512, -1, -256, 1 << 40} {
		r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
			respondExec(w, req, "", fmt.Sprintf(`{"type":"complete","exit_code":%d}`, code))
		})
		if got := r.doze("exec", "a", "true"); got.code != exitExecFailed || !strings.Contains(got.err, "is not a valid exit code") {
			t.Errorf("got %+v", got)
		}
		if got := r.doze("exec", "--json", "a", "true"); got.code != exitExecFailed {
			t.Errorf("got %+v", got)
		}
	}
}

func TestCommandsHaveNoTimeoutUnlessAsked(t *testing.T) {
	asked := make(chan string, 1)
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		asked <- respondExec(w, req, "", `{"type":"complete"}`).Timeout
	})
	for want, args := range map[string][]string{
		"0s": {"exec", "--json", "a", "true"}, "90s": {"exec", "--json", "--timeout", "1m30s", "a", "true"},
	} {
		r.ok(args...)
		if got := <-asked; got != want {
			t.Errorf("doze %s asked for %q, want %q", strings.Join(args, " "), got, want)
		}
	}
}

// A shell on a terminal prints what it cannot do there.
func TestExecOfAShellOnATerminal(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	term := testterm.New(t, 80, 24)
	r.start(term, "exec", "a", "--", "sh")
	term.Shows("sh has no terminal")
	term.Press("echo $((6*7))\n")
	term.Shows("\n42")
	term.Press("exit 5\n")
	term.ExpectExit(5)
}
