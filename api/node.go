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
	return respond(types.Node{
		ID:             info.NodeID,
		Version:        a.cfg.Version,
		StartedAt:      info.StartedAt,
		Engine:         types.EngineStatus{OK: info.EngineError == "", Error: info.EngineError},
		Sandboxes:      statesOf(info.States),
		Leases:         info.Leases,
		Waiters:        info.Waiters,
		Sizes:          sizesOf(info.Sizes),
		Images:         orEmpty(info.Images),
		AllowedImages:  orEmpty(info.Allow),
		EnforcedLimits: orEmpty(info.Enforced),
		DataRestored:   info.Restored,

		PendingOperations: listOf(info.Pending, pendingOf),
		Quarantined:       quarantinedOf(ownerOf(ctx), info.Quarantined),
	})
}

func statesOf(counts map[sandbox.State]int) map[types.State]int {
	converted := make(map[types.State]int, len(counts))
	for state, count := range counts {
		converted[types.State(state)] = count
	}
	return converted
}

func sizesOf(sizes map[string]sandbox.Limits) map[string]types.Limits {
	converted := make(map[string]types.Limits, len(sizes))
	for name, limits := range sizes {
		converted[name] = limitsOf(limits)
	}
	return converted
}

func limitsOf(l sandbox.Limits) types.Limits {
	return types.Limits{
		CPUs:              l.CPUs,
		MemoryBytes:       l.Memory,
		PIDs:              l.PIDs,
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

// orEmpty returns an empty list instead of nil, which would be null in JSON.
func orEmpty(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
