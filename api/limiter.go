package api

import (
	"context"
	"sync/atomic"

	"github.com/doze-run/doze/problem"
)

// limiter bounds how many of something are under way. It never waits: a caller
// who comes too late is refused and may try again.
type limiter struct {
	most   int64
	refuse *problem.Problem
	held   atomic.Int64
}

// enter takes so many places for the request that ctx belongs to, or refuses it.
func (l *limiter) enter(ctx context.Context, places int64) error {
	if l.held.Add(places) > l.most {
		l.held.Add(-places)
		return l.refuse
	}
	atEnd(ctx, func() { l.held.Add(-places) })
	return nil
}
