package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// measureSession measures /bin/true in a session, through the API, next to a builtin of the
// session's shell, which starts no process, and to /bin/true in a bash of this machine.
func measureSession(ctx context.Context, b *bench) ([]row, error) {
	s, err := b.node.API.OpenSession(ctx, b.id, types.OpenSessionRequest{})
	if err != nil {
		return nil, err
	}
	running := func(name string, run func() error) *contender {
		return newMedians(name, func(ctx context.Context) (spread, error) { return repeat(ctx, b.count(100), nil, run) })
	}
	inSession := func(command string) func() error {
		return func() error {
			result, err := b.node.API.Exec(ctx, b.id, client.ExecRequest{Session: s.ID, Command: types.Command{Command: command}})
			if err == nil && result.ExitCode != 0 {
				err = fmt.Errorf("%s failed: %q", command, result.Stderr)
			}
			return err
		}
	}
	shell, err := startShell(ctx)
	if err != nil {
		return nil, err
	}
	defer shell.close()
	ours, builtin := running("session", inSession("/bin/true")), running("a builtin", inSession(":"))
	local := running("a local bash", func() error { return shell.run("/bin/true") })
	if err := alternate(ctx, latencyRounds, ours, builtin, local); err != nil {
		return nil, err
	}
	r := timesRow("exec `/bin/true` in a session through the HTTPS API", "p50 ≤ 3 ms", timesBars{p50: 3}, ours.spread(), ours.samples)
	for _, peer := range []*contender{builtin, local} {
		if err := peer.missing(latencyRounds); err != nil {
			return nil, err
		}
	}
	r.Note = fmt.Sprintf("the builtin `:` in the session: p50 %s ms; /bin/true in a bash of this machine, through a pipe: p50 %s ms",
		builtin.spread().text("%.2f"), local.spread().text("%.2f"))
	r.Values.add("builtin_p50_ms", builtin.spread()).add("local_p50_ms", local.spread())
	return []row{r}, nil
}

// localShell is a bash of this machine that executes commands from a pipe, as the bash of a session does.
type localShell struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startShell(ctx context.Context) (*localShell, error) {
	s := &localShell{cmd: exec.CommandContext(ctx, "bash", "--norc", "--noprofile", "--noediting", "-i")}
	s.cmd.Dir = "/"
	s.cmd.Env = append(os.Environ(), "HISTFILE=")
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // else it takes the terminal of the bench
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.out = bufio.NewReader(out)
	return s, s.cmd.Start()
}

// run executes a command, and returns when it has ended.
func (s *localShell) run(command string) error {
	if _, err := fmt.Fprintf(s.in, "%s </dev/null >/dev/null 2>/dev/null\necho $?\n", command); err != nil {
		return err
	}
	code, err := s.out.ReadString('\n')
	if err == nil && strings.TrimSpace(code) != "0" {
		err = fmt.Errorf("%s exited with %q", command, code)
	}
	return err
}

func (s *localShell) close() {
	s.in.Close()
	_ = s.cmd.Wait() // as its last command
}

// measureOutput measures `doze exec` with a GiB of output, next to the same command on this
// machine, whose output goes through a pipe.
func measureOutput(ctx context.Context, b *bench) (rows []row, err error) {
	const size, bar = 1 << 30, 200
	for _, kind := range []struct{ name, command string }{
		{"binary", "head -c %d /dev/zero"},
		{"text", "yes 'the quick brown fox jumps over the lazy dog' | head -c %d"},
	} {
		script := fmt.Sprintf(kind.command, size)
		reading := func(name string, command func() *exec.Cmd) *contender {
			return &contender{name: name, round: func(context.Context) (float64, error) {
				cmd, written := command(), &counter{}
				cmd.Stdout = written
				began := time.Now()
				err := cmd.Run()
				if err == nil && written.n != size {
					err = errors.New("output is missing")
				}
				if err != nil {
					return 0, fmt.Errorf("%s wrote %d bytes: %w", name, written.n, err)
				}
				return size / 1e6 / time.Since(began).Seconds(), nil
			}}
		}
		ours := reading("doze exec", func() *exec.Cmd { return b.node.Command("exec", "-n", b.id, "-c", script) })
		local := reading("a local pipe", func() *exec.Cmd {
			cmd := exec.CommandContext(ctx, "sh", "-c", script)
			cmd.Dir = "/"
			return cmd
		})
		if err := versus(ctx, b.count(3), ours, local); err != nil {
			return nil, err
		}
		rates := ours.spread()
		rows = append(rows, row{
			Figure: "`doze exec` with 1 GiB of output, " + kind.name, Bar: fmt.Sprintf("≥ %d MB/s", bar),
			Measured: rates.text("%.0f") + " MB/s", Met: rates.median() >= bar, Note: "through a local pipe: " + local.spread().text("%.0f") + " MB/s",
			Values: values{}.add("mb_per_s", rates).add("local_mb_per_s", local.spread()),
		})
	}
	return rows, nil
}

// counter counts the bytes that are written to it.
type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return len(b), nil
}
