package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) mountCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mount",
		Short: "Mount buckets of object stores in sandboxes",
		Long: `Mount buckets of object stores as folders of sandboxes. The operator configures the buckets,
with their credentials, with bucket in the Caddyfile; sandboxes have no credentials.`,
		Example: `  doze mount add shop datasets/images /data --read-only
  doze mount ls shop
  doze mount rm shop /data`,
	}
	cmd.AddCommand(a.addMountCommand(), a.listMountsCommand(), a.removeMountCommand())
	return cmd
}

func (a *app) addMountCommand() *cobra.Command {
	var req types.MountRequest
	cmd := &cobra.Command{
		Use:   "add SANDBOX BUCKET[/PREFIX] PATH",
		Short: "Mount a bucket, or a folder of it, as a folder of a sandbox",
		Long: `Mount a bucket, or a folder of it, as a folder of a sandbox. This wakes the sandbox, and creates
the folder if necessary. Files are stored in the bucket when programs close them.
The mount remains when the sandbox sleeps, stops or is archived.`,
		Example:           "  doze mount add shop datasets /data\n  doze mount add shop datasets/images /srv/images --read-only",
		Args:              wants(3, 3),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			req.Bucket, req.Prefix, _ = strings.Cut(args[1], "/")
			req.Path = args[2]
			m, err := node.Mount(ctx, args[0], req)
			return a.print(err, m, "%s", m.Path)
		}),
	}
	cmd.Flags().BoolVar(&req.ReadOnly, "read-only", false, "programs in the sandbox cannot change the bucket")
	return cmd
}

func (a *app) listMountsCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "ls SANDBOX",
		Short:             "List the mounts of a sandbox",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			mounts, err := node.Mounts(ctx, args[0])
			if err != nil {
				return err
			}
			return printTable(a, "mounts", mounts, []any{"PATH", "BUCKET", "PREFIX", "ACCESS", "MOUNTED"}, func(m types.Mount) []any {
				access := "read-write"
				if m.ReadOnly {
					access = "read-only"
				}
				return []any{m.Path, m.Bucket, m.Prefix, access, ago(m.CreatedAt)}
			})
		}),
	}
}

func (a *app) removeMountCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm SANDBOX PATH",
		Short: "Unmount a bucket",
		Long: `Unmount a bucket. Open files remain usable until they are closed. The bucket keeps its objects.
This never wakes the sandbox.`,
		Example:           "  doze mount rm shop /data",
		Args:              wants(2, 2),
		ValidArgsFunction: a.complete(mountPaths),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			err := node.Unmount(ctx, args[0], args[1])
			return a.print(err, map[string]any{"path": args[1], "state": "unmounted"}, "%s  unmounted", args[1])
		}),
	}
}

// mountPaths completes a sandbox, and then the path of one of its mounts.
func mountPaths(ctx context.Context, node *client.Client, args []string) []string {
	if len(args) != 1 {
		return oneSandbox(ctx, node, args)
	}
	mounts, _ := node.Mounts(ctx, args[0])
	return texts(mounts, func(m types.Mount) string { return m.Path })
}
