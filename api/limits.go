package api

import (
	"context"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

// limiter limits how many calls of one kind are in progress. It never waits: a call beyond
// the limit is refused, and its client may try again.
type limiter struct {
	pool   *quota.Pool
	refuse *problem.Problem
}

// acquire takes n slots until the response to the request that ctx belongs to has been
// written, or refuses the request.
func (l *limiter) acquire(ctx context.Context, n int64) error {
	if l.pool.TryAcquire(n) != nil {
		return l.refuse
	}
	onDone(ctx, func() { l.pool.Release(n) })
	return nil
}

const (
	// maxPushes limits the pushes of policies in progress, from the first byte of the
	// request to the response. One is compiled at a time, for 30 s at most, so the last of
	// them waits for less than four minutes; their modules take 128 MiB.
	maxPushes = 8
	// maxOwnerPushes limits an owner's pushes: one that is compiled, and one that arrives
	// meanwhile. So one owner does not block the pushes of others.
	maxOwnerPushes = 2

	// maxExports limits concurrent snapshot exports. Each export runs a process that uses 19 MB of
	// memory and up to one CPU core until the client has received the archive.
	maxExports = 8
	// maxOwnerExports limits one owner's exports, so that one owner cannot block the exports of others.
	maxOwnerExports = 2
)

// ownerLimiter limits concurrent requests, per owner and in total.
type ownerLimiter struct {
	used            quota.Keyed[string]
	perOwner, total int
	// refuse and refuseTotal are the errors for requests beyond the per-owner and the total limit.
	refuse, refuseTotal *problem.Problem
}

func newPushes() *ownerLimiter {
	return &ownerLimiter{
		perOwner: maxOwnerPushes, total: maxPushes,
		refuse:      problem.Newf(problem.PushLimitExceeded, "you are already pushing %d policies, and the node compiles one at a time; try again when a push has finished", maxOwnerPushes),
		refuseTotal: problem.Newf(problem.PushLimitExceeded, "%d policies are already being pushed, and the node compiles one at a time; try again later", maxPushes),
	}
}

func newExports() *ownerLimiter {
	return &ownerLimiter{
		perOwner: maxOwnerExports, total: maxExports,
		refuse:      problem.Newf(problem.ExportLimitExceeded, "you are already exporting %d snapshots; try again when an export has finished", maxOwnerExports),
		refuseTotal: problem.Newf(problem.ExportLimitExceeded, "%d snapshots are already being exported; try again later", maxExports),
	}
}

// acquire counts the request that ctx belongs to until its response has been written, or
// refuses it.
func (l *ownerLimiter) acquire(ctx context.Context) error {
	owner := ownerOf(ctx)
	switch l.used.TryAcquire(owner, l.perOwner, l.total) {
	case quota.ErrExceeded:
		return l.refuse
	case quota.ErrTotalExceeded:
		return l.refuseTotal
	}
	onDone(ctx, func() { l.used.Release(owner) })
	return nil
}
