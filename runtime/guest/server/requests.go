package server

import (
	"context"
	"math"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/doze-run/doze/runtime/guest"
)

// trimAfter is how long after a request the server returns memory.
const trimAfter = 2 * time.Second

// anyRequests is more than the requests that are under way at any time.
const anyRequests = math.MaxInt64

// requests counts the requests under way, and returns the memory that a burst of
// them needed to the kernel: trimAfter the last one, and before a freeze.
type requests struct {
	trim   func()
	timer  *time.Timer // calls trim
	active *semaphore.Weighted
	closed atomic.Bool
}

func newRequests(trim func()) *requests {
	q := &requests{trim: trim, timer: time.AfterFunc(math.MaxInt64, trim), active: semaphore.NewWeighted(anyRequests)}
	q.timer.Stop()
	return q
}

func (q *requests) watch(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !q.begin() {
			panic(http.ErrAbortHandler) // shutdown does not wait for it
		}
		defer q.endRequest(usesMemory(r.URL.Path))
		next.ServeHTTP(w, r)
	})
}

// usesMemory reports whether requests of a route leave memory to trim. A node that starts sends
// two others to each guest; hundreds of them would otherwise collect garbage at the same time.
func usesMemory(route string) bool {
	return route != guest.RouteTrim && route != guest.RouteHello && route != guest.RouteEvents
}

// begin reports whether a request may begin. One that was read from a connection just
// before that was closed may come after wait.
func (q *requests) begin() bool {
	begun := q.active.TryAcquire(1)
	if begun && q.closed.Load() {
		q.active.Release(1)
		return false
	}
	return begun
}

// endRequest ends a request, which left memory to trim or not. Others may still be under way
// when the timer fires, such as the event stream, which lasts as long as the sandbox.
func (q *requests) endRequest(usedMemory bool) {
	if usedMemory && !q.closed.Load() {
		q.trimSoon()
	}
	q.active.Release(1)
}

func (q *requests) trimSoon() { q.timer.Reset(trimAfter) }

// trimNow returns memory immediately. It stops the timer, which would fire as soon as the
// sandbox is thawed.
func (q *requests) trimNow() {
	q.timer.Stop()
	q.trim()
}

// wait waits until no request is under way, but not longer than limit, lets no
// other begin, and ends the trimming.
func (q *requests) wait(limit time.Duration) {
	q.closed.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	q.drain(ctx)
	q.timer.Stop()
}

// drain waits until no request is under way or ctx ends. No other begins meanwhile.
func (q *requests) drain(ctx context.Context) {
	if q.active.Acquire(ctx, anyRequests) == nil {
		q.active.Release(anyRequests)
	}
}
