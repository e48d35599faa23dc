package wakeproxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// maxSilenceCheck bounds the time between checks for silence, so that a shorter
// sleep_after applies to streams that are open already.
const maxSilenceCheck = 15 * time.Second

// stream makes the lease of an exchange whose response has begun depend on
// traffic: when no byte has passed in either direction for sleep_after, the lease
// is released and the sandbox may sleep with the stream open. The next byte of
// either side acquires another one, which wakes the sandbox.
func (x *exchange) stream(ctx context.Context, res *http.Response) {
	if res.Body == nil || res.Body == http.NoBody {
		return
	}
	x.lastByte.Store(time.Now().UnixNano())
	x.mu.Lock()
	x.silence = time.AfterFunc(min(x.sleepAfter, maxSilenceCheck), x.checkSilence)
	x.mu.Unlock()
	res.Body = &responseBody{body{ReadCloser: res.Body, x: x, ctx: ctx}}
}

// checkSilence releases the lease if the stream was silent for sleep_after, and
// otherwise schedules the next check.
func (x *exchange) checkSilence() {
	sb, _ := x.proxy.sandboxes.ByID(x.id)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.silence == nil { // the exchange has ended
		return
	}
	left := maxSilenceCheck
	if after := time.Duration(sb.SleepAfter); after > 0 {
		left = after - time.Since(time.Unix(0, x.lastByte.Load()))
	}
	if left > 0 {
		x.silence.Reset(min(left, maxSilenceCheck))
		return
	}
	x.silent = true
	x.lease.Release()
}

// traffic records that bytes of the stream pass. After a silence it acquires a
// lease, which wakes a sandbox that is asleep and never starts a container.
func (x *exchange) traffic(ctx context.Context) error {
	x.lastByte.Store(time.Now().UnixNano())
	x.mu.Lock()
	silent := x.silent
	x.mu.Unlock()
	if !silent {
		return nil
	}
	sb, ok := x.proxy.sandboxes.ByID(x.id)
	switch {
	case !ok || !x.exposed(sb):
		return errTunnelEnded
	case !x.leadsTo(sb):
		return nil // the container has ended, and its connections with it
	}
	lease, err := x.resume(ctx, sandbox.CausePreview)
	if err != nil {
		if sb, _ = x.proxy.sandboxes.ByID(x.id); errors.Is(err, sandbox.ErrNotRunning) && !x.leadsTo(sb) {
			return nil
		}
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.silence == nil || !x.silent { // it has ended, or the other direction was faster
		lease.Release()
		return nil
	}
	x.lease, x.silent = lease, false
	x.silence.Reset(min(x.sleepAfter, maxSilenceCheck))
	return nil
}

// endSilence ends the checks for silence.
func (x *exchange) endSilence() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.silence != nil {
		x.silence.Stop()
		x.silence = nil
	}
}

// body is a body whose bytes are traffic.
type body struct {
	io.ReadCloser
	x   *exchange
	ctx context.Context
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		if err := b.x.traffic(b.ctx); err != nil {
			return 0, err
		}
	}
	return n, err
}

// requestBody is the body of a request. Its methods may be called concurrently.
type requestBody struct {
	body
	read atomic.Bool
}

func (b *requestBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	return b.body.Read(p)
}

// Close leaves a body open that was not read: http.Server, which closes it in the
// end, first reads what the visitor still sends.
func (b *requestBody) Close() error {
	if !b.read.Load() {
		return nil
	}
	return b.body.Close()
}

// responseBody is the body of a response.
type responseBody struct{ body }

// Read counts as traffic by itself: a reader that asks for more has forwarded the
// earlier bytes, and a frozen sandbox sends no more.
func (b *responseBody) Read(p []byte) (int, error) {
	if err := b.x.traffic(b.ctx); err != nil {
		return 0, err
	}
	return b.body.Read(p)
}
