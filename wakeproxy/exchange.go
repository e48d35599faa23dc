package wakeproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
)

// exchange is one request on its way through Handler, the reverse proxy and the
// Proxy's transport. It belongs to the request's goroutine. The state that it shares
// with a dial, the checks for silence and the bodies is atomic or guarded by mu.
type exchange struct {
	proxy *Proxy
	id    sandbox.ID
	port  sandbox.Port
	reach reach
	names names
	// body is the visitor's own. A reverse proxy may wrap it in one that must not be
	// closed during a Read, as Caddy does; http.Transport closes it so.
	body io.ReadCloser

	start, until time.Time // until: when waiting ends
	waitTimeout  time.Duration
	waited       time.Duration // for the wake and for the port

	woke         sandbox.WakeKind
	started      time.Time // Sandbox.StartedAt
	awake        time.Time // Sandbox.StateSince
	selfStarting bool      // a process is declared, which starts by itself

	tried          bool // the gate has dialed for this request
	endedUnnoticed bool // the first dial found that the container had already ended

	sleepAfter time.Duration // of the sandbox when the request came
	lastByte   atomic.Int64  // of the stream, in Unix nanoseconds

	mu      sync.Mutex
	lease   Lease       // a dial that the pool began for the request may end after it
	spare   net.Conn    // made by the gate, for the first dial
	silence *time.Timer // the next checkSilence; nil unless the response is a stream
	silent  bool        // the stream's silence has released the lease
}

type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange {
	x, _ := ctx.Value(exchangeKey{}).(*exchange)
	return x
}

func (h *Handler) newExchange(r *http.Request, id sandbox.ID, port sandbox.Port) *exchange {
	now := time.Now()
	limit := h.opts.WaitTimeout
	if isNavigation(r) {
		limit = min(limit, h.opts.WaitingPageAfter)
	}
	body := r.Body
	if r.Method == http.MethodConnect { // a WebSocket, whose stream the reverse proxy carries itself
		body = http.NoBody
	}
	return &exchange{
		proxy:       h.proxy,
		id:          id,
		port:        port,
		reach:       reachOf(r, port.Wake),
		names:       namesOf(r, h.opts.Trusted(r), port.Port),
		body:        body,
		start:       now,
		until:       now.Add(limit),
		waitTimeout: h.opts.WaitTimeout,
	}
}

// errStillWaking: the wake took longer than the request may wait.
var errStillWaking = errors.New("the sandbox is still waking")

// acquire acquires the lease, which wakes the sandbox if the request may do that.
func (x *exchange) acquire(ctx context.Context) error {
	lease, err := x.proxy.acquire(ctx, x.id, x.reach, x.until, sandbox.CausePreview)
	if err != nil {
		return err
	}
	x.mu.Lock()
	x.lease = lease
	x.mu.Unlock()
	sb := lease.Sandbox()
	x.started, x.awake = sb.StartedAt, sb.StateSince
	x.sleepAfter = cmp.Or(time.Duration(sb.SleepAfter), maxSilenceCheck)
	x.selfStarting = len(sb.Declared) > 0
	if x.woke = lease.Wake().Kind; x.woke != sandbox.WakeNone {
		x.waited = time.Since(x.start)
	}
	return nil
}

// acquire returns errStillWaking when until passes first, and ErrNotRunning when
// the sandbox is beyond reach.
func (p *Proxy) acquire(ctx context.Context, id sandbox.ID, reach reach, until time.Time, cause sandbox.Cause) (Lease, error) {
	lease, err := p.sandboxes.AcquireRunning(id)
	if !errors.Is(err, sandbox.ErrNotRunning) || reach == reachRunning {
		return lease, err
	}
	waitCtx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	// A sandbox that is being created was never stopped.
	if sb, _ := p.sandboxes.ByID(id); reach == reachStopped || sb.State == sandbox.StateStarting {
		lease, err = p.sandboxes.Acquire(waitCtx, id, cause)
	} else {
		lease, err = p.sandboxes.Rouse(waitCtx, id, cause)
	}
	if _, failed := errors.AsType[*sandbox.WakeError](err); err != nil && !failed && ctx.Err() == nil && waitCtx.Err() != nil {
		return nil, errStillWaking
	}
	return lease, err
}

// resume acquires a lease for a connection that is open: no container is started
// for it, which would not have that connection.
func (x *exchange) resume(ctx context.Context, cause sandbox.Cause) (Lease, error) {
	reach := reachAsleep
	if x.port.Wake == sandbox.WakeNever {
		reach = reachRunning
	}
	return x.proxy.acquire(ctx, x.id, reach, time.Now().Add(x.waitTimeout), cause)
}

// leadsTo reports whether a connection of the exchange still leads into a live
// container, through an exposed port.
func (x *exchange) leadsTo(sb sandbox.Sandbox) bool {
	if x.proxy.ctx.Err() != nil { // closing: nothing is woken any more
		return false
	}
	if sb.State != sandbox.StateRunning && sb.State != sandbox.StateAsleep {
		return false
	}
	return x.exposed(sb) && sb.StartedAt.Equal(x.started)
}

// exposed reports whether the port still is, to the same visitors.
func (x *exchange) exposed(sb sandbox.Sandbox) bool {
	port, ok := sb.Exposed(x.port.Port)
	return ok && port.Access == x.port.Access && port.Token == x.port.Token
}

// starting reports whether the server may still be starting, so that a refused
// connection is not final: after a cold wake by this request or by one that still
// waits, and within the wait limit after any start of a container with declared
// processes.
func (x *exchange) starting() bool {
	return x.woke == sandbox.WakeCold || x.selfStarting && time.Since(x.started) < x.waitTimeout || x.proxy.gates.hasWaiters(x.gateKey())
}

func (x *exchange) gateKey() gateKey {
	return gateKey{x.id, x.port.Port, x.started.UnixNano()}
}

// awaitReady waits for the declared process that owns the port while it is being started.
func (x *exchange) awaitReady(ctx context.Context) error {
	ready := x.currentLease().Pending(x.port.Port)
	if ready == nil {
		return nil
	}
	begin := time.Now()
	ctx, cancel := context.WithDeadline(ctx, x.until)
	defer cancel()
	select {
	case <-ready:
		x.waited += time.Since(begin)
		return nil
	case <-ctx.Done():
		return errNotReady
	}
}

// awaitPort waits until the port accepts connections.
func (x *exchange) awaitPort(ctx context.Context) error {
	begin := time.Now()
	ctx, cancel := context.WithDeadline(ctx, x.until)
	defer cancel()
	conn, err := x.proxy.gates.wait(ctx, x.gateKey(), x.dialStarting)
	x.waited += time.Since(begin)
	x.setSpare(conn)
	return err
}

// crashError reports that the process that would have listened has ended.
type crashError struct{ process guest.Process }

func (e *crashError) Error() string {
	return fmt.Sprintf("nothing listens: process %s %s", e.process.Name, e.process.Ending())
}

// crashed returns Sandbox.Crashed, unless the sandbox is being stopped, which ends
// its processes before the container.
func (x *exchange) crashed() (guest.Process, bool) {
	sb, _ := x.proxy.sandboxes.ByID(x.id)
	process, ok := sb.Crashed()
	return process, ok && x.runs()
}

// runs reports whether the sandbox is running and not being stopped.
func (x *exchange) runs() bool {
	lease, err := x.proxy.sandboxes.AcquireRunning(x.id)
	if err == nil {
		lease.Release()
	}
	return err == nil
}

// dialStarting is dial for a server that may still be starting. It returns a
// *sandbox.WakeError when the container has ended, and a *crashError when the
// server has.
func (x *exchange) dialStarting(ctx context.Context) (net.Conn, error) {
	first := !x.tried
	x.tried = true
	conn, err := x.dial(ctx)
	if err == nil || ctx.Err() != nil {
		return conn, err
	}
	if !errors.Is(err, syscall.ESRCH) && x.containerRuns() {
		if process, ok := x.crashed(); ok && connectionRefused(err) {
			return nil, &crashError{process}
		}
		return nil, err
	}
	x.awaitNotice(ctx, time.Now().Add(noticeLimit))
	switch sb, ok := x.proxy.sandboxes.ByID(x.id); {
	case !ok, sb.State == sandbox.StateDestroyed:
		return nil, &sandbox.WakeError{ID: x.id, Err: sandbox.ErrDestroyed}
	case sb.StoppedOnPurpose():
		return nil, &sandbox.WakeError{ID: x.id, Err: sandbox.ErrNotRunning}
	}
	x.endedUnnoticed = first
	return nil, &sandbox.WakeError{
		ID:      x.id,
		Err:     fmt.Errorf("its container ended before the port was ready: %w", err),
		LastLog: x.proxy.sandboxes.LastLog(ctx, x.id),
	}
}

// cameTooLate reports whether err means that the container had ended before the
// request reached it, which the node had not noticed when it granted the lease. A
// request that woke it, or waited for its server, gets the end of the container as
// its response instead.
func (x *exchange) cameTooLate(err error) bool {
	if x.woke != sandbox.WakeNone {
		return false
	}
	if _, failed := errors.AsType[*sandbox.WakeError](err); failed {
		return x.endedUnnoticed
	}
	return errors.Is(err, syscall.ESRCH)
}

// acquireNext acquires a lease of the container that follows the one that has
// ended. The node notices the end within milliseconds.
func (x *exchange) acquireNext(ctx context.Context) error {
	x.release()
	if !x.awaitNotice(ctx, x.until) {
		return cmp.Or(ctx.Err(), errStillWaking)
	}
	// A request that was in flight does not undo the stop that ended it.
	if sb, _ := x.proxy.sandboxes.ByID(x.id); sb.StoppedOnPurpose() {
		return sandbox.ErrNotRunning
	}
	return x.acquire(ctx)
}

// stoppedOnPurpose reports whether the owner has stopped the sandbox. While a stop is
// in progress, it waits for its end.
func (x *exchange) stoppedOnPurpose(ctx context.Context) bool {
	if x.runs() {
		return false
	}
	x.awaitNotice(ctx, time.Now().Add(noticeLimit))
	sb, _ := x.proxy.sandboxes.ByID(x.id)
	return sb.StoppedOnPurpose()
}

// awaitNotice waits until the node has noticed that the container has ended. It
// reports false when ctx ends or until passes first.
func (x *exchange) awaitNotice(ctx context.Context, until time.Time) bool {
	tick := time.NewTicker(noticePause)
	defer tick.Stop()
	end := time.NewTimer(time.Until(until))
	defer end.Stop()
	for x.containerRuns() {
		select {
		case <-tick.C:
		case <-end.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// noticeLimit is how long a visitor waits for the reason why the container has ended:
// the node notices within milliseconds, and a stop ends soon after its container.
const noticeLimit = time.Second

// noticePause is the interval at which the state of a container that has ended is
// polled, which is a read from memory.
const noticePause = 2 * time.Millisecond

// containerRuns reports whether the container of the lease still runs.
func (x *exchange) containerRuns() bool {
	sb, ok := x.proxy.sandboxes.ByID(x.id)
	return ok && sb.State == sandbox.StateRunning && sb.StartedAt.Equal(x.started)
}

// dial connects to the port. The reason of a failure goes to the node's log, not to
// the visitor.
func (x *exchange) dial(ctx context.Context) (net.Conn, error) {
	conn, err := x.currentLease().Dial(ctx, x.port.Port)
	if err != nil && ctx.Err() == nil && !connectionRefused(err) && !errors.Is(err, syscall.ESRCH) {
		x.proxy.sometimes.Do(func() {
			x.proxy.log.Warn("failed to dial into a sandbox", "sandbox", x.id, "port", x.port.Port, "error", err)
		})
	}
	return conn, err
}

// setSpare stores a connection for the next dial and closes the previous one.
func (x *exchange) setSpare(conn net.Conn) {
	if old := x.swapSpare(conn); old != nil {
		old.Close()
	}
}

func (x *exchange) swapSpare(conn net.Conn) net.Conn {
	x.mu.Lock()
	defer x.mu.Unlock()
	old := x.spare
	x.spare = conn
	return old
}

// noteWake writes what the request woke into the headers of a response.
func (x *exchange) noteWake(header http.Header) {
	if x.woke == sandbox.WakeNone {
		return
	}
	header.Set("Doze-Wake", string(x.woke))
	header.Add("Server-Timing", fmt.Sprintf("wake;dur=%.3f", float64(x.waited.Microseconds())/1000))
}

// cleanUp releases the lease, the spare connection and the timer.
func (x *exchange) cleanUp() {
	x.setSpare(nil)
	x.endSilence()
	x.release()
}

// release releases the lease, if it was acquired. It may be called twice.
func (x *exchange) release() {
	if lease := x.currentLease(); lease != nil {
		lease.Release()
	}
}

// currentLease returns nil until acquire has succeeded.
func (x *exchange) currentLease() Lease {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.lease
}
