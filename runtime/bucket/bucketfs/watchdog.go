package bucketfs

import (
	"context"
	"errors"
	"time"
)

var errStalled = errors.New("transfer stalled")

// watchdog cancels a transfer that makes no progress.
type watchdog struct {
	timer  *time.Timer
	cancel context.CancelCauseFunc
}

// newWatchdog returns a context that ends with ctx, after stop, and stallLimit after the last progress.
func newWatchdog(ctx context.Context) (context.Context, *watchdog) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watchdog{cancel: cancel}
	w.timer = time.AfterFunc(stallLimit, func() { cancel(errStalled) })
	return ctx, w
}

func (w *watchdog) progress() { w.timer.Reset(stallLimit) }

// pause stops the watchdog until the next progress.
func (w *watchdog) pause() { w.timer.Stop() }

func (w *watchdog) stop() {
	w.timer.Stop()
	w.cancel(context.Canceled)
}
