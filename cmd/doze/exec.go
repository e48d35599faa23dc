package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

// execFlags are the flags of exec.
type execFlags struct {
	types.StartProcessRequest
	script          string
	session         string
	env             []string
	timeout         time.Duration
	ready           string
	readyTimeout    time.Duration
	detach, noStdin bool
}

const execName = "exec"

func (a *app) execCommand() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use:   execName + " SANDBOX [-- COMMAND [ARG...] | -c SCRIPT]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox, waking it if it sleeps. Its output is printed as it is
written, and doze exits with the command's exit code. Ctrl-C ends the command
with all its processes.

Several arguments are executed as they are. A single argument with spaces, and the
script of -c, are run by /bin/sh.

The command reads doze's standard input while it runs, as with ssh. In a loop that
reads standard input itself (while read), use -n, or the command consumes the rest of
it. The command has no terminal; doze shell runs commands on one.

With --session the command runs in a session, whose working directory, variables,
functions and options persist; Ctrl-C then interrupts the command and keeps the session.
See doze session --help.

With -d the command becomes a background process, for doze ps, logs, wait and kill. With
--ready, doze then waits until it is ready. With --restart on_wake or always, each cold
wake awaits that too before it starts the next process.

Exit codes of doze itself:
  125  doze failed: wrong usage, an unknown sandbox, a lost connection
  126  the command cannot be executed
  127  the command was not found
  130  Ctrl-C`,
		Example: `  doze exec shop -- npm test
  doze exec shop -c 'ls *.js | wc -l'
  doze exec --session dev shop -c 'cd /srv/shop && npm test'
  echo 'print(6 * 7)' | doze exec shop -- python3 -
  doze exec -d --name web --restart on_wake --cwd /workspace shop -- npm run dev
  doze exec -d --name web --ready port=3000 shop -- npm run dev`,
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.exec(cmd.Context(), f, args[0], args[1:])
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&f.script, "command", "c", "", "script for /bin/sh")
	flags.StringVarP(&f.Cwd, "cwd", "w", "", "working directory")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "environment variable KEY=VALUE, or KEY with its value in this shell; may be repeated")
	flags.StringVar(&f.session, "session", "", "id of the session that runs it")
	cmd.RegisterFlagCompletionFunc("session", a.complete(sessionFlag))
	flags.DurationVar(&f.timeout, "timeout", 0, "time after which it is killed with all its processes (default never)")
	flags.BoolVarP(&f.detach, "detach", "d", false, "run it in the background")
	flags.StringVar(&f.Name, "name", "", "with -d: name of the process")
	choiceFlag(cmd, (*string)(&f.Restart), "restart", "with -d: never, always (when it ends, and on a cold wake) or on_wake (on a cold wake)", types.Restart("").Values())
	flags.StringVar(&f.ready, "ready", "", "with -d: wait for a condition such as port=3000; doze wait --help lists them")
	flags.DurationVar(&f.readyTimeout, "ready-timeout", 0, "time that --ready waits, at most 1h (default 1m)")
	flags.BoolVarP(&f.noStdin, "no-stdin", "n", false, "do not read standard input; the command's is empty")
	return cmd
}

func (a *app) exec(ctx context.Context, f execFlags, sandbox string, words []string) error {
	var err error
	if f.Command.Command, f.Argv, err = commandOf(f.script, words); err != nil {
		return err
	}
	if f.Env, err = a.environ(f.env); err != nil {
		return err
	}
	if !f.detach && (f.Name != "" || f.Restart != "" || f.ready != "") {
		return usage.Errorf("--name, --restart and --ready are for background processes; add -d")
	}
	if f.ready == "" && f.readyTimeout != 0 {
		return usage.Errorf("--ready-timeout is for --ready; add a condition such as --ready port=3000")
	}
	if f.detach && f.timeout != 0 {
		return usage.Errorf("--timeout is not for background processes; end them with doze kill %s PROCESS", sandbox)
	}
	if f.session != "" && (f.detach || f.Cwd != "" || len(f.env) > 0) {
		return usage.Errorf("--session excludes -d, --cwd and --env; use cd and export in the session")
	}
	if f.timeout < 0 {
		return usage.Errorf("--timeout %s is negative; write it like 30s", f.timeout)
	}
	node, err := a.node()
	if err != nil {
		return err
	}
	if f.detach {
		if f.ready != "" {
			condition, err := parseReady(f.ready, f.readyTimeout)
			if err != nil {
				return err
			}
			f.Ready = &condition
		}
		p, err := node.StartProcess(ctx, sandbox, f.StartProcessRequest)
		return a.print(err, p, "%s  %s", p.ID, p.Name)
	}
	req := client.ExecRequest{Command: f.Command, Session: f.session, Timeout: types.Duration(f.timeout)}
	if f.timeout == 0 {
		req.Timeout = client.NoTimeout // Ctrl-C ends it
	}
	streams := client.ExecStreams{Stdout: a.out, Stderr: a.err}
	if !f.noStdin {
		streams.Stdin = a.stdin(f.Argv)
	}
	return a.execAndWait(ctx, node, sandbox, req, streams)
}

func (a *app) execAndWait(ctx context.Context, node *client.Client, sandbox string, req client.ExecRequest, streams client.ExecStreams) error {
	var stdout, stderr capture
	if a.json {
		streams.Stdout, streams.Stderr = &stdout, &stderr
	}
	exit, err := node.ExecStream(ctx, sandbox, req, streams)
	if err != nil {
		return err
	}
	if a.json {
		result := types.ExecResult{Truncated: stdout.truncated || stderr.truncated, ExecExit: exit}
		result.Stdout, result.StdoutEncoding = types.Encode(stdout.data)
		result.Stderr, result.StderrEncoding = types.Encode(stderr.data)
		if err := a.printJSON(result); err != nil {
			return err
		}
	}
	if exit.TimedOut {
		fmt.Fprintln(a.err, "doze: the command was killed because it exceeded its timeout")
	}
	if exit.ExitCode < 0 || exit.ExitCode > 255 {
		return fmt.Errorf("the sandbox reports %d, which is not a valid exit code", exit.ExitCode)
	}
	if exit.ExitCode != 0 {
		return exitCode(exit.ExitCode)
	}
	return nil
}

// commandOf distinguishes a script for the shell and a command to run as it is.
func commandOf(script string, words []string) (command string, argv []string, err error) {
	switch {
	case script != "" && len(words) > 0:
		return "", nil, usage.Errorf("script (-c) and command (%s) exclude each other; give one of them", words[0])
	case script == "" && len(words) == 0:
		return "", nil, usage.Errorf("no command given; write it after --: doze exec SANDBOX -- ls -l")
	case len(words) == 1 && strings.ContainsAny(words[0], " \t\n"):
		return words[0], nil, nil
	}
	return script, words, nil
}

// stdin is what the command reads: nil when this program has no input, or may not
// read it. Of a terminal, the lines that are typed.
func (a *app) stdin(argv []string) io.Reader {
	f, ok := a.in.(*os.File)
	if !ok {
		return a.in
	}
	info, err := f.Stat()
	null, nullErr := os.Stat(os.DevNull)
	if err != nil || nullErr == nil && os.SameFile(info, null) {
		return nil
	}
	fd := int(f.Fd())
	if !term.IsTerminal(fd) {
		return f
	}
	if !inForeground(fd) {
		return nil
	}
	if len(argv) == 1 {
		// Probably a shell or an interpreter, which does not prompt without a terminal.
		fmt.Fprintf(a.err, "doze: %s has no terminal; it reads the lines that you type until Ctrl-D; doze shell has one\n", clean(argv[0]))
	}
	return f
}

// maxCapture is what --json prints of each of stdout and stderr, as the API does.
const maxCapture = 1 << 20

// capture keeps the first maxCapture bytes that are written to it.
type capture struct {
	data      []byte
	truncated bool
}

func (c *capture) Write(b []byte) (int, error) {
	kept := b[:min(len(b), maxCapture-len(c.data))]
	c.data = append(c.data, kept...)
	c.truncated = c.truncated || len(kept) < len(b)
	return len(b), nil
}
