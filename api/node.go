package api

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
)

func (a *API) registerNode() {
	register(a, route{
		method: http.MethodGet, path: "/node", id: "get-node", tag: "node",
		summary: "Get the state of the node", description: "Never wakes a sandbox.",
	}, a.node)
	register(a, route{
		method: http.MethodGet, path: "/node/df", id: "get-disk-usage", tag: "node",
		summary: "Get the disk usage of the node",
		description: "The sums cover the caller's sandboxes and snapshots. Everything else on the file system is in `other_bytes`. Sizes are allocated disk space; blocks that files share count for each of them. " +
			"The request does not measure disks: a disk that has changed was usually measured within the last five minutes (`measured_at`). Never wakes a sandbox.",
	}, a.diskUsage)
}

// diskQuery is the input of the route of disk usage.
type diskQuery struct {
	MaxSandboxes int `query:"max_sandboxes" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of sandboxes in the list"`
}

func (a *API) diskUsage(ctx context.Context, in *diskQuery) (*output[types.NodeDiskUsage], error) {
	report, err := a.cfg.Sandboxes.DiskReport(ctx, ownerOf(ctx), in.MaxSandboxes)
	if err != nil {
		return nil, err
	}
	return respond(nodeDiskUsageOf(report))
}

func nodeDiskUsageOf(r sandbox.DiskReport) types.NodeDiskUsage {
	return types.NodeDiskUsage{
		FileSystems:      listOf(r.FileSystems, fileSystemOf),
		Sandboxes:        diskTotalOf(r.Sandboxes),
		Snapshots:        diskTotalOf(r.Snapshots),
		UnusedSnapshots:  diskTotalOf(r.Unused),
		Bases:            diskTotalOf(r.Bases),
		StoreBytes:       r.Store,
		BackupCacheBytes: r.BackupCache,
		LargestSandboxes: listOf(r.Largest, sandboxDiskOf),
	}
}

func fileSystemOf(f sandbox.FileSystem) types.FileSystem {
	return types.FileSystem{Path: f.Path, TotalBytes: f.Total, UsedBytes: f.Used, FreeBytes: f.Free, ReserveBytes: f.Reserve, OtherBytes: f.Other}
}

func diskTotalOf(t sandbox.DiskTotal) types.DiskTotal {
	return types.DiskTotal{Count: t.Count, Bytes: t.Bytes}
}

func sandboxDiskOf(d sandbox.SandboxDisk) types.SandboxDisk {
	return types.SandboxDisk{
		ID: string(d.ID), Name: d.Name, State: types.State(d.State), DiskBytes: d.Bytes, MeasuredAt: d.MeasuredAt, LimitBytes: d.Limit, FreedBytes: d.Freed,
	}
}

func (a *API) node(ctx context.Context, _ *struct{}) (*output[types.Node], error) {
	info := a.cfg.Sandboxes.Info(ctx)
	states, sizes := map[types.State]int{}, map[string]types.Limits{}
	for state, count := range info.States {
		states[types.State(state)] = count
	}
	for name, limits := range info.Sizes {
		sizes[name] = limitsOf(limits)
	}
	return respond(types.Node{
		ID:             info.NodeID,
		Version:        a.cfg.Version,
		StartedAt:      info.StartedAt,
		Engine:         types.EngineStatus{OK: info.EngineError == "", Error: info.EngineError},
		Sandboxes:      states,
		Leases:         info.Leases,
		Waiters:        info.Waiters,
		Sizes:          sizes,
		Images:         append([]string{}, info.Images...),
		AllowedImages:  append([]string{}, info.Allow...),
		EnforcedLimits: append([]string{}, info.Enforced...),
		DataRestored:   info.Restored,

		PendingOperations: listOf(info.Pending, pendingOf),
		Quarantined:       quarantinedOf(ownerOf(ctx), info.Quarantined),
	})
}

func limitsOf(l sandbox.Limits) types.Limits {
	return types.Limits{
		CPUs:              l.CPUs,
		MemoryBytes:       l.Memory,
		PIDs:              l.PIDs,
		DiskBytes:         l.Disk,
		Files:             l.Files,
		UserNamespaces:    l.UserNamespaces,
		InotifyInstances:  l.InotifyInstances,
		InotifyWatches:    l.InotifyWatches,
		PendingSignals:    l.PendingSignals,
		MessageQueueBytes: l.MessageQueueBytes,
	}
}

func pendingOf(p sandbox.PendingOperation) types.PendingOperation {
	return types.PendingOperation{
		Operation:     types.Operation(p.Operation),
		Sandbox:       string(p.ID),
		Since:         p.Since,
		Attempts:      p.Attempts,
		NextAttemptAt: p.NextAt,
		Error:         validText(p.Error, maxGuestMessage),
	}
}
