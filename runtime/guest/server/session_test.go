package server_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

// withShell is the environment of a session whose image has no bash, and the program as sh.
func withShell(t *testing.T, program string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"cat", "sleep", "wc", "env", "ls", "setsid", "sh", "seq", "head", "tail", "rm", "mkdir", "mkfifo", "yes"} {
		link := filepath.Join(dir, name)
		if name == "sh" {
			name = program
		}
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatalf("%v: run packaging/host/setup --with-tests", err)
		}
		if err := os.Symlink(path, link); err != nil {
			t.Fatal(err)
		}
	}
	return map[string]string{"PATH": dir}
}

// inEachShell runs a test in a session of bash, in one of sh, and in one of BusyBox's sh.
func inEachShell(t *testing.T, f func(t *testing.T, s *shellSession)) {
	for _, shell := range []string{"bash", "sh", "busybox"} {
		t.Run(shell, func(t *testing.T) {
			t.Parallel()
			s := &shellSession{t: t, c: start(t, nil), dir: t.TempDir()}
			spec, name := guest.SessionSpec{Cwd: s.dir}, shell
			if shell != "bash" {
				spec.Env, name = withShell(t, shell), "sh"
			}
			view, err := s.c.OpenSession(t.Context(), spec)
			if err != nil {
				t.Fatal(err)
			}
			if view.Shell != name || view.State != guest.ProcessRunning || view.Cwd != s.dir {
				t.Errorf("session %+v", view)
			}
			s.id = view.ID
			f(t, s)
		})
	}
}

// shellSession is a session of a test.
type shellSession struct {
	t   *testing.T
	c   *guest.Client
	id  string
	dir string
}

func (s *shellSession) request(command string) guest.ExecRequest {
	return guest.ExecRequest{Session: s.id, Command: guest.Command{Command: command}}
}

// exec executes a command to its end.
func (s *shellSession) exec(command string) guesttest.Output {
	s.t.Helper()
	return run(s.t, s.c, s.request(command))
}

// wants executes a command that writes stdout and nothing else, and exits with a code.
func (s *shellSession) wants(command, stdout string, code int) {
	s.t.Helper()
	out := s.exec(command)
	if string(out.Stdout) != stdout || out.Result.ExitCode != code || len(out.Stderr) > 0 {
		s.t.Errorf("%q wrote %q and %q, code %d; want %q and no errors, code %d", command, out.Stdout, out.Stderr, out.Result.ExitCode, stdout, code)
	}
}

func TestSessionKeepsState(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		s.wants(`mkdir sub && cd sub; x='a b'; export Y=7; greet() { echo "hi $1"; }; alias shout='echo LOUD'; set -- p q; umask 077; set -f`, "", 0)
		s.wants("pwd", s.dir+"/sub\n", 0)
		s.wants(`echo "$x"; sh -c 'echo $Y'; greet you`, "a b\n7\nhi you\n", 0)
		s.wants("shout it", "LOUD it\n", 0)
		s.wants("echo $2 $#; umask; echo /*", "q 2\n0077\n/*\n", 0)
		s.wants("false", "", 1)
		s.wants("return 7", "", 7)
		s.wants("sh -c 'exit 9'", "", 9)
		s.wants("cat <<EOF\n$x\nEOF", "a b\n", 0)
		s.wants("exec 3>three; echo x >&3", "", 0)
		s.wants("echo y >&3; cat three", "x\ny\n", 0)
		s.wants("sleep 0 & wait; echo waited", "waited\n", 0)
	})
}

func TestSessionExecutesWords(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		out := run(t, s.c, guest.ExecRequest{Session: s.id, Command: guest.Command{Argv: []string{"cd", "/usr"}}})
		if out.Result.ExitCode != 0 {
			t.Errorf("%+v", out)
		}
		out = run(t, s.c, guest.ExecRequest{Session: s.id, Command: guest.Command{Argv: []string{"echo", "it's", "$HOME", "a\nb", "*"}}})
		if string(out.Stdout) != "it's $HOME a\nb *\n" {
			t.Errorf("%q", out.Stdout)
		}
		s.wants("pwd", "/usr\n", 0)
	})
}

// An error in a command ends at most that command.
func TestSessionSurvivesErrors(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		for _, command := range []string{
			"if", "echo $((1+", "'", "no-such-program", "${missing?message}", "readonly r=1; r=2", ". /no/such/file", "shift 100",
			"cat <<EOF\nunfinished", "set -u; echo $missing", "exit_code=$(exit 3)", "kill -INT $$", "trap 'echo' BAD", "\xff\xfe", "set -x", "set +x", "set -v", "set +v",
			"printf() { :; }; export() { :; }", "unset -f printf export", "alias printf=false command=false export=false",
			"unalias -a", "exec 2>&1", "exec 1>&-", "kill -TERM $$", "PS1=; PS2=; PS4=", "cd /; rm -rf " + s.dir,
		} {
			s.exec(command)
			if out := s.exec("echo on; (exit 4)"); string(out.Stdout) != "on\n" || out.Result.ExitCode != 4 {
				t.Fatalf("after %q: %q, %q, %+v", command, out.Stdout, out.Stderr, out.Result)
			}
		}
		if out := s.exec("echo $missing"); !strings.Contains(string(out.Stderr), "missing") || out.Result.ExitCode == 0 {
			t.Errorf("the options are not kept: %q, %+v", out.Stderr, out.Result)
		}
	})
}

// The code of a session may give any meaning to the names that shells use.
func TestSessionSurvivesRedefinedNames(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		for _, definition := range []string{"%s() { while :; do :; done; }", `\alias %s='while :; do :; done #'`} {
			for _, name := range []string{"command", "builtin", "eval", "printf", "trap", "export", "unset", "exit", "echo", "kill", "set", "true", "exec", "source"} {
				s.exec(fmt.Sprintf(definition, name)) // sh refuses functions with the names of its special builtins
				req := s.request("cat; sh -c 'exit 4'")
				req.Stdin, req.Timeout = []byte("on\n"), time.Minute
				if out := run(t, s.c, req); string(out.Stdout) != "on\n" || out.Result.ExitCode != 4 {
					t.Fatalf("after "+definition+": %q, %q, %+v", name, out.Stdout, out.Stderr, out.Result)
				}
			}
		}
	})
}

func TestSessionIgnoresTheIdleTimeoutOfItsImage(t *testing.T) {
	c := start(t, nil)
	view, err := c.OpenSession(t.Context(), guest.SessionSpec{Env: map[string]string{"TMOUT": "1"}})
	if err != nil {
		t.Fatal(err)
	}
	s := &shellSession{t: t, c: c, id: view.ID}
	s.wants("echo ${TMOUT-unset}", "unset\n", 0)
}

func TestSetMinusEEndsTheCommandAndNotTheSession(t *testing.T) {
	s := &shellSession{t: t, c: start(t, nil)}
	view, err := s.c.OpenSession(t.Context(), guest.SessionSpec{ID: "dev"})
	if err != nil {
		t.Fatal(err)
	}
	s.id = view.ID
	s.wants("set -e; echo a; sh -c 'exit 5'; echo b", "a\n", 5)
	s.wants("f() { false; echo no; }; f; echo no", "", 1)
	s.wants("if false; then :; else echo else; fi; false || echo or", "else\nor\n", 0)
	s.wants("(exit 6); echo no", "", 6)
	s.wants("set -o pipefail; sh -c 'exit 8' | cat; echo no", "", 8)
	s.wants("return 3", "", 3)
	s.wants("x=$(false; echo sub); echo $x; echo $-", "sub\nehiBEs\n", 0)
	s.wants("set +e; false; echo on", "on\n", 0)
	s.exec("exec no-such-program")
	s.wants("echo on", "on\n", 0)
}

func TestSessionInput(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		in := func(command string, stdin []byte) string {
			t.Helper()
			out := run(t, s.c, guest.ExecRequest{Session: s.id, Command: guest.Command{Command: command}, Stdin: stdin})
			return string(out.Stdout)
		}
		if got := in(`read a b; echo "[$a][$b]"; cat`, []byte("one two\nthree\n")); got != "[one][two]\nthree\n" {
			t.Errorf("%q", got)
		}
		if got := in("wc -c", big); got != "1048576\n" {
			t.Errorf("%q", got)
		}
		if got := in("read a; echo $?", nil); got != "1\n" {
			t.Errorf("%q", got)
		}
		for _, tt := range []struct {
			command, want string
			stdin         []byte
		}{
			{"wc -c", "1048576\n", big},
			{"wc -c", "0\n", nil},
			{"echo unread", "unread\n", nil},
			{"echo unread", "unread\n", []byte("x")},
			{"head -n 1", "x\n", []byte("x\ny\n")},
			{`read a; echo "$a"`, "typed\n", []byte("typed\n")},
		} {
			if got := streamInput(t, s, tt.command, tt.stdin); got != tt.want {
				t.Errorf("%s of %d bytes wrote %q", tt.command, len(tt.stdin), got)
			}
		}
		s.wants("echo on", "on\n", 0)
	})
}

// streamInput executes a command with a streamed input and returns its stdout.
func streamInput(t *testing.T, s *shellSession, command string, stdin []byte) string {
	t.Helper()
	req := s.request(command)
	req.StreamStdin = true
	stream, err := s.c.Exec(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	// Both fail if the command has ended before, and Next then has its result.
	_ = stream.WriteStdin(stdin)
	_ = stream.CloseStdin()
	var stdout []byte
	for {
		ev, err := stream.Next()
		if err == io.EOF {
			return string(stdout)
		}
		if err != nil {
			t.Fatal(err)
		}
		if ev.Kind == guest.FrameStdout {
			stdout = append(stdout, ev.Data...)
		}
	}
}

func TestSessionOutputIsWhole(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		for i := range 100 {
			s.wants(fmt.Sprintf("echo %d", i), fmt.Sprintln(i), 0)
		}
		out := s.exec("head -c 5000000 /dev/zero; echo err >&2")
		if len(out.Stdout) != 5000000 || string(out.Stderr) != "err\n" {
			t.Errorf("%d bytes of output, %q", len(out.Stdout), out.Stderr)
		}
		long := strings.Repeat("x", 1<<20)
		if out := s.exec("echo " + long + " | wc -c"); string(out.Stdout) != "1048577\n" {
			t.Errorf("%q", out.Stdout)
		}
		binary := "\x00\xff\xfe\x1e1 0\x1e"
		if out := run(t, s.c, guest.ExecRequest{Session: s.id, Command: guest.Command{Command: "cat"}, Stdin: []byte(binary)}); string(out.Stdout) != binary {
			t.Errorf("%q", out.Stdout)
		}
	})
}

// A process in the background neither holds the command up nor writes into the output of
// the next.
func TestSessionBackgroundProcesses(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		s.wants("mkfifo go; (cat go; echo late) & echo started", "started\n", 0)
		s.wants("echo next; echo go >go", "next\n", 0)
		s.wants("wait; echo done", "done\n", 0)
		// It lives through an interrupt of a later command, as it does in a terminal.
		s.wants("sleep 1000 & echo", "\n", 0)
		req := s.request("sleep 1000")
		req.Timeout = 100 * time.Millisecond
		if out := run(t, s.c, req); !out.Result.TimedOut {
			t.Errorf("%+v", out.Result)
		}
		s.wants("kill -0 $! && echo alive", "alive\n", 0)
	})
}

func TestSessionTimeouts(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		s.wants("x=kept", "", 0)
		for _, command := range []string{
			"echo begun; sleep 1000; echo after",
			"echo begun; while :; do :; done; echo after",
			"echo begun; sleep 1000 | cat; echo after",
			"echo begun; (while :; do :; done); echo after",
			"echo begun; sh -c 'trap \"\" INT; while :; do sleep 1; done'; echo after",
			"echo begun; setsid sh -c 'trap \"\" INT; sleep 1000'; wait; sleep 1000; echo after",
			"echo begun; x=changed; read y; sleep 1000; echo after",
		} {
			t.Run(command, func(t *testing.T) {
				req := s.request(command)
				req.Timeout = 300 * time.Millisecond
				out := run(t, s.c, req)
				if string(out.Stdout) != "begun\n" || !out.Result.TimedOut || out.Result.ExitCode == 0 {
					t.Errorf("%q, %q, %+v", out.Stdout, out.Stderr, out.Result)
				}
			})
		}
		s.wants("echo $x; pwd", "changed\n"+s.dir+"\n", 0)
		s.wants("cd /", "", 0)
		testkit.Eventually(t, "all commands have ended", func() bool { return server.AliveIn(s.dir) == 0 })
	})
}

func TestSessionInterrupt(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		if _, err := s.c.InterruptSession(t.Context(), s.id); err != nil {
			t.Fatal(err)
		}
		stream, err := s.c.Exec(t.Context(), s.request("trap 'echo caught' USR1; echo begun; sleep 1000; echo after"))
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		var stdout []byte
		for {
			ev, err := stream.Next()
			if err != nil {
				t.Fatal(err)
			}
			if ev.Kind == guest.FrameStdout {
				stdout = append(stdout, ev.Data...)
				if _, err := s.c.InterruptSession(t.Context(), s.id); err != nil {
					t.Fatal(err)
				}
			}
			if ev.Kind == guest.FrameComplete {
				if ev.Result.ExitCode != 130 || ev.Result.TimedOut {
					t.Errorf("%+v", ev.Result)
				}
				break
			}
		}
		if string(stdout) != "begun\n" {
			t.Errorf("%q", stdout)
		}
		s.wants("echo on", "on\n", 0)
	})
}

func TestDisconnectInterruptsTheCommandOfASession(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		for i, req := range []guest.ExecRequest{s.request("x=0; yes; echo after"), s.request("x=1; echo begun; cat; sleep 1000; echo after")} {
			req.StreamStdin = i == 1
			stream, err := s.c.Exec(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for ev := (guest.ExecEvent{}); ev.Kind != guest.FrameStdout; {
				if ev, err = stream.Next(); err != nil {
					t.Fatal(err)
				}
			}
			stream.Close()
			s.wants("echo $x", fmt.Sprintln(i), 0)
		}
	})
}

func TestSessionDeath(t *testing.T) {
	for _, tt := range []struct {
		command, reason string
		code            int
	}{
		{"echo bye; exit 3", `exited with code 3 in the command "echo bye; exit 3"`, 3},
		{"kill -9 $$", "ended by SIGKILL", 137},
		{"exec sh -c 'echo bye; exit 5'", "exited with code 5", 5},
	} {
		t.Run(tt.command, func(t *testing.T) {
			inEachShell(t, func(t *testing.T, s *shellSession) {
				out := s.exec(tt.command)
				if out.Result.ExitCode != tt.code || strings.Contains(tt.command, "bye") && string(out.Stdout) != "bye\n" {
					t.Errorf("%q, %+v", out.Stdout, out.Result)
				}
				_, err := s.c.Exec(t.Context(), s.request("true"))
				wantCode(t, err, guest.CodeSessionLost, tt.reason)
				_, err = s.c.InterruptSession(t.Context(), s.id)
				wantCode(t, err, guest.CodeSessionLost, tt.reason)
				_, list := known(t, s.c)
				if len(list) != 1 || list[0].State != guest.ProcessExited || *list[0].ExitCode != tt.code {
					t.Errorf("%+v", list)
				}
				if _, err := s.c.OpenSession(t.Context(), guest.SessionSpec{ID: s.id}); err != nil {
					t.Errorf("its id cannot be used again: %v", err)
				}
			})
		})
	}
}

// A shell that ignores SIGINT and never ends its command is killed.
func TestUnresponsiveSessionIsEnded(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		req := s.request("trap '' INT; while :; do :; done")
		req.Timeout = 100 * time.Millisecond
		if out := run(t, s.c, req); !out.Result.TimedOut || out.Result.Signal != "SIGKILL" {
			t.Errorf("%+v", out.Result)
		}
		_, err := s.c.Exec(t.Context(), s.request("true"))
		wantCode(t, err, guest.CodeSessionLost, "ignored SIGINT")
	})
}

func TestSessionsRunInParallelAndTheirCommandsInOrder(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		other, err := s.c.OpenSession(t.Context(), guest.SessionSpec{Cwd: s.dir})
		if err != nil {
			t.Fatal(err)
		}
		s.wants("mkfifo gate; x=1", "", 0)
		stream, err := s.c.Exec(t.Context(), s.request("cat gate; x=2"))
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		var waiting sync.WaitGroup
		for range 5 {
			waiting.Go(func() { s.wants("echo $x", "2\n", 0) })
		}
		req := s.request("echo never >never")
		req.Timeout = 50 * time.Millisecond
		_, err = s.c.Exec(t.Context(), req)
		wantCode(t, err, guest.CodeSessionBusy, "did not run")
		out := run(t, s.c, guest.ExecRequest{Session: other.ID, Command: guest.Command{Command: "echo x$x; echo open >gate"}})
		if string(out.Stdout) != "x\n" {
			t.Errorf("%q", out.Stdout)
		}
		waiting.Wait()
		s.wants("test -e never", "", 1)
	})
}

func TestSessionRefusals(t *testing.T) {
	c := start(t, nil)
	if _, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: "dev", Env: map[string]string{"A": "b"}}); err != nil {
		t.Fatal(err)
	}
	_, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: "dev"})
	wantCode(t, err, guest.CodeExists, "dev")
	_, err = c.OpenSession(t.Context(), guest.SessionSpec{ID: "../x"})
	wantCode(t, err, guest.CodeInvalid, "id")
	_, err = c.OpenSession(t.Context(), guest.SessionSpec{Cwd: "/no/such"})
	wantCode(t, err, guest.CodeNotFound, "cwd")
	_, err = c.OpenSession(t.Context(), guest.SessionSpec{Env: map[string]string{"A=": "b"}})
	wantCode(t, err, guest.CodeInvalid, "env")
	for _, tt := range []struct {
		req        guest.ExecRequest
		code, hint string
	}{
		{guest.ExecRequest{Session: "missing", Command: guest.Command{Command: "true"}}, guest.CodeNoSession, "missing"},
		{guest.ExecRequest{Session: "dev", Command: guest.Command{Command: "true", Cwd: "/"}}, guest.CodeInvalid, "cd"},
		{guest.ExecRequest{Session: "dev", Command: guest.Command{Command: "true", Env: map[string]string{"A": "b"}}}, guest.CodeInvalid, "export"},
		{guest.ExecRequest{Session: "dev"}, guest.CodeInvalid, "nothing to run"},
		{guest.ExecRequest{Session: "dev", Command: guest.Command{Command: "a", Argv: []string{"b"}}}, guest.CodeInvalid, "one of them"},
		{guest.ExecRequest{Session: "dev", Command: guest.Command{Command: "a\x00"}}, guest.CodeInvalid, "zero byte"},
	} {
		_, err := c.Exec(t.Context(), tt.req)
		wantCode(t, err, tt.code, tt.hint)
	}
	_, err = c.CloseSession(t.Context(), "missing", 0)
	wantCode(t, err, guest.CodeNoSession, "missing")
	if view, err := c.CloseSession(t.Context(), "dev", 0); err != nil || !view.Closed || view.State != guest.ProcessExited {
		t.Errorf("%+v, %v", view, err)
	}
	_, err = c.Exec(t.Context(), guest.ExecRequest{Session: "dev", Command: guest.Command{Command: "true"}})
	wantCode(t, err, guest.CodeNoSession, "dev")
}

func TestShellThatDoesNotStart(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/bash", []byte("#!/bin/sh\nexit 9\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	c := start(t, nil)
	_, err := c.OpenSession(t.Context(), guest.SessionSpec{Env: map[string]string{"PATH": dir}})
	wantCode(t, err, guest.CodeNoShell, "code 9")
	if _, list := known(t, c); len(list) != 0 {
		t.Errorf("%v", list)
	}
}

func TestClosedSessionLeavesNothing(t *testing.T) {
	inEachShell(t, func(t *testing.T, s *shellSession) {
		s.wants("sleep 1000 & (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1000; done' &) ; echo", "\n", 0)
		stream, err := s.c.Exec(t.Context(), s.request("sleep 1000"))
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		if _, err := s.c.CloseSession(t.Context(), s.id, time.Second); err != nil {
			t.Fatal(err)
		}
		if n := server.AliveIn(s.dir); n > 0 {
			t.Errorf("%d processes are alive", n)
		}
	})
}

func TestSessionsAreEndedWithTheServer(t *testing.T) {
	dir := t.TempDir()
	c, end := serve(t, nil)
	for range 5 {
		if _, err := c.OpenSession(t.Context(), guest.SessionSpec{Cwd: dir}); err != nil {
			t.Fatal(err)
		}
	}
	end()
	if n := server.AliveIn(dir); n > 0 {
		t.Errorf("%d processes are alive", n)
	}
}

func TestClosedSessionsLeaveNothing(t *testing.T) {
	var cfg server.Config
	dir := t.TempDir()
	c := start(t, func(c *server.Config) { cfg = *c })
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := 0
	for i := range 100 {
		view, err := c.OpenSession(t.Context(), guest.SessionSpec{Cwd: dir})
		if err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 {
			if out := run(t, c, guest.ExecRequest{Session: view.ID, Command: guest.Command{Command: "echo $PWD"}}); string(out.Stdout) != dir+"\n" {
				t.Errorf("%q", out.Stdout)
			}
		}
		if _, err := c.CloseSession(t.Context(), view.ID, time.Second); err != nil {
			t.Fatal(err)
		}
		if i == 10 {
			before = open()
		}
	}
	if n := server.AliveIn(dir); n > 0 {
		t.Errorf("%d processes are alive", n)
	}
	testkit.Eventually(t, "no descriptor is left", func() bool { return open() <= before+5 }) // the client may use another connection
	if left, _ := filepath.Glob(filepath.Join(cfg.RunDir, "sessions", "*")); len(left) > 0 {
		t.Errorf("files are left: %q", left)
	}
	if _, list := known(t, c); len(list) != 0 {
		t.Errorf("%v", list)
	}
}

func TestSessionEvents(t *testing.T) {
	c := start(t, nil)
	events, err := c.Events(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	next := func() guest.Session {
		t.Helper()
		ev, err := events.Next()
		if err != nil || ev.Session == nil {
			t.Fatalf("%+v, %v", ev, err)
		}
		return *ev.Session
	}
	for _, id := range []string{"a", "b"} {
		if _, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: id}); err != nil {
			t.Fatal(err)
		}
		if s := next(); s.ID != id || s.State != guest.ProcessRunning {
			t.Errorf("%+v", s)
		}
	}
	run(t, c, guest.ExecRequest{Session: "a", Command: guest.Command{Command: "exit 2"}})
	if s := next(); s.ID != "a" || s.State != guest.ProcessExited || *s.ExitCode != 2 || s.Command != "exit 2" {
		t.Errorf("%+v", s)
	}
	if _, err := c.CloseSession(t.Context(), "b", 0); err != nil {
		t.Fatal(err)
	}
	for s := next(); !s.Closed; s = next() {
		if s.ID != "b" || s.State != guest.ProcessExited {
			t.Errorf("%+v", s)
		}
	}
}

func TestLaterReadersLearnWhichSessionsAndTerminalsThereAre(t *testing.T) {
	c := start(t, nil)
	for _, id := range []string{"a", "b"} {
		if _, err := c.OpenSession(t.Context(), guest.SessionSpec{ID: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.OpenTerminal(t.Context(), guest.TerminalSpec{ID: id, Command: guest.Command{Argv: []string{"cat"}}}); err != nil {
			t.Fatal(err)
		}
	}
	first := subscribe(t, c)
	for _, id := range []string{"a", "b"} {
		if ev := next(t, first); ev.Terminal == nil || ev.Terminal.ID != id {
			t.Fatalf("%+v", ev)
		}
	}
	for _, id := range []string{"a", "b"} {
		if ev := next(t, first); ev.Session == nil || ev.Session.ID != id {
			t.Fatalf("%+v", ev)
		}
	}
	if _, err := c.CloseSession(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.CloseTerminal(t.Context(), "b", 0); err != nil {
		t.Fatal(err)
	}
	second := subscribe(t, c)
	if ev := next(t, second); ev.Terminal == nil || ev.Terminal.ID != "a" {
		t.Errorf("%+v", ev)
	}
	if ev := next(t, second); ev.Session == nil || ev.Session.ID != "b" {
		t.Errorf("%+v", ev)
	}
	if ev := next(t, second); ev.Type != guest.EventTerminals || !slices.Equal(ev.Terminals, []string{"a"}) {
		t.Errorf("%+v", ev)
	}
	if ev := next(t, second); ev.Type != guest.EventSessions || !slices.Equal(ev.Sessions, []string{"b"}) {
		t.Errorf("%+v", ev)
	}
}
