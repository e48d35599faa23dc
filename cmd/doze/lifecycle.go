package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
	"github.com/doze-run/doze/problem"
)

func (a *app) sleepCommand() *cobra.Command {
	return a.pauseCommand("sleep", "Put sandboxes to sleep", "They keep their memory and use no CPU. The next request wakes them.",
		"also pause requests and commands in progress, until the next wake", (*client.Client).Sleep, (*client.Client).ForceSleep)
}

func (a *app) wakeCommand() *cobra.Command {
	return a.moveCommand("wake", "Wake sandboxes", "Any use wakes a sandbox by itself; this does it ahead of time.", (*client.Client).Wake)
}

func (a *app) stopCommand() *cobra.Command {
	return a.pauseCommand("stop", "Stop sandboxes", "Their processes end; their files stay. The next use starts them again.",
		"also end requests and commands in progress", (*client.Client).Stop, (*client.Client).ForceStop)
}

func (a *app) archiveCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "archive SANDBOX...",
		Short: "Move the disks of sandboxes to the object store",
		Long: `Stop sandboxes, move their disks to the object store, and free the space on the node. The
next use of a sandbox downloads its disk and starts it. The operator configures the object
store with the block backups in the Caddyfile. The upload continues if this command is
interrupted.`,
		Example:           "  doze archive shop\n  doze archive $(doze ls -q --state stopped)",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(sandboxNames),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, sandbox string) error {
			show, clear := a.backupLine()
			sb, err := node.Archive(ctx, sandbox, force, show)
			clear()
			return a.printState(sb, err)
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also end requests and commands in progress")
	return cmd
}

// mover changes the state of a sandbox.
type mover func(*client.Client, context.Context, string) (types.Sandbox, error)

// pauseCommand is a moveCommand that fails with busy while requests or commands are
// under way, unless it is forced.
func (a *app) pauseCommand(name, short, long, flag string, gentle, forced mover) *cobra.Command {
	var force bool
	cmd := a.moveCommand(name, short, long, func(node *client.Client, ctx context.Context, sandbox string) (types.Sandbox, error) {
		if force {
			return forced(node, ctx, sandbox)
		}
		return gentle(node, ctx, sandbox)
	})
	cmd.Flags().BoolVarP(&force, "force", "f", false, flag)
	return cmd
}

// moveCommand is a command that changes the state of sandboxes.
func (a *app) moveCommand(name, short, long string, move mover) *cobra.Command {
	return &cobra.Command{
		Use:               name + " SANDBOX...",
		Short:             short,
		Long:              short + ". " + long,
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(sandboxNames),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, sandbox string) error {
			done := a.waiting(sandbox + ": " + name)
			sb, err := move(node, ctx, sandbox)
			done()
			return a.printState(sb, err)
		}),
	}
}

// printState prints the state of a sandbox that the node returned, unless it returned an error.
func (a *app) printState(sb types.Sandbox, err error) error {
	return a.print(err, sb, "%s  %s", sb.Name, sb.State)
}

func (a *app) holdCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "hold SANDBOX DURATION",
		Short:             "Keep a sandbox from falling asleep by itself",
		Long:              "Keep a sandbox from falling asleep by itself for a while. 0s ends the hold.",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		Example:           "  doze hold shop 30m",
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			d, err := time.ParseDuration(args[1])
			if err != nil || d < 0 {
				return usage.Errorf("invalid duration %q; write it like 30m, 90s or 1h30m", args[1])
			}
			return a.printState(node.Hold(ctx, args[0], d))
		}),
	}
}

func (a *app) removeCommand() *cobra.Command {
	var force, quarantined bool
	cmd := &cobra.Command{
		Use:               "rm SANDBOX...",
		Aliases:           []string{"destroy"},
		Short:             "Destroy sandboxes with their files",
		Long:              "Destroy sandboxes with their files. Their processes are killed. This cannot be undone.",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(sandboxNames),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, name string) error {
			done := a.waiting(name + ": rm")
			remove, missing := node.Delete, problem.SandboxNotFound
			if quarantined {
				remove, missing = node.DeleteQuarantined, problem.QuarantineNotFound
			}
			err := remove(ctx, name)
			done()
			if force && problem.Has(err, missing) {
				return nil
			}
			return a.printGone(err, name, "destroyed")
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "ignore sandboxes that do not exist")
	cmd.Flags().BoolVar(&quarantined, "quarantined", false, "remove quarantined containers, by their ids (doze doctor lists them)")
	return cmd
}

// printGone returns err, or else prints what became of something that was removed.
func (a *app) printGone(err error, name, state string) error {
	return a.print(err, map[string]string{"name": name, "state": state}, "%s  %s", name, state)
}

func (a *app) adoptCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "adopt ID",
		Short: "Make a quarantined container a sandbox again",
		Long: `Adopt a sandbox from quarantine. It is stopped, and has its files and its last settings,
ports and declared processes. Its ttl starts again.

A node quarantines containers without a record, for example after an older copy of its
data was restored; doze doctor lists them. Rules and secrets of the sandbox are
only in the node's data: check them with doze egress rules.`,
		Args:    wants(1, 1),
		Example: "  doze adopt k3f9x2m7q1az --name shop",
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			return a.printState(node.Adopt(ctx, args[0], name))
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "name of the sandbox (default: its last one)")
	return cmd
}
