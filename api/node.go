package api

import (
	"context"
	"net/http"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Node is what the node says of itself.
type Node struct {
	NodeID    string    `json:"node_id"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// Engine says whether containers can be made now.
	Engine         EngineStatus              `json:"engine"`
	Sandboxes      map[sandbox.State]int     `json:"sandboxes" doc:"How many, by state"`
	Leases         int64                     `json:"leases" doc:"Uses of sandboxes that are under way"`
	Waiters        int64                     `json:"waiters" doc:"Requests that wait for a wake"`
	Sizes          map[string]sandbox.Limits `json:"sizes"`
	Images         []string                  `json:"images" nullable:"false" doc:"Short names that create accepts"`
	AllowedImages  []string                  `json:"allowed_images" nullable:"false" doc:"Patterns of other images that create accepts"`
	LimitsEnforced []string                  `json:"limits_enforced" nullable:"false" doc:"Which limits of sizes this host enforces: cpu, memory, pids"`

	PendingOperations []PendingOperation `json:"pending_operations" nullable:"false" doc:"What could not be finished yet and is tried again until it is done, oldest first"`

	DataRestored bool `json:"data_restored" doc:"Whether the node started on an older copy of its data, put back or cut short; until its next start"`

	Quarantined []QuarantinedSandbox `json:"quarantined" nullable:"false" doc:"Containers without a record, which the node keeps stopped"`
}

// PendingOperation is something that the node tries again until it is done.
type PendingOperation struct {
	Operation sandbox.Operation `json:"operation" enum:"destroy,stop" doc:"destroy: remove what is left of a destroyed sandbox; stop: end a container in quarantine"`
	Sandbox   sandbox.ID        `json:"sandbox"`
	Since     time.Time         `json:"since" doc:"Of the first failure"`
	Attempts  int               `json:"attempts"`
	NextAt    time.Time         `json:"next_at"`
	Error     string            `json:"error" doc:"Of the last attempt"`
}

func pendingOf(list []sandbox.PendingOperation) []PendingOperation {
	pending := make([]PendingOperation, len(list))
	for i, p := range list {
		pending[i] = PendingOperation{Operation: p.Operation, Sandbox: p.ID, Since: p.Since, Attempts: p.Attempts, NextAt: p.NextAt, Error: validText(p.Error, maxGuestMessage)}
	}
	return pending
}

// EngineStatus says whether the container engine answers.
type EngineStatus struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

type nodeOutput struct {
	Body Node
}

func (a *API) registerNode() {
	register(a, route{
		method: http.MethodGet, path: "/node", id: "get-node", tag: "node",
		summary: "What the node is and has", description: "Wakes nothing.",
	}, a.node)
}

func (a *API) node(ctx context.Context, _ *struct{}) (*nodeOutput, error) {
	info := a.sandboxes.Info(ctx)
	return &nodeOutput{Body: Node{
		NodeID:         info.NodeID,
		Version:        a.version,
		StartedAt:      info.StartedAt,
		Engine:         EngineStatus{OK: info.EngineError == "", Error: info.EngineError},
		Sandboxes:      info.States,
		Leases:         info.Leases,
		Waiters:        info.Waiters,
		Sizes:          info.Sizes,
		Images:         orEmpty(info.Images),
		AllowedImages:  orEmpty(info.Allow),
		LimitsEnforced: orEmpty(info.Enforced),
		DataRestored:   info.Restored,

		PendingOperations: pendingOf(info.Pending),
		Quarantined:       quarantinedOf(ownerOf(ctx), info.Quarantined),
	}}, nil
}

// orEmpty makes null in JSON an empty list.
func orEmpty(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
