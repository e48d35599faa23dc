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
)

// pushes limits the pushes in progress, by owner and in total.
type pushes struct{ quota.Keyed[string] }

// acquire counts the request that ctx belongs to until its response has been written, or
// refuses it.
func (p *pushes) acquire(ctx context.Context) error {
	owner := ownerOf(ctx)
	switch p.TryAcquire(owner, maxOwnerPushes, maxPushes) {
	case quota.ErrExceeded:
		return problem.Newf(problem.PushLimitExceeded, "you push %d policies already, and one is compiled at a time; try again when a push has ended", maxOwnerPushes)
	case quota.ErrTotalExceeded:
		return problem.Newf(problem.PushLimitExceeded, "%d policies are pushed already, and one is compiled at a time; try again later", maxPushes)
	}
	onDone(ctx, func() { p.Release(owner) })
	return nil
}
