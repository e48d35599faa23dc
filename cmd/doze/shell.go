package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/problem"
)

const shellName = "shell"

func (a *app) shellCommand() *cobra.Command {
	var o client.TerminalOptions
	var list, web bool
	var closing string
	cmd := &cobra.Command{
		Use:   shellName + " SANDBOX [-- COMMAND [ARG...]]",
		Short: "Open a shell in a sandbox, on a terminal",
		Long: `Open a shell in a sandbox, or run a command, on a terminal of its own. This wakes the
sandbox. doze exits with the exit code of the shell.

The terminal and its program stay when the connection is lost, and when the sandbox
sleeps: doze connects again by itself and misses no output, and what is typed wakes the
sandbox. With --id, a terminal has a name that several clients can join.

At the beginning of a line, ~ has a special meaning, as with ssh:
  ~.   disconnect; the terminal runs on
  ~?   list these
  ~~   type ~

doze exec runs commands without a terminal, for scripts and pipes. Exit codes of doze
itself are the same as for doze exec.`,
		Example: `  doze shell shop
  doze shell shop -- htop
  doze shell --id main shop
  doze shell --session dev shop
  doze shell --list shop
  doze shell --web shop`,
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			switch sandbox := args[0]; {
			case list && closing != "", web && (list || closing != ""), (list || closing != "" || web) && len(args) > 1:
				return usage.Errorf("--list, --close, --web and a command exclude each other; give one of them")
			case web && (o.Cwd != "" || o.Session != ""):
				return usage.Errorf("--web excludes --cwd and --session; open the terminal with --id and these, and join it in the browser")
			case web:
				address := node.TerminalPage(sandbox, o.ID)
				if err := a.print(nil, map[string]any{"url": address}, "%s", address); err != nil || a.json {
					return err
				}
				return a.browse(ctx, address)
			case list:
				return a.listTerminals(ctx, node, sandbox)
			case closing != "":
				t, err := node.CloseTerminal(ctx, sandbox, closing)
				return a.print(err, t, "%s  %s", t.ID, stateOrEnd(t.State, t.Reason, t.Signal, t.ExitCode))
			default:
				o.Command = commandLineOf(args[1:])
				return a.shell(ctx, node, sandbox, o)
			}
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&o.ID, "id", "", "id of the terminal, which is joined if it exists (default: a new one)")
	flags.StringVarP(&o.Cwd, "cwd", "w", "", "working directory of a new terminal")
	flags.StringVar(&o.Session, "session", "", "id of a session whose working directory and exported variables a new terminal starts with")
	cmd.RegisterFlagCompletionFunc("session", a.complete(sessionFlag))
	flags.BoolVar(&web, "web", false, "print the address of a page with the terminal, and open it in the browser if there is one")
	flags.BoolVar(&list, "list", false, "list the terminals of the sandbox, as last known, without waking it")
	flags.StringVar(&closing, "close", "", "end the terminal with this id and its program")
	return cmd
}

// commandLineOf returns words as a command line for /bin/sh: one word as it is, and several each
// as a word.
func commandLineOf(words []string) string {
	if len(words) == 1 {
		return words[0]
	}
	return strings.Join(texts(words, func(word string) string {
		if isPlain(word) && word != "" {
			return word
		}
		return shellQuote(word)
	}), " ")
}

func (a *app) listTerminals(ctx context.Context, node *client.Client, sandbox string) error {
	terminals, err := node.Terminals(ctx, sandbox)
	if err != nil {
		return err
	}
	heads := []any{"ID", "PID", "STATE", "SIZE", "STARTED", "COMMAND"}
	return printTable(a, "terminals", terminals, heads, func(t types.Terminal) []any {
		return []any{t.ID, t.PID, stateOrEnd(t.State, t.Reason, t.Signal, t.ExitCode), fmt.Sprintf("%dx%d", t.Cols, t.Rows), ago(t.StartedAt), t.Command}
	})
}

// shell connects this terminal with one of the sandbox.
func (a *app) shell(ctx context.Context, node *client.Client, sandbox string, o client.TerminalOptions) error {
	keyboard, ok := a.in.(*os.File)
	if !ok || !isTerminal(keyboard) {
		return usage.Errorf("standard input is not a terminal; run commands without one with doze exec %s -- COMMAND", sandbox)
	}
	outer := ctx
	ctx, stop := signal.NotifyContext(outer, syscall.SIGHUP)
	defer stop()
	s := &shell{node: node, sandbox: sandbox, options: o, keyboard: keyboard, screen: a.out, messages: a.err}
	s.options.Cols, s.options.Rows = s.size()
	s.redraw = o.ID != ""
	exit, err := s.run(ctx)
	switch {
	case errors.Is(err, errDetached):
		fmt.Fprintf(a.err, "doze: disconnected from the terminal %s, which runs on; doze shell --id %[1]s %s joins it again\n", clean(s.options.ID), clean(sandbox))
		return nil
	case ctx.Err() != nil && outer.Err() == nil:
		return exitCode(128 + int(syscall.SIGHUP))
	case err != nil:
		return err
	case exit.Code < 0 || exit.Code > 255:
		return fmt.Errorf("the sandbox reports %d, which is not a valid exit code", exit.Code)
	case exit.Code != 0:
		return exitCode(exit.Code)
	}
	return nil
}

// shell is this terminal, connected with one of a sandbox.
type shell struct {
	node     *client.Client
	sandbox  string
	options  client.TerminalOptions // of the next connection; its size is the last that was sent
	keyboard *os.File
	screen   io.Writer
	messages io.Writer

	queue   keyQueue
	modes   screenModes
	offline atomic.Bool // no connection: Ctrl-C gives up
	redraw  bool        // the program has to draw again what is on the screen
	shown   bool        // the loss of the connection
}

// errDetached ends a shell whose terminal runs on.
var errDetached = errors.New("disconnected")

// size is the size of this terminal.
func (s *shell) size() (cols, rows uint16) {
	const most = 1000 // of the API
	width, height := sizeOf(s.keyboard)
	return uint16(min(width, most)), uint16(min(height, most))
}

// run returns how the program ended. It restores this terminal.
func (s *shell) run(ctx context.Context) (*types.TerminalExit, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	conn, err := s.node.OpenTerminal(ctx, s.sandbox, s.options)
	if err != nil {
		return nil, err
	}
	before, err := term.MakeRaw(int(s.keyboard.Fd()))
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer term.Restore(int(s.keyboard.Fd()), before)
	s.queue.changed = make(chan struct{}, 1)
	go s.readKeys(cancel) // ends with the program
	for {
		exit, err := s.connected(ctx, conn)
		conn.Close()
		if exit != nil {
			return exit, nil
		}
		if s.retries(ctx, err) {
			if conn, err = s.reconnect(ctx); err == nil {
				continue
			}
		}
		s.reset()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
}

// connected passes keys and output until the program or the connection ends.
func (s *shell) connected(ctx context.Context, conn *client.Terminal) (*types.TerminalExit, error) {
	ended := make(chan struct{})
	var exit *types.TerminalExit
	var failure error
	redraw := make(chan struct{}, 1)
	go func() { // ended by conn.Close
		defer close(ended)
		exit, failure = s.print(conn, redraw)
	}()
	defer func() { <-ended }()
	defer conn.Close()
	resized := make(chan os.Signal, 1)
	notifyResized(resized)
	defer signal.Stop(resized)
	check := time.NewTicker(time.Second) // consoles of Windows send no signal
	defer check.Stop()
	for {
		if cols, rows := s.size(); cols != s.options.Cols || rows != s.options.Rows {
			conn.Resize(cols, rows) // a failure ends print
			s.options.Cols, s.options.Rows = cols, rows
		}
		select {
		case <-ended:
			return exit, failure
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-s.queue.changed:
			conn.Write(s.queue.drain())
		case <-redraw:
			// Programs draw again when the size has changed: it differs until the next check.
			cols, rows := s.size()
			rows = max(1, rows-1)
			conn.Resize(cols, rows)
			s.options.Cols, s.options.Rows = cols, rows
			check.Reset(redrawPause)
			<-check.C
			check.Reset(time.Second)
		case <-resized:
		case <-check.C:
		}
	}
}

// redrawPause is how long a program sees a size that differs from the present one.
const redrawPause = 50 * time.Millisecond

// print prints the output until the program or the connection ends.
func (s *shell) print(conn *client.Terminal, redraw chan<- struct{}) (*types.TerminalExit, error) {
	notify := func() {
		select {
		case redraw <- struct{}{}:
		default:
		}
	}
	for {
		ev, err := conn.Next()
		if cursor, ok := conn.Cursor(); ok {
			s.options.ID, s.options.Since = conn.ID(), &cursor
		}
		switch {
		case err != nil:
			return nil, err
		case ev.Exit != nil:
			return ev.Exit, nil
		case ev.Truncated != nil:
			notify()
		case ev.Ready != nil:
			s.offline.Store(false)
			if s.redraw {
				notify()
			}
			s.redraw, s.shown = false, false
		default:
			s.modes.note(ev.Output)
			if _, err := s.screen.Write(ev.Output); err != nil {
				return nil, err
			}
		}
	}
}

// retries reports whether a connection that ended with err can be made again.
func (s *shell) retries(ctx context.Context, err error) bool {
	if ctx.Err() != nil || s.options.ID == "" {
		return false
	}
	if unexpected, ok := errors.AsType[*client.UnexpectedResponseError](err); ok {
		return unexpected.Status >= http.StatusInternalServerError // of a proxy
	}
	_, unreachable := errors.AsType[*client.UnreachableError](err)
	if refused, ok := errors.AsType[*problem.Problem](err); ok {
		return refused.Status >= http.StatusInternalServerError
	}
	return unreachable || errors.Is(err, client.ErrTerminalLost)
}

// reconnect connects again, until that succeeds, is refused, or ctx ends.
func (s *shell) reconnect(ctx context.Context) (*client.Terminal, error) {
	s.offline.Store(true)
	o := s.options
	o.Since = cmp.Or(o.Since, new(int64)) // which opens no other terminal
	for pause := 250 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		conn, err := s.node.OpenTerminal(ctx, s.sandbox, o)
		if err == nil {
			return conn, nil
		}
		if !s.retries(ctx, err) {
			return nil, err
		}
		if !s.shown {
			s.shown, s.redraw = true, true
			fmt.Fprintf(s.messages, "\r\ndoze: the connection was lost; trying again (Ctrl-C gives up)\r\n")
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// reset ends the modes of the screen that a program has not ended.
func (s *shell) reset() {
	io.WriteString(s.screen, s.modes.undo()+"\r\n")
}

// readKeys reads what is typed until the keyboard fails, or the escape to disconnect.
func (s *shell) readKeys(end context.CancelCauseFunc) {
	buf := make([]byte, 4<<10)
	keys := keyFilter{lineStart: true}
	for {
		n, err := s.keyboard.Read(buf)
		typed, escape := keys.filter(buf[:n])
		switch {
		case escape == escapeDisconnect, s.offline.Load() && strings.ContainsRune(string(typed), ctrlC):
			end(errDetached)
			return
		case err != nil:
			end(fmt.Errorf("read the keyboard: %w", err))
			return
		case escape == escapeHelp:
			io.WriteString(s.messages, "\r\n~.  disconnect; the terminal runs on\r\n~?  list these\r\n~~  type ~\r\n")
		}
		s.queue.add(typed)
	}
}
