package guest

import (
	"context"
	"io"
	"sync"
	"time"
)

// watchdog cancels a request when the guest takes too long. It is set while the client waits
// for the guest, and paused otherwise.
type watchdog struct {
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	timer *time.Timer
	ended bool // the timer is not set again
}

// newWatchdog gives the guest d from now.
func newWatchdog(ctx context.Context, d time.Duration) (context.Context, *watchdog) {
	w := &watchdog{}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(d, func() { w.cancel(ErrNoResponse) })
	return w.ctx, w
}

// set gives the guest d from now.
func (w *watchdog) set(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.timer.Reset(d)
	}
}

// pause lets the guest take its time.
func (w *watchdog) pause() { w.timer.Stop() }

// stop ends the request and the watchdog.
func (w *watchdog) stop() {
	w.mu.Lock()
	w.ended = true
	w.timer.Stop()
	w.mu.Unlock()
	w.cancel(nil)
}

// explain returns the reason why the request was canceled, if it was, else err.
func (w *watchdog) explain(err error) error {
	if err == nil || w.ctx.Err() == nil {
		return err
	}
	return context.Cause(w.ctx)
}

// uploadBody is a request's body that sets the watchdog while the guest reads it, and pauses
// it while its own source is read.
type uploadBody struct {
	io.Reader
	watch *watchdog
	stall time.Duration
}

func upload(r io.Reader, w *watchdog, stall time.Duration) (io.ReadCloser, int64) {
	length := int64(-1)
	if sized, ok := r.(interface{ Len() int }); ok {
		length = int64(sized.Len())
	}
	return &uploadBody{Reader: r, watch: w, stall: stall}, length
}

func (u *uploadBody) Read(p []byte) (int, error) {
	u.watch.pause()
	n, err := u.Reader.Read(p)
	u.watch.set(u.stall)
	return n, err
}

// Close does not close the source: it is the caller's.
func (u *uploadBody) Close() error { return nil }
