package api

import "sync/atomic"

// limiter bounds how many of something are under way. It never waits: a caller
// who comes too late is refused and may try again.
type limiter struct {
	most   int64
	refuse *Problem
	held   atomic.Int64
}

// enter takes so many places and returns how to give them back, or the refusal.
func (l *limiter) enter(places int64) (leave func(), err error) {
	if l.held.Add(places) > l.most {
		l.held.Add(-places)
		return nil, l.refuse
	}
	return func() { l.held.Add(-places) }, nil
}
