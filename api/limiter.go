package api

import (
	"context"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

// limiter bounds how many of something are under way. It never waits: a caller
// who comes too late is refused and may try again.
type limiter struct {
	pool   *quota.Pool
	refuse *problem.Problem
}

// enter takes so many places for the request that ctx belongs to, or refuses it.
func (l *limiter) enter(ctx context.Context, places int64) error {
	if l.pool.TryAcquire(places) != nil {
		return l.refuse
	}
	atEnd(ctx, func() { l.pool.Release(places) })
	return nil
}
