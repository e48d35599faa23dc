package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

// historic are the events of history: what happens to the memory and the disk of a sandbox.
var historic = []types.EventType{
	types.EventTypeCreated, types.EventTypeWoke, types.EventTypeSlept, types.EventTypeMemoryReclaimed, types.EventTypeStopped, types.EventTypeWakeFailed,
	types.EventTypeAdopted, types.EventTypeDiskLost, types.EventTypeSnapshotted, types.EventTypeRestored, types.EventTypeForked,
	types.EventTypeSnapshotDeleted, types.EventTypeBackedUp, types.EventTypeBackupFailed, types.EventTypeBackupDeleted,
	types.EventTypeArchived, types.EventTypeRetrieved, types.EventTypeMounted, types.EventTypeUnmounted,
}

func (a *app) historyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "history SANDBOX",
		Short: "Print what has happened to the memory and the disk of a sandbox",
		Long: `Print what has happened to the memory and the disk of a sandbox, oldest first, with its
duration and size, if they are known: wakes, sleeps and stops, snapshots, restores, forks,
backups, archives and mounts. "doze events" prints all events. This never wakes a sandbox.`,
		Example:           "  doze history shop",
		Args:              wants(1, 1),
		ValidArgsFunction: a.complete(oneSandbox),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, args []string) error {
			events, err := node.Events(ctx, args[0], 0)
			if err != nil {
				return err
			}
			events = slices.DeleteFunc(events, func(e types.Event) bool { return !slices.Contains(historic, e.Type) })
			return printTable(a, "events", events, []any{"TIME", "EVENT", "TOOK", "BYTES", "DETAILS"}, historyRow)
		}),
	}
}

func historyRow(e types.Event) []any {
	took, moved := "-", "-"
	if e.DurationMS > 0 {
		took = milliseconds(e.DurationMS)
	}
	bytes := max(e.Bytes, e.MemoryBefore-e.MemoryAfter)
	if e.Disk != nil {
		bytes = e.Disk.Bytes
	}
	if bytes > 0 {
		moved = size(bytes)
	}
	at := e.Time.Local().Format(time.DateTime)
	e.DurationMS, e.Bytes, e.MemoryBefore = 0, 0, 0 // have columns
	return []any{at, e.Type, took, moved, cmp.Or(eventDetails(e), "-")}
}
