package server

import (
	"context"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// trimAfter is how long after a request the server returns memory.
const trimAfter = 2 * time.Second

// requests counts the requests under way, and returns the memory that a burst of
// them needed to the kernel: trimAfter the last one, and before a freeze.
type requests struct {
	trim  func()
	timer *time.Timer // calls trim

	mu     sync.Mutex
	active int
	idle   chan struct{} // closed when active gets 0, if drain waits
	closed bool
}

func newRequests(trim func()) *requests {
	q := &requests{trim: trim, timer: time.AfterFunc(math.MaxInt64, trim)}
	q.timer.Stop()
	return q
}

func (q *requests) watch(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !q.begin() {
			panic(http.ErrAbortHandler) // shutdown does not wait for it
		}
		defer q.endRequest(r.URL.Path != guest.RouteTrim)
		next.ServeHTTP(w, r)
	})
}

// begin reports whether a request may begin. One that was read from a connection just
// before that was closed may come after wait.
func (q *requests) begin() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.active++
	return true
}

// endRequest ends a request, which left memory to trim or not. Others may still be under way
// when the timer fires, such as the event stream, which lasts as long as the sandbox.
func (q *requests) endRequest(usedMemory bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.active--
	if q.active == 0 && q.idle != nil {
		close(q.idle)
		q.idle = nil
	}
	if usedMemory && !q.closed {
		q.timer.Reset(trimAfter)
	}
}

// trimNow returns memory immediately. It stops the timer, which would fire as soon as the
// sandbox is thawed.
func (q *requests) trimNow() {
	q.timer.Stop()
	q.trim()
}

// wait waits until no request is under way, but not longer than limit, lets no
// other begin, and ends the trimming.
func (q *requests) wait(limit time.Duration) {
	q.mu.Lock()
	q.closed = true
	q.timer.Stop()
	q.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	q.drain(ctx)
}

// drain waits until no request is under way or ctx ends. One caller at a time.
func (q *requests) drain(ctx context.Context) {
	q.mu.Lock()
	if q.active == 0 {
		q.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	q.idle = idle
	q.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}
