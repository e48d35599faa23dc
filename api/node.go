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
