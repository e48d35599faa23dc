package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

func (a *app) dfCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:   "df",
		Short: "Print the disk usage of the node, and the space that deletions would free",
		Long: `Print the disk usage of the node: its file systems, the sums of sandboxes and snapshots, and
the sandboxes with the largest disks. UNUSED is the space freed by deleting all snapshots that
no sandbox is based on. FREED is the space freed by deleting the sandbox. Disks were usually
measured within the last five minutes of a sandbox's use. This never wakes a sandbox.`,
		Args: wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			usage, err := node.DiskUsage(ctx, limit)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(usage)
			}
			return a.printDiskUsage(usage)
		}),
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 20, "number of sandboxes, at most 1000")
	return cmd
}

func (a *app) printDiskUsage(u types.NodeDiskUsage) error {
	t := newTable(a.out, "FILE SYSTEM", "SIZE", "USED", "OTHER", "FREE", "RESERVE")
	for _, f := range u.FileSystems {
		t.row(f.Path, size(f.TotalBytes), size(f.UsedBytes), size(f.OtherBytes), size(f.FreeBytes), size(f.ReserveBytes))
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintln(a.out)
	if err := a.printDiskTotals(u); err != nil || len(u.LargestSandboxes) == 0 {
		return err
	}
	fmt.Fprintln(a.out)
	t = newTable(a.out, "SANDBOX", "STATE", "DISK", "LIMIT", "FREED", "MEASURED")
	for _, d := range u.LargestSandboxes {
		limit := "-"
		if d.LimitBytes > 0 {
			limit = size(d.LimitBytes)
		}
		t.row(d.Name, d.State, size(d.DiskBytes), limit, size(d.FreedBytes), ago(d.MeasuredAt))
	}
	return t.flush()
}

// printDiskTotals prints the sums of a node's disk usage by kind.
func (a *app) printDiskTotals(u types.NodeDiskUsage) error {
	t := newTable(a.out, "KIND", "COUNT", "SIZE", "UNUSED")
	t.row("sandboxes", u.Sandboxes.Count, size(u.Sandboxes.Bytes), "-")
	t.row("snapshots", u.Snapshots.Count, size(u.Snapshots.Bytes), size(u.UnusedSnapshots.Bytes))
	t.row("bases", u.Bases.Count, size(u.Bases.Bytes), "-")
	t.row("records and events", "-", size(u.StoreBytes), "-")
	t.row("backup cache", "-", size(u.BackupCacheBytes), "-")
	return t.flush()
}
