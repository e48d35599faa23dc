package server_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/testkit"
)

func run(t testing.TB, c *guest.Client, req guest.ExecRequest) guesttest.Output {
	t.Helper()
	out, err := guesttest.Run(t.Context(), c, req)
	if err != nil {
		t.Fatalf("%+v: %v", req, err)
	}
	return out
}

func TestExec(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for _, tt := range []struct {
		name   string
		req    guest.ExecRequest
		stdout string
		stderr string
		code   int
		signal string
	}{
		{name: "argv", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"echo", "a b", "$HOME"}}}, stdout: "a b $HOME\n"},
		{name: "command runs in a shell", req: guest.ExecRequest{Command: guest.Command{Command: "echo a; echo b >&2"}}, stdout: "a\n", stderr: "b\n"},
		{name: "exit code", req: guest.ExecRequest{Command: guest.Command{Command: "exit 42"}}, code: 42},
		{name: "death by signal", req: guest.ExecRequest{Command: guest.Command{Command: "kill -TERM $$"}}, code: 143, signal: "SIGTERM"},
		{name: "stdin", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"cat"}}, Stdin: []byte("hello")}, stdout: "hello"},
		{name: "stdin larger than a pipe", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"wc", "-c"}}, Stdin: big}, stdout: "1048576\n"},
		{name: "stdin that is not read", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}}, Stdin: big}},
		{name: "no stdin is empty", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"cat"}}}},
		{name: "env", req: guest.ExecRequest{Command: guest.Command{Command: `echo "$A-$B"`, Env: map[string]string{"A": "1", "B": "=2"}}}, stdout: "1-=2\n"},
		{name: "env replaces", req: guest.ExecRequest{Command: guest.Command{Command: `env | grep -c ^PATH=; echo $PATH`, Env: map[string]string{"PATH": "/bin:/usr/bin"}}}, stdout: "1\n/bin:/usr/bin\n"},
		{name: "cwd", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"pwd"}, Cwd: dir}}, stdout: dir + "\n"},
		{name: "PATH of the request", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"sh", "-c", "echo found"}, Env: map[string]string{"PATH": "/nowhere:/bin"}}}, stdout: "found\n"},
		{name: "relative program in cwd", req: guest.ExecRequest{Command: guest.Command{Argv: []string{"./sh", "-c", "echo relative"}, Cwd: "/bin"}}, stdout: "relative\n"},
		{name: "command ignores SIGPIPE by default", req: guest.ExecRequest{Command: guest.Command{Command: "yes | head -n 1"}}, stdout: "y\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			out := run(t, c, tt.req)
			if string(out.Stdout) != tt.stdout || string(out.Stderr) != tt.stderr {
				t.Errorf("stdout %q, stderr %q; want %q, %q", out.Stdout, out.Stderr, tt.stdout, tt.stderr)
			}
			if out.Result.ExitCode != tt.code || out.Result.Signal != tt.signal || out.Result.TimedOut || out.Result.Duration <= 0 {
				t.Errorf("result %+v; want code %d, signal %q", out.Result, tt.code, tt.signal)
			}
		})
	}
}

func TestExecRefusals(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, mode os.FileMode, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := write("plain", 0o644, "#!/bin/sh\n")
	orphan := write("orphan", 0o755, "#!/no/such/interpreter\n")
	binary := write("binary", 0o755, "\x00\x01\x02\x03")
	for _, tt := range []struct {
		name       string
		req        guest.ExecRequest
		code, hint string
	}{
		{"nothing to run", guest.ExecRequest{}, guest.CodeInvalid, "set command or argv"},
		{"both", guest.ExecRequest{Command: guest.Command{Command: "a", Argv: []string{"b"}}}, guest.CodeInvalid, "one of them"},
		{"missing program", guest.ExecRequest{Command: guest.Command{Argv: []string{"no-such-program"}}}, guest.CodeNoCommand, "PATH"},
		{"missing path", guest.ExecRequest{Command: guest.Command{Argv: []string{"/no/such/program"}}}, guest.CodeNoCommand, "does not exist"},
		{"missing interpreter", guest.ExecRequest{Command: guest.Command{Argv: []string{orphan}}}, guest.CodeNotExecutable, "interpreter"},
		{"no program", guest.ExecRequest{Command: guest.Command{Argv: []string{binary}}}, guest.CodeNotExecutable, "#!"},
		{"not executable", guest.ExecRequest{Command: guest.Command{Argv: []string{plain}}}, guest.CodeNotExecutable, "executed"},
		{"a folder", guest.ExecRequest{Command: guest.Command{Argv: []string{dir}}}, guest.CodeNotExecutable, "executed"},
		{"missing cwd", guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}, Cwd: "/no/such"}}, guest.CodeNotFound, `cwd "/no/such" does not exist`},
		{"cwd is a file", guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}, Cwd: plain}}, guest.CodeNotDirectory, "not a folder"},
		{"relative cwd", guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}, Cwd: "a"}}, guest.CodeInvalid, "absolute"},
		{"env with =", guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}, Env: map[string]string{"A=B": "c"}}}, guest.CodeInvalid, "env"},
		{"zero byte", guest.ExecRequest{Command: guest.Command{Argv: []string{"echo", "a\x00b"}}}, guest.CodeInvalid, "zero byte"},
		{"too many arguments", guest.ExecRequest{Command: guest.Command{Argv: make([]string, guest.MaxArgs+1)}}, guest.CodeInvalid, "nothing to run"},
		{"long argv", guest.ExecRequest{Command: guest.Command{Argv: append([]string{"true"}, make([]string, guest.MaxArgs)...)}}, guest.CodeTooLarge, "4096"},
		{"one huge argument", guest.ExecRequest{Command: guest.Command{Argv: []string{"echo", strings.Repeat("x", 1<<20)}}}, guest.CodeTooLarge, "too large"},
		{"a request over the limit", guest.ExecRequest{Command: guest.Command{Argv: []string{"cat"}}, Stdin: make([]byte, guest.MaxJSON)}, guest.CodeTooLarge, "at most"},
		{"negative timeout", guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}}, Timeout: -1}, guest.CodeInvalid, "negative"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			_, err := c.Exec(t.Context(), tt.req)
			wantCode(t, err, tt.code, tt.hint)
		})
	}
}

func TestOutputOfShortCommandsIsNeverLost(t *testing.T) {
	c := start(t, nil)
	for i := range 300 {
		out := run(t, c, guest.ExecRequest{Command: guest.Command{Argv: []string{"echo", fmt.Sprint(i)}}})
		if string(out.Stdout) != fmt.Sprintln(i) {
			t.Fatalf("command %d wrote %q", i, out.Stdout)
		}
	}
}

func TestOutputBeforeExitReachesSlowClient(t *testing.T) {
	c := start(t, (*server.Config).EndDrainingAtOnce)
	late := 0 // commands that ended before the client read
	// Of some of these sizes the last part is still in the pipe when the command
	// has exited. A background process keeps the pipe open.
	for size := 50_000; size <= 500_000; size += 25_000 {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			dir := fifoFolder(t)
			s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Command: fmt.Sprintf("read x < fifo & head -c %d /dev/zero; kill -KILL $$", size), Cwd: dir}})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			began, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			ended := func() bool { return !aliveAs(began.PID, "sh") }
			testkit.Eventually(t, "the command has ended, or waits for its client", func() bool { return ended() || stdoutIsFull(began.PID) })
			if ended() {
				late++
			}
			total := 0
			for {
				ev, err := s.Next()
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				total += len(ev.Data)
			}
			if total != size {
				t.Errorf("got %d bytes", total)
			}
			if n := server.AliveIn(dir); n != 1 {
				t.Errorf("%d processes were left in the background", n)
			}
			openFIFO(t, dir)
			testkit.Eventually(t, "the background process has ended", func() bool { return server.AliveIn(dir) == 0 })
		})
	}
	if late == 0 {
		t.Error("no command ended before its client read")
	}
}

// stdoutIsFull reports whether a process's stdout is a full pipe.
func stdoutIsFull(pid int) bool {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/fd/1", pid), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false // it has ended
	}
	defer unix.Close(fd)
	pending, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	size, sizeErr := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0)
	return err == nil && sizeErr == nil && pending == size
}

func TestBackgroundProcessDoesNotHoldExec(t *testing.T) {
	c := start(t, nil)
	dir := fifoFolder(t)
	// It goes on only after its exec is over, and can still write to its stdout.
	out := run(t, c, guest.ExecRequest{Command: guest.Command{Command: "(read x < fifo; echo late && touch done) & echo early", Cwd: dir}})
	if string(out.Stdout) != "early\n" || out.Result.ExitCode != 0 {
		t.Fatalf("got %q, %+v", out.Stdout, out.Result)
	}
	openFIFO(t, dir)
	testkit.Eventually(t, "the background process went on", func() bool {
		_, err := os.Stat(filepath.Join(dir, "done"))
		return err == nil
	})
}

// A command that has closed its outputs is not a command that has ended.
func TestExitCodeComesFromTheEndOfTheCommandOnly(t *testing.T) {
	c := start(t, nil)
	t.Run("exec", func(t *testing.T) {
		dir := fifoFolder(t)
		s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Command: "exec >&- 2>&-; read x < fifo; exit 7", Cwd: dir}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := s.Next(); err != nil { // start
			t.Fatal(err)
		}
		openFIFO(t, dir) // returns once the command, its outputs closed, reads
		if ev, err := s.Next(); err != nil || ev.Result == nil || ev.Result.ExitCode != 7 {
			t.Errorf("it ended as %+v, %v", ev.Result, err)
		}
	})
	t.Run("process", func(t *testing.T) {
		p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "exec >&- 2>&-; : > closed; read x < fifo; exit 7", Cwd: fifoFolder(t)}})
		testkit.Eventually(t, "it has closed its outputs", func() bool { _, err := os.Stat(p.Cwd + "/closed"); return err == nil })
		if now, err := guesttest.Process(t.Context(), c, p.ID); err != nil || now.State != guest.ProcessRunning || now.ExitCode != nil || now.ExitedAt != nil {
			t.Errorf("while it runs it is %+v, %v", now, err)
		}
		openFIFO(t, p.Cwd)
		if _, _, end := readLog(t, c, p.ID, true); end == nil || end.ExitCode == nil || *end.ExitCode != 7 {
			t.Errorf("it ended as %+v", end)
		}
	})
}

// escapees start processes that leave their parents, group and session. Each
// goes on indefinitely unless it is killed.
var escapees = []struct{ name, command string }{
	{"children", `sleep 1000 & sleep 1000 | sleep 1000`},
	{"double fork and setsid", `setsid sh -c 'setsid sleep 1000 & setsid sleep 1000 & exit' & sleep 1000`},
	{"ignores SIGTERM", `trap '' TERM INT HUP; while :; do sleep 1000; done`},
	{"stopped", `sleep 1000 & kill -STOP $!; kill -STOP $$; sleep 1000`},
	{"without environment in its session", `env -i sh -c 'sleep 1000 & sleep 1000 & wait' & sleep 1000`},
	{"without environment in a session of its own", `setsid env -i sh -c 'sleep 1000 & wait' & sleep 1000`},
	{"forks all the time", `f() { (setsid sh -c 'sleep 1000' &) ; }; while :; do f; sleep 0.01; done`},
}

func TestTimeoutKillsTheTree(t *testing.T) {
	for _, tt := range escapees {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, nil)
			dir := t.TempDir()
			out := run(t, c, guest.ExecRequest{Command: guest.Command{Command: tt.command, Cwd: dir}, Timeout: 400 * time.Millisecond})
			if !out.Result.TimedOut || out.Result.ExitCode != 137 || out.Result.Signal != "SIGKILL" {
				t.Errorf("result %+v", out.Result)
			}
			if n := server.AliveIn(dir); n > 0 {
				t.Errorf("%d processes of the tree are left", n)
			}
		})
	}
}

func TestClientGoneKillsTheTree(t *testing.T) {
	for _, leave := range []struct {
		name string
		how  func(*guest.ExecStream, context.CancelFunc)
	}{
		{"by Close", func(s *guest.ExecStream, _ context.CancelFunc) { s.Close() }},
		{"by context", func(_ *guest.ExecStream, cancel context.CancelFunc) { cancel() }},
	} {
		t.Run(leave.name, func(t *testing.T) {
			c := start(t, nil)
			mark := fmt.Sprint("gone-", time.Now().UnixNano())
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s, err := c.Exec(ctx, guest.ExecRequest{Command: guest.Command{Command: "setsid sleep 1000 & echo up; sleep 1000", Env: map[string]string{"GONE": mark}}})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for ev := (guest.ExecEvent{}); ev.Kind != guest.FrameStdout; {
				if ev, err = s.Next(); err != nil {
					t.Fatal(err)
				}
			}
			leave.how(s, cancel)
			testkit.Eventually(t, "the tree is killed", func() bool { return aliveWith(t, mark) == 0 })
			if _, err := s.Next(); err == nil || err == io.EOF {
				t.Errorf("Next after leaving returned %v", err)
			}
		})
	}
}

func TestClientThatStopsReadingSlowsTheCommandDown(t *testing.T) {
	c := start(t, nil)
	const (
		size  = 64 << 20
		block = 4 << 10
		// Far more than a pipe, a socket's two ends, and the buffers of readers and
		// writers on the way hold together.
		most = 4 << 20
	)
	input := filepath.Join(t.TempDir(), "input")
	mustWrite(t, input, "", 0o644)
	if err := os.Truncate(input, size); err != nil {
		t.Fatal(err)
	}
	s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: []string{"dd", "if=" + input, "bs=" + fmt.Sprint(block), "status=none"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ev, err := s.Next()
	if err != nil {
		t.Fatal(err)
	}
	// The client does not read on, so the command's output stays in its pipe, and
	// the command cannot end, whatever else the guest does.
	testkit.Eventually(t, "the command waits for its client", func() bool {
		if !aliveAs(ev.PID, "dd") {
			t.Fatal("the command ended although its client did not read")
		}
		return stdoutIsFull(ev.PID)
	})
	for range 20 {
		run(t, c, guest.ExecRequest{Command: guest.Command{Argv: []string{"true"}}})
	}
	if !aliveAs(ev.PID, "dd") {
		t.Fatal("the command ended although its client did not read")
	}
	if written := position(t, ev.PID, 0); written > most {
		t.Errorf("the command wrote %d bytes that its client did not read", written)
	}
	total := 0
	for {
		ev, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		total += len(ev.Data)
		if ev.Result != nil && ev.Result.ExitCode != 0 {
			t.Errorf("it ended with %+v", ev.Result)
		}
	}
	if total != size {
		t.Fatalf("got %d bytes", total)
	}
}

// aliveAs reports whether a process lives and has that name.
func aliveAs(pid int, name string) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && bytes.Contains(b, []byte(" ("+name+") ")) && !bytes.Contains(b, []byte(") Z "))
}

// position is how far a process has come in one of its open files.
func position(t testing.TB, pid, fd int) (bytes int64) {
	t.Helper()
	if _, err := fmt.Sscanf(mustRead(t, fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd)), "pos: %d", &bytes); err != nil {
		t.Fatal(err)
	}
	return bytes
}

func TestDefaultPath(t *testing.T) {
	c := start(t, func(cfg *server.Config) { cfg.Env = []string{} })
	if out := run(t, c, guest.ExecRequest{Command: guest.Command{Argv: []string{"env"}}}); !strings.Contains(string(out.Stdout), "PATH=/usr/local/sbin") {
		t.Fatalf("got %q", out.Stdout)
	}
}

func BenchmarkExecTrue(b *testing.B) {
	c := start(b, nil)
	for b.Loop() {
		if _, err := guesttest.Run(b.Context(), c, guest.ExecRequest{Command: guest.Command{Argv: []string{"/bin/true"}}}); err != nil {
			b.Fatal(err)
		}
	}
}
