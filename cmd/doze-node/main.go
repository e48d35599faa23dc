// Command doze-node is a node: Caddy with doze's modules, and the commands that
// operate a node on this machine. `doze` executes it for these commands, so that users
// call doze and a client does not load a server.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/cmd/internal/display"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/cmd/internal/version"
)

func main() {
	a := &app{out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	os.Exit(a.run(context.Background(), os.Args[1:]))
}

const exitFailed = 1

// errReported ends the program with exitFailed and prints nothing more.
var errReported = errors.New("reported")

// app is one run of the program.
type app struct {
	out, err io.Writer
	getenv   func(string) string
	// policyCompiler is the program that compiles policies. Default: the running one.
	policyCompiler string
}

// run runs one command line and returns the program's exit code. Caddy's commands
// do not return: they end the program.
func (a *app) run(ctx context.Context, args []string) int {
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetOut(a.out)
	root.SetErr(a.err)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case !errors.Is(err, errReported):
		fmt.Fprintf(a.err, "doze: %s\n", display.Clean(strings.TrimSpace(err.Error())))
	}
	if _, misused := errors.AsType[*usage.Error](err); misused {
		return usage.ExitCode
	}
	return exitFailed
}

// rootCommand is named doze: that is what people call.
func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "doze",
		Short:         "Run and maintain a node on this machine",
		Long:          "Run and maintain a node on this machine. `doze --help` lists all commands.",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(a.runCommand(), a.reloadCommand(), a.validateCommand(), a.caddyCommand(), a.doctorCommand(),
		a.backupCommand(), a.restoreCommand(), a.versionCommand())
	usage.Check(root, nil)
	return root
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintf(a.out, "doze-node %s\n", version.String())
			return err
		},
	}
}

// interruptible ends with the first SIGINT or SIGTERM. Caddy handles signals of its
// own commands.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
}
