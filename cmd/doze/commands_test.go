package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/egress/egresstest"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

func TestLifeOfASandbox(t *testing.T) {
	r := newRig(t)
	if out := r.ok("create", "shop", "--env", "A=b", "--label", "team=web", "--sleep-after", "5m"); !regexp.MustCompile(`^shop  [a-z0-9]{12}  created, running\n$`).MatchString(out) {
		t.Errorf("create printed %q", out)
	}
	if out := r.ok("create", "shop"); !strings.Contains(out, "exists") {
		t.Errorf("the second create printed %q", out)
	}
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json"))
	if sb.Env["A"] != "b" || sb.Labels["team"] != "web" || time.Duration(sb.SleepAfter) != 5*time.Minute {
		t.Errorf("got %+v", sb)
	}
	for _, step := range []struct{ command, state string }{{"sleep", "asleep"}, {"wake", "running"}, {"stop", "stopped"}, {"wake", "running"}} {
		if out, want := r.ok(step.command, "shop"), "shop  "+step.state+"\n"; out != want {
			t.Errorf("%s printed %q, want %q", step.command, out, want)
		}
	}
	if sb := decodeJSON[types.Sandbox](t, r.ok("hold", "shop", "30m", "--json")); sb.HoldUntil.IsZero() {
		t.Error("hold did not hold")
	}
	if out := r.ok("rm", "shop"); out != "shop  destroyed\n" {
		t.Errorf("rm printed %q", out)
	}
	r.refused("sandbox_not_found: ", "show", "shop")
	r.refused("sandbox_not_found: ", "rm", "shop")
	r.ok("rm", "--force", "shop")
}

func TestForceIsOfferedWhenASandboxIsBusy(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	id := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json")).ID
	lease, err := r.node.Manager.AcquireRunning(sandbox.ID(id))
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	for _, step := range []struct{ command, state string }{{"sleep", "asleep"}, {"stop", "stopped"}} {
		r.refused("or with force=true\n  use --force: ", step.command, "shop")
		if out, want := r.ok(step.command, "--force", "shop"), "shop  "+step.state+"\n"; out != want {
			t.Errorf("%s --force printed %q, want %q", step.command, out, want)
		}
	}
}

func TestCreateWithoutWaiting(t *testing.T) {
	r := newRig(t)
	release := r.node.Engine.Block("start")
	out := r.ok("create", "slow", "--wait=false")
	if !strings.Contains(out, "created, starting") {
		t.Errorf("create printed %q", out)
	}
	r.refused("sandbox_conflict: ", "create", "slow", "--wait=false", "--image", "other")
	release()
	testkit.Eventually(t, "slow runs", func() bool { return strings.Contains(r.ok("show", "slow"), "running") })
	r.refused("sandbox_conflict: ", "create", "slow", "--wait=false", "--image", "other")
	if out := r.ok("create", "slow", "--wait=false"); !strings.Contains(out, "exists, running") {
		t.Errorf("create printed %q", out)
	}
	r.misused("requires a name", "create", "--wait=false")
}

func TestListFilters(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "-l", "team=web")
	r.ok("create", "b", "-l", "team=web")
	r.ok("create", "c")
	r.ok("sleep", "b")
	for _, tt := range []struct {
		args []string
		want string
	}{
		{nil, "a b c"},
		{[]string{"--state", "asleep"}, "b"},
		{[]string{"--label", "team=web"}, "a b"},
		{[]string{"--label", "team=web", "--state", "running"}, "a"},
		{[]string{"--state", "stopped"}, ""},
	} {
		out := r.ok(append([]string{"ls", "-q"}, tt.args...)...)
		if got := strings.Join(strings.Fields(out), " "); got != tt.want {
			t.Errorf("ls -q %v: got %q, want %q", tt.args, got, tt.want)
		}
	}
	list := decodeJSON[struct{ Sandboxes []types.Sandbox }](t, r.ok("ls", "--json"))
	if len(list.Sandboxes) != 3 {
		t.Errorf("got %d sandboxes as JSON", len(list.Sandboxes))
	}
	if out := r.ok("ls"); !strings.HasPrefix(out, "NAME") || strings.Count(out, "\n") != 4 {
		t.Errorf("ls printed %q", out)
	}
	r.refused("state", "ls", "--state", "sleeping")
}

func TestSeveralNamesAreAllTried(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("create", "b")
	got := r.doze("sleep", "a", "missing", "b", "gone")
	if got.code != exitFailed || got.out != "a  asleep\nb  asleep\n" || strings.Count(got.err, "sandbox_not_found") != 2 {
		t.Errorf("got %+v", got)
	}
}

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
	testkit.Eventually(t, "the command's child is gone", func() bool { return !alive(pid) })
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !bytes.Contains(stat, []byte(") Z ")) && syscall.Kill(pid, 0) == nil
}

func TestBackgroundProcesses(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.refused("has had no background processes", "logs", "a", "web")
	out := r.ok("exec", "-d", "--name", "web", "--restart", "on_wake", "a", "-c", "echo up; echo oops >&2; sleep 1000")
	if !regexp.MustCompile(`^p-[a-z0-9]{8}  web\n$`).MatchString(out) {
		t.Errorf("exec -d printed %q", out)
	}
	if out := r.ok("ps", "a"); !regexp.MustCompile(`(?m)^p-[a-z0-9]{8} +web +\d+ +running +on_wake +\d+s +echo up`).MatchString(out) {
		t.Errorf("ps printed %q", out)
	}
	testkit.Eventually(t, "the output is stored", func() bool {
		got := r.doze("logs", "a", "web")
		return got == result{out: "up\n", err: "oops\n"}
	})
	r.refused("web (p-", "logs", "a", "wep")
	if out := r.ok("logs", "--json", "a", "web"); !strings.Contains(out, `{"stream":"stdout","data":"up\n"}`) {
		t.Errorf("logs --json printed %q", out)
	}
	follower := r.program("logs", "-f", "a", "web")
	var followed, end bytes.Buffer
	follower.Stdout, follower.Stderr = &followed, &end
	if err := follower.Start(); err != nil {
		t.Fatal(err)
	}
	if out := r.ok("kill", "a", "web"); !regexp.MustCompile(`^p-[a-z0-9]{8}  web  exited \(SIG\w+\)\n$`).MatchString(out) {
		t.Errorf("kill printed %q", out)
	}
	if err := follower.Wait(); err != nil || followed.String() != "up\n" {
		t.Errorf("logs -f: %v, %q, %q", err, followed.String(), end.String())
	}
	r.refused("process_not_found: ", "kill", "a", "99999999")
}

func TestPreviews(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.refused("doze expose a PORT", "open", "a")
	out := r.ok("expose", "a", "3000", "--access", "public", "--wake", "never", "--host-header", "preserve", "--protocol", "h2c", "--websocket", "keep_awake")
	if !regexp.MustCompile(`^https://\S+\n$`).MatchString(out) {
		t.Errorf("expose printed %q", out)
	}
	port := decodeJSON[types.Port](t, r.ok("open", "a", "--json"))
	if port.Access != "public" || port.Wake != "never" || port.HostHeader != "preserve" || port.Protocol != "h2c" || port.WebSocket != "keep_awake" {
		t.Errorf("got %+v", port)
	}
	if got := r.ok("open", "a"); got != out {
		t.Errorf("open printed %q, want %q", got, out)
	}
	r.ok("expose", "a", "3001")
	r.refused("name the port: 3000,3001", "open", "a")
	r.refused("port 9 of a", "open", "a", "9")
	r.misused("use 1 to 65535", "expose", "a", "70000")
	r.refused("access", "expose", "a", "80", "--access", "secret")
	r.misused("--remove and --access exclude", "expose", "a", "3000", "--remove", "--access", "public")
	r.misused("--remove and --wait-timeout exclude", "expose", "a", "3000", "--remove", "--wait-timeout", "1s")
	if out := r.ok("expose", "a", "3000", "--remove"); out != "3000  closed\n" {
		t.Errorf("expose --remove printed %q", out)
	}
	if closed := decodeJSON[types.Port](t, r.ok("expose", "a", "3001", "--remove", "--json")); closed.Port != 3001 {
		t.Errorf("got %+v", closed)
	}
	r.refused("port_not_exposed: ", "expose", "a", "3000", "--remove")
}

func TestEventsFollowUntilDestroyed(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("sleep", "a")
	if out := r.ok("events", "a"); !regexp.MustCompile(`(?m) created .*\n.* slept `).MatchString(out) {
		t.Errorf("events printed %q", out)
	}
	follower := r.program("events", "-f", "--json", "a")
	out := r.output(follower)
	r.ok("wake", "a")
	var seen []string
	lines := json.NewDecoder(out)
	for {
		var e types.Event
		if err := lines.Decode(&e); err != nil {
			break
		}
		seen = append(seen, string(e.Type))
		if e.Type == "woke" {
			r.ok("rm", "a")
		}
	}
	if err := follower.Wait(); err != nil {
		t.Error(err)
	}
	if got := strings.Join(seen, " "); !strings.HasSuffix(got, "slept woke destroyed") {
		t.Errorf("got events %s", got)
	}
}

func TestEventsOfAllSandboxes(t *testing.T) {
	r := newRig(t)
	if out := r.ok("events", "--json"); !strings.Contains(out, `"events": []`) {
		t.Errorf("without events it printed %s", out)
	}
	r.ok("create", "a")
	r.ok("create", "b")
	r.ok("sleep", "a")
	if out := r.ok("events"); !regexp.MustCompile(`(?m) a +created .*\n.* b +created .*\n.* a +slept `).MatchString(out) {
		t.Errorf("events printed %q", out)
	}
	follower := r.program("events", "-f", "--json")
	out := r.output(follower)
	r.ok("wake", "a")
	r.ok("rm", "b")
	var seen []string
	for lines := json.NewDecoder(out); len(seen) < 5; {
		var e types.FeedEvent
		if err := lines.Decode(&e); err != nil {
			t.Fatalf("after %q: %v", seen, err)
		}
		seen = append(seen, string(e.Type)+" "+e.SandboxName)
	}
	if err := follower.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = follower.Wait() // ended by a signal
	if got := strings.Join(seen, ", "); got != "created a, created b, slept a, woke a, destroyed b" {
		t.Errorf("got %s", got)
	}
}

func TestUpdate(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "--ttl", "24h")
	if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); time.Duration(sb.TTL) != 24*time.Hour || sb.ExpiresAt.IsZero() {
		t.Errorf("created with ttl %s, expires at %s", time.Duration(sb.TTL), sb.ExpiresAt)
	}
	r.ok("update", "a", "--name", "b", "--label", "team=web", "--ttl", "0s")
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "b", "--json"))
	if sb.Labels["team"] != "web" || sb.TTL != 0 || !sb.ExpiresAt.IsZero() {
		t.Errorf("got labels %v, ttl %s, expires at %s", sb.Labels, time.Duration(sb.TTL), sb.ExpiresAt)
	}
	r.misused("nothing to change", "update", "b")
	r.refused("ttl", "update", "b", "--ttl", "1ms")
}

func TestPersistIsSet(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "--persist", "none")
	r.ok("update", "a", "--persist", "disk")
	if out := r.ok("show", "a"); !regexp.MustCompile(`(?m)^persists +disk$`).MatchString(out) {
		t.Errorf("show printed %q", out)
	}
	if out := r.ok("sleep", "a"); out != "a  stopped\n" {
		t.Errorf("sleep printed %q", out)
	}
	r.refused("persist", "update", "a", "--persist", "ram")
}

func TestTopOnce(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("sleep", "a")
	r.ok("wake", "a")
	out := r.ok("top", "--once")
	if !regexp.MustCompile(`(?m)^a +running +\d+s +- +1\.0 MiB +1 `).MatchString(out) || !strings.Contains(out, "1 running") {
		t.Errorf("top printed %q", out)
	}
	decodeJSON[reading](t, r.ok("top", "--json"))
	r.misused("too short", "top", "--interval", "1ms")
}

// The commands whose help promises it wake no sandbox.
func TestReadingWakesNothing(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	r.ok("expose", "a", "3000")
	r.ok("exec", "-d", "--name", "p", "a", "--", "sleep", "1000")
	r.ok("session", "create", "a", "dev")
	r.ok("sleep", "a")
	lines := commandLines(t, t.TempDir(), "")
	lines["top"] = "top --once"
	reading := []string{"open a", "shell --list a", "files url a:/f", "egress rules a", "egress explain a GET https://a.example/"}
	for name, cmd := range commands((&app{getenv: os.Getenv}).rootCommand()) {
		if !strings.Contains(cmd.Long, "never wakes") {
			continue
		}
		if lines[name] == "" {
			t.Errorf("doze %s is not tested", name)
			continue
		}
		reading = append(reading, lines[name])
	}
	for _, line := range reading {
		r.ok(strings.Fields(line)...)
		if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); sb.State != types.StateAsleep {
			t.Fatalf("doze %s woke it: %s", line, sb.State)
		}
	}
	if len(reading) < 15 {
		t.Errorf("only %d commands are tested: %q", len(reading), reading)
	}
}

func TestEnv(t *testing.T) {
	r := newRig(t)
	home := filepath.Join(t.TempDir(), "it's")
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	r.env["DOZE_HOME"], r.env["DOZE_HTTPS_PORT"] = home, "94430"
	r.refused(`DOZE_HTTPS_PORT: invalid port "94430"`, "env")
	r.env["DOZE_HTTPS_PORT"] = "9443"
	r.refused("start the node", "env")
	if err := os.WriteFile(filepath.Join(home, "token"), []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ca := home + "/caddy/pki/authorities/local/root.crt"
	want := "https://127.0.0.1:9443/api/v1|secret|" + ca + "|" + ca
	print := `printf '%s|%s|%s|%s' "$DOZE_API" "$DOZE_TOKEN" "$DOZE_CA" "$NODE_EXTRA_CA_CERTS"`
	// Without a CA, nothing else can be said.
	got := r.doze("env")
	if got.code != 0 || !strings.Contains(got.err, "SSL_CERT_FILE, CURL_CA_BUNDLE and REQUESTS_CA_BUNDLE are omitted") {
		t.Errorf("got %+v", got)
	}
	if out, err := exec.Command("sh", "-c", got.out+print).Output(); err != nil || string(out) != want {
		t.Errorf("got %q, %v; want %q", out, err, want)
	}
}

// trustedServer is a server like a node's, whose folder home is.
func trustedServer(t *testing.T, r *rig) *httptest.Server {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	t.Cleanup(server.Close)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that fail
	home := t.TempDir()
	authority := filepath.Join(home, "caddy/pki/authorities/local")
	if err := os.MkdirAll(authority, 0o700); err != nil {
		t.Fatal(err)
	}
	tree{"root.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))}.write(t, authority)
	tree{"token": "secret"}.write(t, home)
	_, port, _ := net.SplitHostPort(server.Listener.Addr().String())
	r.env["DOZE_HOME"], r.env["DOZE_HTTPS_PORT"] = home, port
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	return server
}

// Clients that every machine of the tests has; test/up/run has requests and httpx too.
func TestProgramsTrustTheNodeByWhatEnvPrints(t *testing.T) {
	r := newRig(t)
	trustedServer(t, r)
	clients := map[string]string{
		"curl":   `curl -fsS "$DOZE_API"`,
		"Python": `python3 -c 'import os, urllib.request as u; print(u.urlopen(os.environ["DOZE_API"]).read().decode(), end="")'`,
		"Node":   `node -e 'fetch(process.env.DOZE_API).then(r => r.text()).then(t => process.stdout.write(t))'`,
	}
	for name, command := range clients {
		address := `export DOZE_API=https://127.0.0.1:` + r.env["DOZE_HTTPS_PORT"] + "/api/v1\n"
		if out, err := exec.Command("sh", "-c", address+command).Output(); err == nil {
			t.Errorf("%s trusts the node without these variables: %q", name, out)
		}
		if out, err := exec.Command("sh", "-c", r.ok("env")+command).CombinedOutput(); err != nil || string(out) != "hello" {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

func TestOtherHostsAreTrustedAsBefore(t *testing.T) {
	r := newRig(t)
	trustedServer(t, r)
	count := func(file string) int {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "BEGIN CERTIFICATE")
	}
	variables := func() map[string]string { return decodeJSON[map[string]string](t, r.ok("env", "--json")) }
	first := variables()
	bundle := first["SSL_CERT_FILE"]
	if system := count("/etc/ssl/certs/ca-certificates.crt"); system == 0 || count(bundle) != system+1 {
		t.Errorf("%d authorities in the system's bundle and %d in %s", system, count(bundle), bundle)
	}
	if first["CURL_CA_BUNDLE"] != bundle || first["REQUESTS_CA_BUNDLE"] != bundle || filepath.Dir(filepath.Dir(bundle)) != os.Getenv("XDG_CACHE_HOME") {
		t.Errorf("got %v", first)
	}
	// The bundle that doze wrote is not one to add to.
	r.env["SSL_CERT_FILE"] = bundle
	before := count(bundle)
	if variables(); count(bundle) != before {
		t.Errorf("the bundle has grown from %d to %d authorities", before, count(bundle))
	}
	// One that the user has set is.
	mine := filepath.Join(t.TempDir(), "mine.pem")
	tree{"mine.pem": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("mine")}))}.write(t, filepath.Dir(mine))
	r.env["CURL_CA_BUNDLE"] = mine
	if variables(); count(bundle) != 2 {
		t.Errorf("%d authorities, want the user's and the node's", count(bundle))
	}
}

func TestRefusalsNameTheRemedy(t *testing.T) {
	r := newRig(t)
	r.misused(`unknown command "slep"; did you mean sleep`, "slep")
	r.misused("doze ls --help", "ls", "--stat", "x")
	r.misused(`unexpected argument "b"; usage: doze create [NAME]`, "create", "a", "b")
	r.misused("PORT is missing; usage: doze expose SANDBOX PORT", "expose", "a")
	r.refused("name_invalid: ", "create", "No_Such")
	r.misused("write --label KEY=VALUE", "create", "a", "--label", "x")
	r.misused("invalid duration", "hold", "a", "soon")
	r.env["DOZE_TOKEN"] = "two words"
	r.refused("copy it again", "ls")
	r.env["DOZE_TOKEN"] = "wrong"
	r.refused("unauthorized: ", "ls")
	r.env["DOZE_TOKEN"] = ""
	r.env["DOZE_API"] = "https://node.example.com/api/v1"
	r.refused("set DOZE_TOKEN", "ls")
	r.env["DOZE_TOKEN"], r.env["DOZE_API"] = "x", "http://127.0.0.1:1/api/v1"
	r.refused("does not respond", "ls")
}

func TestHelpAndVersion(t *testing.T) {
	r := newRig(t)
	for _, args := range []string{"help nosuch", "help egress nosuch"} {
		got := r.doze(strings.Fields(args)...)
		if got.code != usage.ExitCode || got.out != "" || !strings.Contains(got.err, `unknown command "`+strings.TrimPrefix(args, "help ")+`"`) {
			t.Errorf("doze %s: %+v", args, got)
		}
	}
	for _, args := range []string{"exec", "egress rules"} {
		if help, flag := r.ok(append([]string{"help"}, strings.Fields(args)...)...), r.ok(append(strings.Fields(args), "--help")...); help != flag {
			t.Errorf("doze help %s and doze %s --help differ:\n%s\n%s", args, args, help, flag)
		}
	}
	if long, short := r.ok("version"), r.ok("--version"); long != short || !strings.HasPrefix(long, "doze ") {
		t.Errorf("%q and %q", long, short)
	}
}

func TestPoliciesOfDozeCannotBeRemoved(t *testing.T) {
	r := newRig(t)
	r.refused("policy_built_in: policy "+egresstest.BuiltIn+": the policy is part of doze; only pushed policies can be deleted", "policy", "rm", egresstest.BuiltIn)
	r.refused("policy_not_found: ", "policy", "rm", "nope")
}

func TestErrorsNameTheSandboxAsTheCallerDid(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	sb := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json"))
	lease, err := r.node.Manager.Acquire(t.Context(), sandbox.ID(sb.ID), sandbox.CauseExec)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release()
	for _, name := range []string{"shop", sb.ID} {
		if got := r.doze("sleep", name); got.code != exitFailed || !strings.Contains(got.err, name) || !strings.Contains(got.err, "has 1 request in flight") {
			t.Errorf("doze sleep %s: %+v", name, got)
		}
	}
}

func TestCompletionsAreNamesOfSandboxes(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.ok("create", "show")
	r.ok("exec", "-d", "--name", "web", "shop", "--", "sleep", "1000")
	r.ok("expose", "shop", "3000")
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"sleep", "sh"}, "shop show :4"},
		{[]string{"sleep", "shop", "sh"}, "show :4"},
		{[]string{"logs", "shop", "w"}, "web :4"},
		{[]string{"cp", "sho"}, "shop: show: :2"},
		{[]string{"expose", "a", "--access", ""}, "token public :4"},
		{[]string{"open", "shop", ""}, "3000 :4"},
		{[]string{"open", "shop", "3000", ""}, ":4"},
		{[]string{"create", "x", "--image", "b"}, "base :4"},
		{[]string{"create", "x", "--size", "b"}, "basic :4"},
		{[]string{"kill", "shop", "--signal", ""}, "HUP INT QUIT KILL USR1 USR2 TERM CONT STOP :4"},
		{[]string{"cp", "shop:/x", "y", ""}, ":4"},
		{[]string{"cp", "./", ""}, "shop: show: :2"},
		{[]string{"files", "url", "sho"}, "shop: show: :2"},
		{[]string{"ls", ""}, ":4"},
		{[]string{"exec", "shop", ""}, ":4"},
		{[]string{"run", ""}, ":0"},
	} {
		out := r.ok(append([]string{"__completeNoDesc"}, tt.args...)...)
		if got := strings.Join(strings.Fields(out), " "); got != tt.want {
			t.Errorf("completing %v: got %q, want %q", tt.args, got, tt.want)
		}
	}
	r.env["DOZE_API"] = "http://127.0.0.1:1"
	r.ok("__completeNoDesc", "sleep", "")
}

func TestWhatASandboxSaysDoesNotDriveTheTerminal(t *testing.T) {
	const evil = "\x1b]0;owned\x07\x1b[2J\u202e\u009b2J\x7f\U000e0001\nname"
	process := types.Process{ID: evil, PID: 1, Name: evil, Command: evil, Cwd: evil, Restart: evil, State: evil, Signal: evil, LogFile: evil}
	event := types.Event{Seq: 1, Type: evil, Kind: evil, Cause: evil, Reason: evil, Progress: evil, Process: &process}
	sb := types.Sandbox{ID: "k3f9x2m7q1az", Name: "a", State: evil, StateReason: evil, Processes: []types.Process{process},
		Labels: map[string]string{"a": evil}, Env: map[string]string{"A": evil}, Image: evil}
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		route := path.Base(req.URL.Path)
		switch {
		case req.Header.Get("Accept") == "text/event-stream":
			w.Header().Set("Content-Type", "text/event-stream")
			if route == "events" {
				event.Type = "destroyed"
			}
			text, _ := json.Marshal(map[string]any{"events": event, "logs": process}[route])
			fmt.Fprintf(w, "event: %s\ndata: %s\n\n", map[string]string{"events": "destroyed", "logs": "exit"}[route], text)
		case route == "absent":
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusNotFound)
			json.NewEncoder(w).Encode(map[string]any{"code": evil, "detail": evil, "errors": []problem.FieldError{{Location: evil}, {Message: evil}}})
		case route == "a", route == "sleep":
			json.NewEncoder(w).Encode(sb)
		case route == "exec":
			complete, _ := json.Marshal(map[string]any{"type": "complete", "signal": evil})
			respondExec(w, req, evil, string(complete))
		case route == "process", route == "1":
			json.NewEncoder(w).Encode(process)
		case route == "expose":
			json.NewEncoder(w).Encode(types.Port{URL: evil})
		default:
			json.NewEncoder(w).Encode(map[string]any{"processes": []types.Process{process}, "events": []types.Event{event},
				"sandboxes": []types.Sandbox{sb}, "engine": types.EngineStatus{Error: evil}, "id": evil})
		}
	})
	for _, args := range []string{
		"ps a", "ls", "ls -q", "show a", "show absent", "events a", "events -f a", "logs -f a 1", "kill a absent", "kill a 1", "exec -d a true",
		"sleep a", "create a", "expose a 80", "open a 80", "top --once", "__complete kill a x", "__complete logs a \x1b",
		"ps a --json", "ls --json", "show a --json", "events a --json", "events -f a --json", "logs -f a 1 --json", "kill a 1 --json",
		"exec -d a true --json", "exec --json a true", "top --json", "expose a 80 --json",
	} {
		got := r.doze(strings.Split(args, " ")...)
		if got.out+got.err == "" || strings.ContainsAny(got.out+got.err, "\x1b\x07\u202e\u009b\x7f\U000e0001") {
			t.Errorf("doze %s printed %q and %q", args, got.out, got.err)
		}
		if strings.HasPrefix(args, "show a --json") && decodeJSON[types.Sandbox](t, got.out).Env["A"] != evil {
			t.Errorf("JSON has lost something: %q", got.out)
		}
	}
	if out := r.ok("ps", "a"); strings.Count(out, "\n") != 2 {
		t.Errorf("ps printed %q", out)
	}
}

// fakeNode is a rig with another node than the real one.
func fakeNode(t *testing.T, answer http.HandlerFunc) *rig {
	t.Helper()
	node := httptest.NewServer(answer)
	t.Cleanup(node.Close)
	return &rig{t: t, server: node, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
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

func TestLogsReportGaps(t *testing.T) {
	r := fakeNode(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: stdout\ndata: {\"data\":\"x\"}\n\nevent: dropped\ndata: {\"bytes\":2048}\n\n")
	})
	got := r.doze("logs", "-f", "a", "1")
	if got.code != exitFailed || got.out != "x" || !strings.Contains(got.err, "2.0 KiB of output were overwritten") || !strings.Contains(got.err, "ended before the process") {
		t.Errorf("got %+v", got)
	}
	if got := r.doze("logs", "-f", "--json", "a", "1"); !strings.Contains(got.out, `{"dropped":{"bytes":2048}}`) {
		t.Errorf("got %+v", got)
	}
}

// TestUnwrittenOutputIsAnError writes to a disk that is full.
func TestUnwrittenOutputIsAnError(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	if err := os.WriteFile(filepath.Join(r.env["DOZE_HOME"], "token"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range []string{"ls", "ls -q", "ls --json", "show a", "ps a", "events a", "events -f a", "env", "top --once", "version", "sleep a", "exec a -- echo x"} {
		var errs bytes.Buffer
		a := &app{in: strings.NewReader(""), out: full, err: &errs, getenv: func(key string) string { return r.env[key] }}
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
		code := a.run(ctx, strings.Fields(args))
		cancel()
		want := exitFailed
		if strings.HasPrefix(args, execName) {
			want = exitExecFailed
		}
		if code != want || !strings.Contains(errs.String(), "no space left") {
			t.Errorf("doze %s: got exit code %d and %q", args, code, errs.String())
		}
	}
}

func TestUntrustedNodeIsSaidToBeOne(t *testing.T) {
	node := httptest.NewTLSServer(http.NotFoundHandler())
	defer node.Close()
	node.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshake
	r := &rig{t: t, env: map[string]string{"DOZE_API": node.URL, "DOZE_TOKEN": "x", "DOZE_HOME": t.TempDir()}}
	r.refused("DOZE_CA or --ca names the file", "ls")
}

func TestContainerInQuarantineIsAdoptedOrRemoved(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"a", "b"} {
		r.loseRecord(decodeJSON[types.Sandbox](t, r.ok("create", name, "--json")).ID)
		r.ok("create", name) // another of that name
		id := string(r.node.Manager.Info(t.Context()).Quarantined[0].ID)
		r.refused("quarantine_not_found: ", "rm", "--quarantined", name)
		r.refused("sandbox_conflict: ", "adopt", id)
		if name == "a" {
			if out := r.ok("adopt", id, "--name", "again"); out != "again  stopped\n" {
				t.Errorf("adopt: %q", out)
			}
			r.ok("exec", "again", "--", "true")
		} else if out := r.ok("rm", "--quarantined", id); out != id+"  destroyed\n" {
			t.Errorf("rm: %q", out)
		}
		r.refused("quarantine_not_found: ", "adopt", id)
		r.ok("rm", "-f", "--quarantined", id)
		r.ok("show", name)
	}
}

// commandLines are how each command that speaks to the node is called, with files in
// dir, and with a container in quarantine.
func commandLines(t *testing.T, dir, lost string) map[string]string {
	t.Helper()
	rules, module := dir+"/rules.json", dir+"/p.wasm"
	tree{"rules.json": "[]", "p.wasm": string(egresstest.Module(1)), "value": canary}.write(t, dir)
	origin, clone := dir+"/origin.git", dir+"/clone"
	if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", "--bare", "-b", "main", origin).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return map[string]string{
		"git clone": "git clone a file://" + origin + " " + clone, "git commit": "git commit a " + clone + " -m x --allow-empty --name a --email a@example.com",
		"git push": "git push a " + clone, "git pull": "git pull a " + clone, "git status": "git status a " + clone, "git diff": "git diff a " + clone,
		"git log": "git log a " + clone, "git branches": "git branches a " + clone, "git checkout": "git checkout a " + clone + " main",
		"create": "create a", "ls": "ls", "show": "show a", "sleep": "sleep a", "wake": "wake a", "hold": "hold a 0s", "update": "update a --sleep-after 5m", "adopt": "adopt " + lost, "fork": "fork a b", "restore": "restore a s",
		"snapshot create": "snapshot create a s", "snapshot ls": "snapshot ls", "snapshot rm": "snapshot rm s", "events": "events a", "top": "top",
		"exec": "exec a true", "shell": "shell --list a", "cp": "cp " + dir + "/f a:" + dir + "/g", "files url": "files url a:/f", "ps": "ps a", "wait": "wait a web log=x", "ports": "ports a", "logs": "logs a web", "kill": "kill a web",
		"files stat": "files stat a:/", "files find": "files find a:" + dir, "files grep": "files grep a:" + dir + " x",
		"session create": "session create a dev", "session ls": "session ls a", "session interrupt": "session interrupt a dev", "session rm": "session rm a dev",
		"code": "code a print", "context create": "context create a python calc", "context ls": "context ls a", "context interrupt": "context interrupt a calc",
		"context restart": "context restart a calc", "context rm": "context rm a calc",
		"expose": "expose a 80", "open": "open a", "stop": "stop a", "rm": "rm a", "env": "env", "version": "version",
		"egress rules": "egress rules a --set " + rules, "egress flows": "egress flows a", "egress explain": "egress explain a GET https://a.example/", "egress ca": "egress ca",
		"egress presets": "egress presets", "policy push": "policy push p " + module, "policy ls": "policy ls", "policy logs": "policy logs p", "policy rm": "policy rm p",
		"secret set": "secret set s --host a.example --from-file " + dir + "/value", "secret ls": "secret ls", "secret rm": "secret rm s",
	}
}

// commands are all commands by the words that call them, without the commands of the
// node's program.
func commands(of *cobra.Command) map[string]*cobra.Command {
	all := map[string]*cobra.Command{}
	for _, sub := range of.Commands() {
		if sub.DisableFlagParsing {
			continue
		}
		all[sub.Name()] = sub
		for name, cmd := range commands(sub) {
			all[sub.Name()+" "+name] = cmd
		}
	}
	return all
}

// failure is the exit code of a command that fails, of exec and shell the one that is not the
// program's.
func failure(name string, code int) int {
	if name == execName || name == shellName {
		return exitExecFailed
	}
	return code
}

func TestWrongCommandLinesHaveOneExitCode(t *testing.T) {
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir()}}
	all := commands((&app{getenv: os.Getenv}).rootCommand())
	if len(all) < 40 {
		t.Fatalf("there are %d commands", len(all))
	}
	wrong := func(name string, args ...string) {
		t.Helper()
		got := r.doze(append(strings.Fields(name), args...)...)
		if want := failure(name, usage.ExitCode); got.code != want || got.out != "" || !strings.HasPrefix(got.err, "doze: ") {
			t.Errorf("doze %s %s: exit code %d, want %d; output %q, error %q", name, strings.Join(args, " "), got.code, want, got.out, got.err)
		}
	}
	many := slices.Repeat([]string{"x"}, 30)
	wrong("no-such-command")
	wrong("--no-such-flag")
	for name, cmd := range all {
		wrong(name, "--no-such-flag")
		if cmd.HasSubCommands() {
			wrong(name, "no-such-command")
		}
		if cmd.Args != nil && cmd.Args(cmd, many) != nil {
			wrong(name, many...)
		}
		if cmd.Args != nil && cmd.Args(cmd, nil) != nil {
			wrong(name)
		}
	}
}

func TestFailuresHaveOneExitCode(t *testing.T) {
	r := &rig{t: t, env: map[string]string{"DOZE_HOME": t.TempDir(), "DOZE_API": "http://127.0.0.1:1/api/v1", "DOZE_TOKEN": "x"}}
	dir := t.TempDir()
	tree{"f": "x"}.write(t, dir)
	for name, line := range commandLines(t, dir, "aaaaaaaaaaaa") {
		if name == "env" || name == "version" { // need no node
			continue
		}
		got := r.doze(strings.Fields(line)...)
		if want := failure(name, exitFailed); got.code != want || !strings.HasPrefix(got.err, "doze: ") {
			t.Errorf("doze %s: exit code %d, want %d; output %q, error %q", line, got.code, want, got.out, got.err)
		}
	}
}

func TestEveryCommandHasJSON(t *testing.T) {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
	r := newRig(t)
	if err := os.WriteFile(filepath.Join(r.env["DOZE_HOME"], "token"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tree{"f": "x"}.write(t, dir)
	r.ok("create", "a")
	lost := decodeJSON[types.Sandbox](t, r.ok("create", "lost", "--json")).ID
	r.loseRecord(lost)
	r.ok("exec", "-d", "--name", "web", "a", "--", "sh", "-c", "echo x; sleep 1000")
	testkit.Eventually(t, "the process has said something", func() bool { return r.ok("logs", "a", "web") != "" })
	lines := commandLines(t, dir, lost)
	order := strings.Split("create,adopt,ls,show,sleep,wake,hold,update,events,top,exec,shell,session create,session ls,session interrupt,session rm,code,context create,context ls,context interrupt,context restart,context rm,cp,files url,files stat,files find,files grep,ps,wait,ports,logs,kill,expose,open,egress rules,egress flows,egress explain,egress ca,"+
		"egress presets,policy push,policy ls,policy logs,policy rm,secret set,secret ls,secret rm,snapshot create,snapshot ls,fork,restore,snapshot rm,stop,rm,env,version", ",") // in which all succeed
	inGit := strings.Split("git clone,git commit,git push,git pull,git status,git diff,git log,git branches,git checkout", ",")
	order = slices.Insert(order, slices.Index(order, "stop"), inGit...)
	var check func(path string, cmd *cobra.Command)
	check = func(path string, cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			name := strings.TrimSpace(path + " " + sub.Name())
			switch {
			case name == "completion" || name == "help":
			case name == "policy new" || name == "policy dev" || name == "policy build" || name == "policy test" || name == "watch": // have tests of their own
			case sub.HasSubCommands():
				check(name, sub)
			case !slices.Contains(order, name) && !sub.DisableFlagParsing:
				t.Errorf("this test does not call the command %s", name)
			}
		}
	}
	check("", (&app{getenv: os.Getenv}).rootCommand())
	for _, name := range order {
		got := r.doze(append(strings.Fields(lines[name]), "--json")...)
		if !json.Valid([]byte(got.out)) || got.code != 0 {
			t.Errorf("doze %s --json: exit code %d, output %q, error %q", lines[name], got.code, got.out, got.err)
		}
	}
}

func TestUpdateChangesTheEnvironment(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a", "-e", "A=1", "-e", "B=1")
	r.ok("update", "a", "-e", "A=2", "--env", "C=x=y", "--unset", "B")
	if out := r.ok("exec", "a", "-c", `echo "[$A][$B][$C]"`); out != "[2][][x=y]\n" {
		t.Errorf("got %q", out)
	}
	r.ok("update", "a", "--unset", "C", "--ttl", "1h")
	if sb := decodeJSON[types.Sandbox](t, r.ok("show", "a", "--json")); len(sb.Env) != 1 || sb.Env["A"] != "2" || sb.ExpiresAt.IsZero() {
		t.Errorf("got %+v", sb)
	}
	r.ok("create", "taken")
	r.refused("sandbox_conflict", "update", "a", "-e", "A=3", "--name", "taken")
	if out := r.ok("exec", "a", "-c", `echo "[$A]"`); out != "[2]\n" {
		t.Errorf("a refused update changed the environment: %q", out)
	}
	r.refused("only the environment was not changed: request_invalid", "update", "a", "--env", "A="+strings.Repeat("x", 65<<10), "--name", "b")
	r.ok("update", "b", "--name", "a", "-e", "A=4")
	if out := r.ok("exec", "a", "-c", `echo "[$A]"`); out != "[4]\n" {
		t.Errorf("got %q", out)
	}
	if got := r.doze("update", "a", "-e", "A=3", "--unset", "A"); got.code == 0 || !strings.Contains(got.err, "both name A") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
}

func TestSessionsKeepTheirState(t *testing.T) {
	r := newRig(t)
	r.ok("create", "a")
	if out := r.ok("session", "create", "a", "dev", "--cwd", "/usr", "-e", "A=1"); out != "dev\n" {
		t.Errorf("created %q", out)
	}
	r.ok("exec", "--session", "dev", "a", "-c", "cd lib; A=2; set -- p q")
	if out := r.ok("exec", "--session", "dev", "a", "-c", `pwd; echo $A $2; echo err >&2`); out != "/usr/lib\n2 q\n" {
		t.Errorf("got %q", out)
	}
	if out := r.ok("session", "ls", "a"); !regexp.MustCompile(`(?m)^dev +(ba)?sh +\d+ +running +\d+s +/usr$`).MatchString(out) {
		t.Errorf("listed %q", out)
	}
	term := testterm.New(t, 80, 24)
	r.start(term, "shell", "--session", "dev", "a", "--", "pwd; echo from=$A; exit 4")
	term.Shows("/usr/lib\nfrom=2")
	term.ExpectExit(4)
	r.refusedWith(exitExecFailed, "--web excludes", "shell", "--web", "--session", "dev", "a")
	if got := r.doze("exec", "--session", "dev", "a", "-c", "exit 7"); got.code != 7 {
		t.Errorf("exit code %d", got.code)
	}
	if got := r.doze("exec", "--session", "dev", "a", "-c", "true"); got.code != 125 || !strings.Contains(got.err, "exited with code 7") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
	if got := r.doze("exec", "--session", "dev", "--cwd", "/", "a", "-c", "true"); got.code != 125 || !strings.Contains(got.err, "cd and export") {
		t.Errorf("exit code %d, error %q", got.code, got.err)
	}
	r.ok("session", "rm", "a", "dev")
}

func TestCodeKeepsItsState(t *testing.T) {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
	r := newRig(t)
	r.ok("create", "a")
	r.ok("code", "a", "set x 7")
	if got := r.doze("code", "a", "print out\nwarn err\nget x"); got.out != "out\n7\n" || got.err != "err\n" || got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := r.doze("code", "a", "raise Error broken"); got.code != 1 || !strings.Contains(got.err, "broken") || strings.Contains(got.err, "\x1b") {
		t.Errorf("%+v", got)
	}
	if got := r.doze("code", "a", "--timeout", "50ms", "loop"); got.code != 1 || !strings.Contains(got.err, "exceeded its timeout") {
		t.Errorf("%+v", got)
	}
	folder := t.TempDir()
	if out := r.ok("code", "a", "--save", folder, "show text/html <b>rich</b>\nshow image/png aGk="); out != folder+"/result-1.html\n"+folder+"/result-2.png\n" {
		t.Errorf("saved %q", out)
	}
	if b, err := os.ReadFile(folder + "/result-2.png"); string(b) != "hi" || err != nil {
		t.Errorf("saved %q, %v", b, err)
	}
	if out := r.ok("code", "a", "show text/html <b>rich</b>\nupdate new"); out != "rich\nnew\n" {
		t.Errorf("printed %q", out)
	}
	if out := r.ok("context", "create", "a", "typescript", "ts"); out != "ts\n" {
		t.Errorf("created %q", out)
	}
	if result := decodeJSON[types.CodeResult](t, r.ok("code", "a", "--context", "ts", "--json", "value 2")); len(result.Results) != 1 || result.Results[0].Data["text/plain"] != "2" {
		t.Errorf("%+v", result)
	}
	if out := r.ok("context", "ls", "a"); !regexp.MustCompile(`(?m)^ts +typescript +p-\w{8} +running`).MatchString(out) {
		t.Errorf("listed %q", out)
	}
	r.ok("context", "restart", "a", "python")
	if got := r.doze("code", "a", "get x"); got.code != 1 || !strings.Contains(got.err, "not defined") {
		t.Errorf("%+v", got)
	}
	r.ok("context", "interrupt", "a", "python")
	r.ok("context", "rm", "a", "ts")
	if got := r.doze("code", "a", "--context", "ts", "value 2"); got.code == 0 || !strings.Contains(got.err, "no context") {
		t.Errorf("%+v", got)
	}
}

func TestUpdatedValuesReplaceTheirFiles(t *testing.T) {
	var values []types.CodeValue
	add := func(update bool, id string, data map[string]any) {
		data["text/plain"] = id
		values = append(values, types.CodeValue{DisplayID: id, Update: update, Data: data})
	}
	add(false, "text", map[string]any{})
	add(false, "a", map[string]any{"text/html": "1"})
	add(false, "b", map[string]any{"text/html": "2"})
	for range 100 {
		add(true, "a", map[string]any{"text/html": "later"})
	}
	add(true, "b", map[string]any{"image/png": "aGk="})
	add(false, "", map[string]any{"text/html": "4"})
	add(true, "", map[string]any{"text/html": "5"}) // updates no other value
	r := fakeNode(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, v := range values {
			text, _ := json.Marshal(v)
			fmt.Fprintf(w, "event: result\ndata: %s\n\n", text)
		}
		fmt.Fprint(w, "event: complete\ndata: {}\n\n")
	})
	folder := t.TempDir()
	want := strings.ReplaceAll("text\n/result-1.html\n/result-2.html\n/result-2.png\n/result-3.html\n/result-4.html\n", "/", folder+"/")
	if out := r.ok("code", "a", "--save", folder, "x"); out != want {
		t.Errorf("printed %q, not %q", out, want)
	}
	got := map[string]string{}
	files, _ := filepath.Glob(folder + "/*")
	for _, file := range files {
		b, _ := os.ReadFile(file)
		got[filepath.Base(file)] = string(b)
	}
	testkit.Diff(t, "the files", map[string]string{"result-1.html": "later", "result-2.png": "hi", "result-3.html": "4", "result-4.html": "5"}, got)
}

// Code that ignores the interrupt exceeds its timeout without an exception.
func TestCodeThatExceedsItsTimeoutFails(t *testing.T) {
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		end := types.CodeEnd{TimedOut: true}
		if req.Header.Get("Accept") == "text/event-stream" {
			text, _ := json.Marshal(types.CodeComplete{CodeEnd: end})
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "event: complete\ndata: %s\n\n", text)
			return
		}
		json.NewEncoder(w).Encode(types.CodeResult{CodeEnd: end})
	})
	for _, flag := range []string{"--json", "--json=false"} {
		if got := r.doze("code", "a", flag, "x"); got.code != 1 {
			t.Errorf("%s: %+v", flag, got)
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
