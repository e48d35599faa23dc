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

type placesKey struct{}

// withPlaces returns the context of a request that may enter limiters, and what
// gives its places back. That is called when the answer has been written: until
// then a client who does not read it keeps it in memory.
func withPlaces(ctx context.Context) (_ context.Context, leave func()) {
	var taken []func()
	return context.WithValue(ctx, placesKey{}, &taken), func() {
		for _, leave := range taken {
			leave()
		}
	}
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

// atEnd has leave called when the request that ctx belongs to has been answered.
func atEnd(ctx context.Context, leave func()) {
	taken := ctx.Value(placesKey{}).(*[]func())
	*taken = append(*taken, leave)
}
