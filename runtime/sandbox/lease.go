package sandbox

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/doze-run/doze/runtime/guest"
)

// Lease keeps a sandbox awake until Release. It is safe for concurrent use.
type Lease struct {
	b        *liveSandbox
	wake     WakeInfo
	released atomic.Bool
}

// Release ends the lease. Only the first call does anything.
func (l *Lease) Release() {
	if l.released.CompareAndSwap(false, true) {
		l.b.release()
	}
}

// Guest is the client of the sandbox's guest. It belongs to the Manager: do not close it.
func (l *Lease) Guest() *guest.Client { return l.b.guest }

// Wake describes the wake that the lease waited for, if any.
func (l *Lease) Wake() WakeInfo { return l.wake }

// Sandbox returns the sandbox as it is now.
func (l *Lease) Sandbox() Sandbox { return l.b.sandbox() }

// Dial connects to a TCP port on the sandbox's loopback. A port without a listener returns
// syscall.ECONNREFUSED (wrapped). The connection may outlive the lease; while the sandbox is
// asleep it is silent.
func (l *Lease) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	return l.b.dialLoopback(ctx, port)
}

// dialLoopback is Lease.Dial of a sandbox that runs.
func (b *liveSandbox) dialLoopback(ctx context.Context, port uint16) (net.Conn, error) {
	return b.m.deps.Network.Dial(ctx, b.id, int(b.pid.Load()), port)
}

// Listens reports whether the sandbox is running and accepts connections on a port, whose
// declared process is ready if it has a readiness condition.
// It does not count as use: polling does not keep a sandbox awake.
func (m *Manager) Listens(ctx context.Context, id ID, port uint16) bool {
	b, err := m.live(id)
	if err != nil || !b.tryAcquire() {
		return false
	}
	defer b.use.Add(-1) // not release, which counts as use
	if b.pending(port) != nil {
		return false
	}
	conn, err := b.dialLoopback(ctx, port)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// Acquire wakes the sandbox if it is not running and returns a Lease that keeps it awake
// until Release. For a running sandbox it locks only the map of all sandboxes, for reading,
// and waits for no I/O. Concurrent callers share one wake. The wake is not bound to ctx: if
// ctx ends first, Acquire returns ctx.Err() and the wake goes on.
//
// Errors: ErrNotFound, ErrDestroyed, ErrTooManyWaiters, ErrClosed, or *WakeError with the
// reason why the sandbox did not wake.
func (m *Manager) Acquire(ctx context.Context, id ID, cause Cause) (*Lease, error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	if b.tryAcquire() {
		return &Lease{b: b}, nil
	}
	return b.await(ctx, cause, true)
}

// Rouse is Acquire for callers that must not start a container, such as bytes on an open
// connection: it wakes a sandbox that is asleep, and joins the wake of one that is being
// started. For a stopped sandbox, also if it turns out to have ended while it slept, it
// returns ErrNotRunning.
func (m *Manager) Rouse(ctx context.Context, id ID, cause Cause) (*Lease, error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	if b.tryAcquire() {
		return &Lease{b: b}, nil
	}
	// Most stopped sandboxes need no wake to find out.
	if s := b.state(); s != StateRunning && s != StateAsleep && !b.waking() {
		return nil, b.notRunning()
	}
	return b.await(ctx, cause, false)
}

// AcquireRunning is Acquire for callers that must not wake: it returns
// ErrNotRunning unless the sandbox is running.
func (m *Manager) AcquireRunning(id ID) (*Lease, error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	if !b.tryAcquire() {
		return nil, b.notRunning()
	}
	return &Lease{b: b}, nil
}

func (b *liveSandbox) notRunning() error {
	return fmt.Errorf("sandbox %s is %s: %w", b, b.state(), ErrNotRunning)
}

// Touch counts as use of the sandbox, for traffic without a lease.
func (m *Manager) Touch(id ID) {
	if b, err := m.live(id); err == nil {
		b.touch()
	}
}
