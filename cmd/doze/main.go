// Command doze is the command line of doze: a client of a node's HTTP API. The program
// doze-node has the commands that run and maintain a node (run, reload, validate, caddy,
// backup-node, restore-node, doctor); doze executes it for them.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/problem"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second Ctrl-C ends what the first one could not.
	context.AfterFunc(ctx, stop)
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	code := a.run(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}

// Exit codes, in addition to the exit codes of commands in a sandbox.
const (
	exitFailed = 1
	// Of exec and shell, whose other codes are the command's: as env, chroot and docker do.
	exitExecFailed    = 125
	exitNotExecutable = 126
	exitNotFound      = 127
	exitInterrupted   = 130 // as in shells: 128 + SIGINT
)

// exitCode ends the program with that code and without a message.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// run runs one command line and returns the program's exit code.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	cmd, err := root.ExecuteContextC(ctx)
	if a.api != nil {
		a.api.Close()
	}
	code, exited := errors.AsType[exitCode](err)
	switch {
	case err == nil:
		return 0
	case exited:
		return int(code)
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.Is(err, syscall.EPIPE):
		return failureCode(cmd, err) // the reader of our output has enough of it
	}
	a.complain(err)
	return failureCode(cmd, err)
}

// passesExitCodes reports whether a command exits with the exit code of a program in a sandbox.
func passesExitCodes(cmd *cobra.Command) bool {
	return cmd.Name() == execName || cmd.Name() == shellName
}

// failureCode is the exit code for an error of doze's own.
func failureCode(cmd *cobra.Command, err error) int {
	_, misused := errors.AsType[*usage.Error](err)
	switch {
	case !passesExitCodes(cmd) && misused:
		return usage.ExitCode
	case !passesExitCodes(cmd):
		return exitFailed
	case problem.Has(err, problem.CommandNotFound), problem.Has(err, problem.ShellNotFound):
		return exitNotFound
	case problem.Has(err, problem.CommandNotExecutable):
		return exitNotExecutable
	}
	return exitExecFailed
}

// complain prints an error with what is known to help.
func (a *app) complain(err error) {
	fmt.Fprintf(a.err, "doze: %s\n", clean(strings.TrimSpace(err.Error())))
	if refused, ok := errors.AsType[*problem.Problem](err); ok {
		if len(refused.Errors) > 1 {
			for _, fault := range refused.Errors {
				fmt.Fprintf(a.err, "  %s: %s\n", clean(fault.Location), clean(strings.TrimSuffix(fault.Message+"; "+fault.Hint, "; ")))
			}
		}
		if p := refused.Process; p != nil && p.Output != "" {
			fmt.Fprintf(a.err, "  the last lines of %s:\n", clean(p.Name))
			_ = indent(a.err, "    ", p.Output)
		}
		if refused.Status >= 500 && refused.RequestID != "" {
			fmt.Fprintf(a.err, "  the node's log has more about request %s\n", clean(refused.RequestID))
		}
	}
	_, unreachable := errors.AsType[*client.UnreachableError](err)
	_, distrusted := errors.AsType[*tls.CertificateVerificationError](err)
	switch {
	case distrusted:
		fmt.Fprintln(a.err, "  DOZE_CA or --ca names the file with the CA of the node's certificate; on the node's machine `doze env` prints it")
	case problem.Has(err, problem.SandboxBusy):
		fmt.Fprintln(a.err, "  use --force: sleep pauses requests and commands in progress, stop, archive and restore end them")
	case unreachable:
		fmt.Fprintln(a.err, "  is the node running? `make up` or `doze run` starts one, `doze doctor` checks its requirements")
	}
}

// app is one run of the command line.
type app struct {
	in       io.Reader
	out, err io.Writer
	getenv   func(string) string

	// Global flags.
	json   bool
	apiURL string
	caFile string

	api *client.Client // made by node, once
	// policies is how policies are compiled and run here; what is zero is as on a node.
	policies runnerLimits
}
