package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) psCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ps SANDBOX",
		Short:             "List the processes in the background of a sandbox",
		Long:              "List the processes in the background of a sandbox, as last known. This does not wake it.",
		Args:              wants(1, 1),
		ValidArgsFunction: a.completeFirst,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			processes, err := node.Processes(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"processes": processes})
			}
			t := newTable(a.out, "ID", "NAME", "PID", "STATE", "RESTART", "STARTED", "COMMAND")
			for _, p := range processes {
				t.row(p.ID, p.Name, strconv.Itoa(p.PID), processState(p), string(p.Restart), ago(p.StartedAt), commandLine(p.Command, p.Argv))
			}
			return t.flush()
		}),
	}
}

// processState describes the state of a process, or how it ended as far as it is known.
func processState(p types.Process) string {
	switch {
	case p.Signal != "":
		return string(p.State) + " (" + p.Signal + ")"
	case p.ExitCode != nil:
		return string(p.State) + " (" + strconv.Itoa(*p.ExitCode) + ")"
	}
	return string(p.State)
}

func commandLine(command string, argv []string) string {
	if command != "" {
		return command
	}
	return strings.Join(argv, " ")
}

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs SANDBOX PROCESS",
		Short: "Print the output of a process in the background",
		Long: `Print the output of a process in the background, named by its id or its name.
This wakes the sandbox, because
the output is kept inside it; -f keeps it awake.`,
		Args:              wants(2, 2),
		ValidArgsFunction: a.completeProcess,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			return node.Logs(ctx, args[0], args[1], follow, a.printLog)
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	return cmd
}

func (a *app) printLog(l client.Log) error {
	switch {
	case a.json:
		return a.printLine(l)
	case l.Dropped > 0:
		_, err := fmt.Fprintf(a.err, "doze: %s of output are left out: they were overwritten before they could be read\n", size(l.Dropped))
		return err
	case l.Exit != nil:
		fmt.Fprintf(a.err, "doze: %s is %s\n", clean(l.Exit.Name), clean(processState(*l.Exit)))
		return nil
	case l.Stream == types.LogStreamStderr:
		return writeTo(a.err)(l.Data)
	}
	return writeTo(a.out)(l.Data)
}

func (a *app) killCommand() *cobra.Command {
	var signal string
	cmd := &cobra.Command{
		Use:   "kill SANDBOX PROCESS",
		Short: "End a process in the background, or send it a signal",
		Long: `End a process in the background, named by its id or its name, with all that it
started: SIGTERM, and after 5
seconds SIGKILL. It is not started again. With --signal only that is sent.`,
		Example:           "  doze kill shop web\n  doze kill --signal HUP shop web",
		Args:              wants(2, 2),
		ValidArgsFunction: a.completeProcess,
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			done := a.waiting(fmt.Sprintf("%s: kill %s", args[0], args[1]))
			p, err := node.StopProcess(ctx, args[0], args[1], signal)
			done()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			_, err = fmt.Fprintf(a.out, "%s  %s  %s\n", clean(p.ID), clean(p.Name), clean(processState(p)))
			return err
		}),
	}
	cmd.Flags().StringVarP(&signal, "signal", "s", "", "only send this signal, such as HUP")
	cmd.RegisterFlagCompletionFunc("signal", cobra.FixedCompletions([]string{"HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
