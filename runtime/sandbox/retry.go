package sandbox

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// The node retries an acknowledged operation that it could not finish, such as a destruction
// while Podman was down, until it succeeds.

const (
	// retryMin and retryMax space the attempts. A killed Podman is back within a second; a
	// full disk may take hours.
	retryMin = time.Second
	retryMax = time.Minute
)

// Operation names an operation that is retried.
type Operation string

const (
	OperationDestroy       Operation = "destroy"        // remove what is left of a destroyed sandbox, or of a failed creation
	OperationStop          Operation = "stop"           // end a container in quarantine
	OperationDeleteArchive Operation = "delete_archive" // delete the backup that has the disk of a destroyed sandbox
)

// PendingOperation is an operation that the node retries until it succeeds.
type PendingOperation struct {
	Operation Operation
	ID        ID
	Since     time.Time // of the first failure
	Attempts  int
	Error     string // of the last attempt
	NextAt    time.Time
}

// pendingKey names a pending operation.
type pendingKey struct {
	operation Operation
	id        ID
}

// retries are the pending operations of a Manager.
type retries struct {
	mu      sync.Mutex
	pending map[pendingKey]*pendingRetry
}

type pendingRetry struct {
	PendingOperation
	do      func(context.Context) error
	waiting bool // for the next attempt
}

// retry calls do again, with increasing pauses, until it returns nil or the Manager closes.
// err is the error of the attempt that has just failed. An operation that is pending already
// keeps its next attempt.
func (m *Manager) retry(operation Operation, id ID, err error, do func(context.Context) error) {
	if m.ctx.Err() != nil {
		return // the next start of the node finds it
	}
	key := pendingKey{operation, id}
	r := &m.retries
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pending[key]
	if p == nil {
		p = &pendingRetry{PendingOperation: PendingOperation{Operation: operation, ID: id, Since: time.Now().UTC()}, do: do}
		r.pending[key] = p
	}
	p.Attempts++
	p.Error = cutText(err.Error(), maxErrorText)
	if p.waiting {
		return
	}
	wait := min(retryMin<<min(p.Attempts-1, 10), retryMax)
	p.NextAt = time.Now().Add(wait).UTC()
	p.waiting = true
	time.AfterFunc(wait, func() { m.spawn(func(ctx context.Context) { m.attempt(ctx, key) }) })
	m.log.Warn("failed to finish an operation, trying again", "operation", operation, "sandbox", id, "attempts", p.Attempts, "retry_in", wait, "error", err)
}

// attempt is one retry of a pending operation.
func (m *Manager) attempt(ctx context.Context, key pendingKey) {
	r := &m.retries
	r.mu.Lock()
	p := r.pending[key]
	if p != nil {
		p.waiting = false
	}
	r.mu.Unlock()
	if p == nil {
		return // done meanwhile
	}
	if err := p.do(ctx); err != nil {
		m.retry(key.operation, key.id, err, p.do)
		return
	}
	m.done(key.operation, key.id)
	m.log.Info("finished an operation that had failed", "operation", key.operation, "sandbox", key.id, "attempts", p.Attempts+1)
}

// done ends what retry began.
func (m *Manager) done(operation Operation, id ID) {
	m.retries.mu.Lock()
	defer m.retries.mu.Unlock()
	delete(m.retries.pending, pendingKey{operation, id})
}

// list returns the pending operations, oldest first.
func (r *retries) list() []PendingOperation {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]PendingOperation, 0, len(r.pending))
	for _, p := range r.pending {
		list = append(list, p.PendingOperation)
	}
	slices.SortFunc(list, func(a, b PendingOperation) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.ID, b.ID))
	})
	return list
}

// destroyLater retries a failed destruction that was recorded. The destruction of a sandbox
// in another state was not acknowledged.
func (b *liveSandbox) destroyLater(err error) {
	if err != nil && b.state() == StateDestroyed && !errors.Is(err, context.Canceled) {
		b.m.retry(OperationDestroy, b.id, err, func(ctx context.Context) error { return b.tryDestroy(ctx, b.view.Load().StateReason) })
	}
}
