package server

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// trimAfter is how long the server is idle before it returns memory.
const trimAfter = 2 * time.Second

// requests counts the requests under way. With trimming, memory that a burst of
// them needed goes back to the kernel soon after: a sandbox that sleeps would
// hold it for days.
type requests struct {
	trim bool

	mu     sync.Mutex
	active int
	idle   chan struct{} // closed when active gets 0, if somebody waits
	timer  *time.Timer
	closed bool
}

func newRequests(trim bool) *requests { return &requests{trim: trim} }

func (q *requests) watch(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !q.begin() {
			panic(http.ErrAbortHandler) // nobody would wait for it
		}
		defer q.end()
		next.ServeHTTP(w, r)
	})
}

// begin says whether a request may begin. One that was read from a connection just
// before that was closed may come after wait.
func (q *requests) begin() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.active++
	if q.timer != nil {
		q.timer.Stop()
	}
	return true
}

func (q *requests) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.active--
	if q.active == 0 && q.idle != nil {
		close(q.idle)
		q.idle = nil
	}
	switch {
	case !q.trim || q.closed:
	case q.timer == nil:
		q.timer = time.AfterFunc(trimAfter, trimMemory)
	default:
		q.timer.Reset(trimAfter)
	}
}

// wait waits until no request is under way, but not longer than limit, lets no
// other begin, and ends the trimming.
func (q *requests) wait(limit time.Duration) {
	q.mu.Lock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
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
