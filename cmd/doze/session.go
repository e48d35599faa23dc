package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) sessionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "session",
		Short: "Shells that keep their state from one command to the next",
		Long: `Shells that keep their state from one command to the next: working directory, variables,
functions and options. doze exec --session runs commands in them, one after the other.
They sleep with their sandbox, and end when it stops.`,
		Example: `  doze session create shop dev --cwd /srv/shop
  doze exec --session dev shop -c 'export NODE_ENV=test'
  doze exec --session dev shop -c 'echo $NODE_ENV; pwd'
  doze session rm shop dev`,
	}
	cmd.AddCommand(a.createSessionCommand(), a.listSessionsCommand(),
		partCommand(a, "interrupt SANDBOX SESSION", "Interrupt the command that a session runs", "Interrupt the command that a session runs, as Ctrl-C does. The session goes on.", "interrupted", sessionIDs, (*client.Client).InterruptSession),
		partCommand(a, "rm SANDBOX SESSION", "Close a session", "Close a session: its shell ends, with all that it started.", "closed", sessionIDs, (*client.Client).CloseSession))
	return cmd
}

func (a *app) createSessionCommand() *cobra.Command {
	var req types.OpenSessionRequest
	var env []string
	cmd := &cobra.Command{
		Use:               "create SANDBOX [SESSION]",
		Short:             "Open a session, and print its id",
		Long:              "Open a session, and print its id, which is generated if none is given. This wakes the sandbox.",
		Args:              wants(1, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) (err error) {
			if len(args) > 1 {
				req.ID = args[1]
			}
			if req.Env, err = a.environ(env); err != nil {
				return err
			}
			s, err := node.OpenSession(ctx, args[0], req)
			return a.print(err, s, "%s", s.ID)
		}),
	}
	cmd.Flags().StringVarP(&req.Cwd, "cwd", "w", "", "working directory at the start")
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable KEY=VALUE, or KEY with its value in this shell; may be repeated")
	return cmd
}

func (a *app) listSessionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls SANDBOX",
		Short:             "List the sessions of a sandbox",
		Long:              "List the sessions of a sandbox, as last known. This never wakes the sandbox.",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sessions, err := node.Sessions(ctx, args[0])
			if err != nil {
				return err
			}
			heads := []any{"ID", "SHELL", "PID", "STATE", "STARTED", "CWD"}
			return printTable(a, "sessions", sessions, heads, func(s types.Session) []any {
				return []any{s.ID, s.Shell, s.PID, stateOrEnd(s.State, s.Reason, s.Signal, s.ExitCode), ago(s.StartedAt), s.Cwd}
			})
		}),
	}
}

// partCommand is a command that calls the node for a part of a sandbox, such as a session, and
// prints the id of the part and what is done.
func partCommand[T any](a *app, use, short, long, done string, list lister, call func(node *client.Client, ctx context.Context, sandbox, id string) (T, error)) *cobra.Command {
	return &cobra.Command{
		Use:               use,
		Short:             short,
		Long:              long,
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(list),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			part, err := call(node, ctx, args[0], args[1])
			return a.print(err, part, "%s  %s", args[1], done)
		}),
	}
}

// sessionFlag lists the sessions of the sandbox that args name.
func sessionFlag(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) == 0 {
		return nil
	}
	return sessionIDs(ctx, node, args[:1])
}

// sessionIDs lists sandboxes, and then the sessions of the named one.
func sessionIDs(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) != 1 {
		return oneSandbox(ctx, node, args)
	}
	sessions, _ := node.Sessions(ctx, args[0])
	return texts(sessions, func(s types.Session) string { return s.ID })
}
