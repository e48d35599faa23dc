package api

import (
	"context"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

const (
	// maxPushes bounds the pushes of policies that are under way, from the first byte of
	// the request to the response. One is compiled at a time, for 30 s at most, so the
	// last of them waits for less than four minutes; their modules take 128 MiB.
	maxPushes = 8
	// maxOwnerPushes bounds an owner's pushes: one that is compiled, and one that
	// arrives meanwhile. So one owner does not block the pushes of others.
	maxOwnerPushes = 2
)

// pushes bounds the pushes under way, by owner and in total. As with a limiter, one
// beyond a limit is refused.
type pushes struct{ quota.Keyed[string] }

// enter counts the request that ctx belongs to until its response has been written, or
// refuses it.
func (p *pushes) enter(ctx context.Context) error {
	owner := ownerOf(ctx)
	switch p.TryAcquire(owner, maxOwnerPushes, maxPushes) {
	case quota.ErrExceeded:
		return problem.Newf(problem.PushLimitExceeded, "you push %d policies already, and one is compiled at a time; try again when a push has ended", maxOwnerPushes)
	case quota.ErrTotalExceeded:
		return problem.Newf(problem.PushLimitExceeded, "%d policies are pushed already, and one is compiled at a time; try again later", maxPushes)
	}
	atEnd(ctx, func() { p.Release(owner) })
	return nil
}
