package main

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) snapshotCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Disks of sandboxes, to restore and to fork",
		Long: `Disks of sandboxes, to restore and to fork. A snapshot has all files of a sandbox, or the
named ones, and never changes. Sandboxes that begin with it share its files until they change them.`,
		Example: `  doze snapshot create shop before-upgrade
  doze snapshot create shop --path /srv/shop
  doze snapshot ls shop
  doze restore shop before-upgrade
  doze create shop-2 --snapshot before-upgrade
  doze snapshot push before-upgrade oci-archive:shop.tar
  doze snapshot rm before-upgrade`,
	}
	cmd.AddCommand(a.createSnapshotCommand(), a.listSnapshotsCommand(), a.pushSnapshotCommand(), a.removeSnapshotCommand())
	return cmd
}

func (a *app) createSnapshotCommand() *cobra.Command {
	var req types.CreateSnapshotRequest
	cmd := &cobra.Command{
		Use:   "create SANDBOX [NAME]",
		Short: "Take a snapshot, and print its id",
		Long: `Take a snapshot of the disk of a sandbox in any state, and print its id. This never wakes
the sandbox. Programs that run stop for a moment, while the last changes are copied.

The snapshot is the whole disk or, with --path, the named files and folders. Restoring it then
replaces only these.`,
		Example: `  doze snapshot create shop before-upgrade
  doze snapshot create shop --path /srv/shop --path /etc/shop.conf --keep-last 7`,
		Args:              wants(1, 2),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			if len(args) > 1 {
				req.Name = args[1]
			}
			done := a.waiting("taking a snapshot of " + args[0])
			s, err := node.CreateSnapshot(ctx, args[0], req)
			done()
			return a.print(err, s, "%s", s.ID)
		}),
	}
	cmd.Flags().Var(optionalDuration{&req.MaxAge}, "max-age", "age at which the node deletes it")
	cmd.Flags().StringArrayVar(&req.Paths, "path", nil, "only this absolute `PATH` of a file or folder; repeatable")
	cmd.Flags().IntVar(&req.RetainLast, "keep-last", 0, "how many snapshots of the sandbox and of the same paths without a name stay; the node deletes the oldest; 0 for all")
	return cmd
}

func (a *app) listSnapshotsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls [SANDBOX]",
		Short:             "List the snapshots of a sandbox, or all, newest first",
		Args:              wants(0, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			sandbox := ""
			if len(args) > 0 {
				sandbox = args[0]
			}
			snapshots, err := node.Snapshots(ctx, sandbox)
			if err != nil {
				return err
			}
			heads := []any{"ID", "NAME", "SANDBOX", "TAKEN", "SIZE", "FROZEN", "PATHS"}
			return printTable(a, "snapshots", snapshots, heads, func(s types.Snapshot) []any {
				bytes, frozen := "-", "-"
				if s.SizeBytes > 0 {
					bytes = size(s.SizeBytes)
				}
				if s.FrozenMS > 0 {
					frozen = milliseconds(s.FrozenMS)
				}
				return []any{s.ID, cmp.Or(s.Name, "-"), s.SandboxName, ago(s.CreatedAt), bytes, frozen, pathsText(s.Paths)}
			})
		}),
	}
}

func (a *app) removeSnapshotCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "rm SNAPSHOT...",
		Short:             "Delete snapshots",
		Long:              "Delete snapshots. Sandboxes that begin with one keep their files.",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(snapshotNames),
		RunE: a.forEach(func(ctx context.Context, node *client.Client, snapshot string) error {
			return a.printGone(node.DeleteSnapshot(ctx, snapshot), snapshot, "deleted")
		}),
	}
}

func (a *app) restoreCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "restore SANDBOX SNAPSHOT",
		Short: "Replace the disk of a sandbox by a snapshot",
		Long: `Replace the disk of a sandbox by a snapshot. Its programs end and its files are
discarded; it keeps its name, ports and rules. If it was running, it starts again.
A snapshot of paths replaces only these.`,
		Example: "  doze restore shop before-upgrade",
		Args:    wants(2, 2),
		ValidArgsFunction: a.complete(func(ctx context.Context, node *client.Client, args []string) []string {
			if len(args) == 1 {
				return snapshotNames(ctx, node, nil)
			}
			return oneSandbox(ctx, node, args)
		}),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			done := a.waiting("restoring " + args[0])
			sb, err := node.Restore(ctx, args[0], types.RestoreRequest{SnapshotID: args[1]}, force)
			done()
			return a.printState(sb, err)
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also end requests and commands in progress")
	return cmd
}

func (a *app) forkCommand() *cobra.Command {
	var count int
	cmd := &cobra.Command{
		Use:   "fork SANDBOX [NAME...]",
		Short: "Create sandboxes with the disk of another",
		Long: `Create sandboxes with the disk, environment and declared processes of another, which goes on.
Name each, or give their number with --count. They have no ports and no egress rules of their own.`,
		Example:           "  doze fork shop try-1 try-2 try-3\n  doze fork shop --count 10",
		Args:              wants(1, -1),
		ValidArgsFunction: a.complete(oneSandbox),
	}
	cmd.RunE = a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
		req := types.ForkRequest{Count: count, Names: args[1:]}
		if len(req.Names) > 0 {
			req.Count = len(req.Names)
			if cmd.Flags().Changed("count") && count != req.Count {
				return usage.Errorf("--count %d is not the number of names; omit it", count)
			}
		}
		done := a.waiting("forking " + args[0])
		forks, err := node.Fork(ctx, args[0], req)
		done()
		if err != nil {
			return err
		}
		heads := []any{"NAME", "ID", "STATE"}
		return printTable(a, "sandboxes", forks, heads, func(sb types.Sandbox) []any { return []any{sb.Name, sb.ID, sb.State} })
	})
	cmd.Flags().IntVarP(&count, "count", "n", 1, "number of forks, if they are not named")
	return cmd
}

// snapshotNames lists snapshots by name, or by id if they have none.
func snapshotNames(ctx context.Context, node *client.Client, _ []string) []string {
	snapshots, _ := node.Snapshots(ctx, "")
	return texts(snapshots, func(s types.Snapshot) string { return cmp.Or(s.Name, s.ID) })
}
