package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/display"
)

func (a *app) psCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ps SANDBOX",
		Short:             "List the background processes of a sandbox",
		Long:              "List the background processes of a sandbox, as last known. This never wakes the sandbox.",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			processes, err := node.Processes(ctx, args[0])
			if err != nil {
				return err
			}
			heads := []any{"ID", "NAME", "PID", "STATE", "RESTART", "STARTED", "COMMAND"}
			return printTable(a, "processes", processes, heads, func(p types.Process) []any {
				return []any{p.ID, p.Name, p.PID, processState(p), p.Restart, ago(p.StartedAt), commandLine(p)}
			})
		}),
	}
}

// processState describes the state of a process, or how it ended as far as it is known.
func processState(p types.Process) string { return stateOrEnd(p.State, "", p.Signal, p.ExitCode) }

// stateOrEnd describes a state, or how it ended as far as that is known. A state that was lost
// with its sandbox has the reason of that, and neither signal nor exit code.
func stateOrEnd(state types.ProcessState, reason types.StateReason, signal string, exitCode *int) string {
	if end := cmp.Or(string(reason), signal); end != "" {
		return fmt.Sprintf("%s (%s)", state, end)
	}
	if exitCode != nil {
		return fmt.Sprintf("%s (%d)", state, *exitCode)
	}
	return string(state)
}

func commandLine(p types.Process) string { return cmp.Or(p.Command, strings.Join(p.Argv, " ")) }

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs SANDBOX PROCESS",
		Short: "Print the output of a background process",
		Long: `Print the output of a background process, given by id or name. This wakes the sandbox,
which stores the output; -f keeps it awake.`,
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(processNames),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			return node.Logs(ctx, args[0], args[1], follow, a.printLog)
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output until the process ends")
	return cmd
}

func (a *app) printLog(l client.Log) (err error) {
	switch {
	case a.json:
		err = display.JSON(a.out, l, "")
	case l.Dropped > 0:
		_, err = fmt.Fprintf(a.err, "doze: %s of output were overwritten before they could be read\n", size(l.Dropped))
	case l.Exit != nil:
		_, err = fmt.Fprintf(a.err, "doze: %s is %s\n", clean(l.Exit.Name), clean(processState(*l.Exit)))
	case l.Stream == types.LogStreamStderr:
		_, err = a.err.Write(l.Data)
	default:
		_, err = a.out.Write(l.Data)
	}
	return err
}

func (a *app) killCommand() *cobra.Command {
	var signal string
	cmd := &cobra.Command{
		Use:   "kill SANDBOX PROCESS",
		Short: "End a background process, or send it a signal",
		Long: `End a background process, given by id or name, with all its descendants: SIGTERM, and
SIGKILL after 5 seconds. It is not restarted. With --signal, only send that signal.`,
		Example:           "  doze kill shop web\n  doze kill --signal HUP shop web",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(processNames),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			done := a.waiting(fmt.Sprintf("%s: kill %s", args[0], args[1]))
			p, err := node.StopProcess(ctx, args[0], args[1], signal)
			done()
			return a.print(err, p, "%s  %s  %s", p.ID, p.Name, processState(p))
		}),
	}
	cmd.Flags().StringVarP(&signal, "signal", "s", "", "only send this signal, such as HUP")
	cmd.RegisterFlagCompletionFunc("signal", cobra.FixedCompletions([]string{"HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
