package sandbox

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/doze-run/doze/runtime/guest"
)

// Lease keeps a sandbox awake until Release. It may be used from many
// goroutines at once.
type Lease struct {
	b        *liveSandbox
	wake     WakeInfo
	released atomic.Bool
}

// Release gives the lease back. Only the first call does anything.
func (l *Lease) Release() {
	if l.released.CompareAndSwap(false, true) {
		l.b.release()
	}
}

// Guest is the client of the sandbox's guest. It belongs to the Manager: do not close it.
func (l *Lease) Guest() *guest.Client { return l.b.guest }

// Wake says what acquiring the lease had to do.
func (l *Lease) Wake() WakeInfo { return l.wake }

// Sandbox returns the sandbox as it is now.
func (l *Lease) Sandbox() Sandbox { return l.b.sandbox() }

// Dial connects to a TCP port on the sandbox's loopback. A port on which
// nobody listens returns syscall.ECONNREFUSED (wrapped). The connection may
// outlive the lease; while the sandbox is asleep it is silent.
func (l *Lease) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	return l.b.m.network.Dial(ctx, l.b.id, int(l.b.pid.Load()), port)
}

// Listens reports whether the sandbox is running and accepts connections on a port.
// It does not count as use, so that who asks again and again keeps nothing awake.
func (m *Manager) Listens(ctx context.Context, id ID, port uint16) bool {
	b, err := m.live(id)
	if err != nil || !b.tryAcquire() {
		return false
	}
	defer b.use.Add(-1) // not leave, which is the end of a use
	conn, err := (&Lease{b: b}).Dial(ctx, port)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// Acquire wakes sandbox id if it sleeps and returns a Lease that keeps it awake
// until Release. When the sandbox is running it takes no lock but that of the
// map of all sandboxes, for reading, which nobody holds over I/O. Callers that
// arrive during a wake share it. The wake itself is not bound to ctx: when ctx
// ends, Acquire returns ctx.Err() and the wake goes on.
//
// Errors: ErrNotFound, ErrDestroyed, ErrTooManyWaiters, ErrClosed, or what kept
// the sandbox from waking, in a *WakeError.
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

// Rouse is Acquire for what must not start a container, such as bytes of a
// connection that is open: it wakes a sandbox that is asleep, and joins the wake
// of one that is being started. One that is stopped is ErrNotRunning, also when it turns out to have ended while it slept. The other errors are those of Acquire.
func (m *Manager) Rouse(ctx context.Context, id ID, cause Cause) (*Lease, error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	if b.tryAcquire() {
		return &Lease{b: b}, nil
	}
	// Only the wake knows for sure; most that are stopped need none to say so.
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

// Touch notes traffic of a sandbox for which nobody holds a lease.
func (m *Manager) Touch(id ID) {
	if b, err := m.live(id); err == nil {
		b.touch()
	}
}
