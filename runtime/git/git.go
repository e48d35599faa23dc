// Package git runs a sandbox's own git for the node, as commands of the sandbox's guest,
// and parses git's machine formats.
//
// The git of a sandbox may be any program: its output is bounded in size, and output that
// is not in git's format is an error. Arguments are checked before a command is started,
// so that no name or address is read as an option.
package git

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// responseGrace is how long the node waits for the end of a command after its timeout,
	// which the guest enforces.
	responseGrace = 15 * time.Second
	// exitGrace is how long a command that was killed may take to end.
	exitGrace = 15 * time.Second
	// exitPoll is the pause between two checks whether a command that was killed still runs.
	exitPoll = 5 * time.Millisecond
	// maxSmall limits the output of commands that print some lines.
	maxSmall = 64 << 10
)

// Protocols are the transports that git may use. Without file, an address in a cloned
// repository, such as a submodule's, cannot name files of the sandbox.
const (
	protocols      = "http:https:ssh"
	localProtocols = protocols + ":file"
)

// environment makes git print machine-readable text and never ask for input.
var environment = map[string]string{
	"LC_ALL":   "C.UTF-8", // errors are classified by their text
	"LANGUAGE": "",        // would have precedence
	// A server that wants credentials gets none: policies of egress add them.
	"GIT_TERMINAL_PROMPT": "0",
	"GIT_ASKPASS":         "",
	"SSH_ASKPASS_REQUIRE": "never",
	"GIT_EDITOR":          ":",
	"GIT_ALLOW_PROTOCOL":  localProtocols,
	// Commands that only read do not lock the repository.
	"GIT_OPTIONAL_LOCKS": "0",
	"GIT_PROGRESS_DELAY": "0",
}

// literalPaths makes git read paths as paths, not as patterns.
var literalPaths = map[string]string{"GIT_LITERAL_PATHSPECS": "1"}

// ErrOutput is returned (wrapped) for output that is not in git's format.
var ErrOutput = errors.New("the sandbox's git printed unexpected output")

// Git runs the git of one sandbox. Its methods kill git when their context ends, and
// return *Error when git fails, *guest.Error when it cannot be started, ErrOutput, and the
// errors of a guest.Client.
type Git struct {
	guest    *guest.Client
	deadline time.Time // zero: none
}

// New returns the git of a guest's sandbox. The timeout covers all that the caller does
// with it; 0 means none.
func New(client *guest.Client, timeout time.Duration) *Git {
	g := &Git{guest: client}
	if timeout > 0 {
		g.deadline = time.Now().Add(timeout)
	}
	return g
}

// command is one run of git.
type command struct {
	dir   string // absolute; empty: the image's working directory
	args  []string
	env   map[string]string // in addition to environment
	stdin []byte
	// limit of the bytes that are returned of stdout. A command with more output is
	// killed if it only reads, and otherwise runs to its end.
	limit  int
	reads  bool
	report func(Progress) // may be nil
}

// output is what git wrote to stdout.
type output struct {
	data      []byte
	truncated bool
}

// run runs git to its end.
func (g *Git) run(ctx context.Context, c command) (out output, err error) {
	env := maps.Clone(environment)
	maps.Copy(env, c.env)
	return g.exec(ctx, c, guest.Command{Argv: append([]string{"git"}, c.args...), Cwd: c.dir, Env: env})
}

func (g *Git) exec(ctx context.Context, c command, what guest.Command) (out output, err error) {
	req := guest.ExecRequest{Command: what, Stdin: c.stdin}
	if !g.deadline.IsZero() {
		if req.Timeout = time.Until(g.deadline); req.Timeout <= 0 {
			return out, &Error{Reason: TimedOut}
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, g.deadline.Add(responseGrace))
		defer cancel()
	}
	// Not with ctx: the PID of a command that has started must be known, to await its end.
	stream, err := g.guest.Exec(context.WithoutCancel(ctx), req)
	if err != nil {
		if refused, ok := errors.AsType[*guest.Error](err); ok && refused.Code == guest.CodeNoCommand {
			return out, &Error{Reason: NotInstalled}
		}
		return out, err
	}
	defer stream.Close()
	starting := time.AfterFunc(responseGrace, func() { stream.Close() })
	start, err := stream.Next()
	starting.Stop()
	if err != nil {
		return out, err
	}
	defer context.AfterFunc(ctx, func() { stream.Close() })()
	messages := messages{report: c.report}
	for {
		ev, err := stream.Next()
		switch {
		case err != nil:
			stream.Close()
			g.awaitExit(ctx, start.PID)
			return out, cmp.Or(ctx.Err(), err)
		case ev.Kind == guest.FrameStderr:
			messages.add(ev.Data)
		case ev.Kind == guest.FrameStdout:
			free := c.limit - len(out.data)
			out.truncated = out.truncated || len(ev.Data) > free
			out.data = append(out.data, ev.Data[:min(free, len(ev.Data))]...)
			if out.truncated && c.reads {
				return out, nil
			}
		case ev.Kind == guest.FrameComplete:
			messages.flush()
			return out, failure(ev.Result, &messages, out.data)
		}
	}
}

// failure returns the error of a command that has ended, or nil if it succeeded.
func failure(r *guest.ExecResult, m *messages, stdout []byte) error {
	switch {
	case r.TimedOut:
		return &Error{Reason: TimedOut}
	case r.ExitCode == 0:
		return nil
	}
	e := newError(m.text, string(stdout[:min(len(stdout), maxMessages)]))
	switch {
	case r.Signal != "" && e.Message != "":
		e.Message += "; git was ended by " + r.Signal
	case r.Signal != "":
		e.Message = "git was ended by " + r.Signal
	case e.Message == "":
		e.Message = fmt.Sprintf("git exited with code %d and printed no error", r.ExitCode)
	}
	return e
}

// awaitExit waits until a command that was killed has ended, so that it changes no files
// later. The guest kills the members of a command only after it has stopped all of them.
func (g *Git) awaitExit(ctx context.Context, pid int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), exitGrace)
	defer cancel()
	ticker := time.NewTicker(exitPoll)
	defer ticker.Stop()
	for {
		if _, err := g.guest.Stat(ctx, fmt.Sprint("/proc/", pid), guest.StatOptions{}); err != nil {
			return // it has ended, or the sandbox has
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
