package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"

	"github.com/doze-run/doze/loglimit"
	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/jupyter/zmtp"
)

// liveSandbox is one sandbox in memory.
//
// transition is held through every change of state (create, wake, sleep, stop, destroy),
// which may take long. mu guards the fields below it and is never held over I/O. use is
// atomic, so that a request to a running sandbox takes no lock.
type liveSandbox struct {
	m     *Manager
	id    ID
	guest *guest.Client

	// use counts the leases. While the sandbox may not be entered, closedBias
	// is subtracted, so the count survives closing and opening.
	use atomic.Int64
	// lastActive in Unix nanoseconds.
	lastActive atomic.Int64
	// pid of the container's first process on the host; 0 when not running.
	pid atomic.Int64
	// leftover: the container may run although the sandbox is stopped.
	leftover  atomic.Bool
	backingUp atomic.Bool // a backup of it is under way
	// cutOff: the container runs and could not be attached to the Uplink.
	cutOff atomic.Bool
	// mounted are changed with the transition lock.
	mounted mountedPaths
	// startUp is the start of declared processes that goes on after a cold wake, or nil.
	startUp atomic.Pointer[startUp]
	// reclaimed is the StateSince, in Unix nanoseconds, of the last sleep in which its memory was
	// reclaimed or is queued for that.
	reclaimed atomic.Int64
	// failures in a row of runCheck, see retryIn.
	failures atomic.Int32
	// view is the record that readers get; it is replaced under mu, never changed.
	view atomic.Pointer[Sandbox]

	transition *semaphore.Weighted // of weight 1; not a mutex, because waiting ends with a context
	// diskLost: the container was made again since the sandbox last ran. Guarded by
	// transition.
	diskLost bool
	// unsettled is a snapshot that failed and may have the files, until rebase settles it; nil: none. Guarded by
	// transition.
	unsettled *Snapshot

	names []nameKey // under which it is found; guarded by Manager.mu

	breaks     *rate.Limiter // of the guest's event stream
	portEvents *rate.Limiter
	lines      *loglimit.Limit

	mu         sync.Mutex
	wake       *wake                   // in flight, or nil
	made       chan struct{}           // closed when the creation has ended
	makeErr    error                   // of the creation, valid once made is closed
	endMake    context.CancelCauseFunc // of the creation
	endReclaim context.CancelFunc      // of the reclaim under way, or nil
	retrieval  *retrieval              // in progress, or nil
	gone       bool                    // being destroyed, or its creation failed
	timer      *time.Timer             // of runCheck, see idle.go
	cpu        cpuSample
	endWatch   context.CancelFunc // ends the watcher of this run of the guest
	drained    chan struct{}      // closed when that watcher has read all events
	kernels    kernels
	disk       diskState
	trusts     string // digest of the CAs that this run of the guest has

	eventMu   sync.Mutex // held while an event is sent, so that events keep their order; guards:
	seq       uint64     // of the newest event
	seqLoaded bool
	listeners map[chan Event]struct{}

	updating      sync.Mutex // held through a caller's change of name, times, ports or declared processes
	saving        sync.Mutex // held while the record is written, so that writes keep their order; guards:
	recordDeleted bool       // the record was removed
	origin        string     // as noted in Deps.Origins; empty when unknown
}

// String names the sandbox in errors: by name and id, since a client may know either.
func (b *liveSandbox) String() string {
	if sb := b.view.Load(); sb != nil && sb.Name != "" {
		return fmt.Sprintf("%s (%s)", sb.Name, b.id)
	}
	return string(b.id)
}

const closedBias = 1 << 40

func (m *Manager) newLiveSandbox(sb Sandbox) *liveSandbox {
	b := &liveSandbox{
		m:          m,
		id:         sb.ID,
		guest:      guest.NewClient(m.socketPath(sb.ID)),
		transition: semaphore.NewWeighted(1),
		made:       make(chan struct{}),
		breaks:     rate.NewLimiter(breaksPerSecond, breaksBurst),
		portEvents: rate.NewLimiter(rate.Every(portEventInterval), portEventBurst),
		listeners:  map[chan Event]struct{}{},
		lines:      loglimit.New(lifePerSecond, lifeBurst),
		disk:       diskState{bound: sb.Disk},
	}
	b.guest.SetDefaults(func() map[string]string { return m.uplink.Environment(sb.ID) })
	b.guest.SetChanges(func() map[string]*string { return b.view.Load().EnvChanges })
	b.kernels.sparing = semaphore.NewWeighted(maxSparing)
	b.kernels.limits = zmtp.Limits{Memory: m.messages.Child(maxSandboxMessages), Rate: rate.NewLimiter(messageRate, messageBurst)}
	b.use.Store(-closedBias)
	b.lastActive.Store(sb.LastActiveAt.UnixNano())
	b.view.Store(&sb)
	return b
}

// tryAcquire takes a lease if the sandbox is open.
func (b *liveSandbox) tryAcquire() bool {
	for {
		n := b.use.Load()
		if n < 0 {
			return false
		}
		if b.use.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// release ends a lease, and counts as use.
func (b *liveSandbox) release() {
	b.touch()
	b.use.Add(-1)
}

// touch counts as use of the sandbox.
func (b *liveSandbox) touch() { b.lastActive.Store(time.Now().UnixNano()) }

// closeNow closes the sandbox to new leases although leases may be held; their holders' calls fail or
// hang until it is woken. Needs the transition lock.
func (b *liveSandbox) closeNow() {
	if b.use.Load() >= 0 {
		b.use.Add(-closedBias)
	}
}

// open opens the sandbox to new leases, and takes n for the waiters of a wake. Declared
// processes that are left to start are started from then on. Needs the transition lock.
func (b *liveSandbox) open(n int) {
	if b.use.Load() < 0 {
		n += closedBias
	}
	b.use.Add(int64(n))
	if b.startUp.Load() != nil {
		b.m.spawn(b.continueStart)
	}
}

// leases counts the leases that are held.
func (b *liveSandbox) leases() int64 {
	n := b.use.Load()
	if n < 0 {
		n += closedBias
	}
	return n
}

// lockTransition waits until no other change of state is under way, or ctx ends.
func (b *liveSandbox) lockTransition(ctx context.Context) error { return b.transition.Acquire(ctx, 1) }

// lockUsable is lockTransition of a sandbox that is not being destroyed. Otherwise it returns
// ErrDestroyed (wrapped).
func (b *liveSandbox) lockUsable(ctx context.Context) error {
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	if b.isGone() {
		b.unlockTransition()
		return fmt.Errorf("sandbox %s: %w", b, ErrDestroyed)
	}
	return nil
}

// lockedIf calls f with the transition lock of a sandbox for which holds is still true.
func (b *liveSandbox) lockedIf(ctx context.Context, holds func() bool, f func()) error {
	if err := b.lockUsable(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	if holds() {
		f()
	}
	return nil
}

func (b *liveSandbox) unlockTransition() { b.transition.Release(1) }

// sandbox returns the view with LastActiveAt, which changes too often to be in it.
func (b *liveSandbox) sandbox() Sandbox { return b.shown(b.view.Load()) }

func (b *liveSandbox) shown(view *Sandbox) Sandbox {
	sb := *view
	sb.LastActiveAt = time.Unix(0, b.lastActive.Load()).UTC()
	return sb
}

func (b *liveSandbox) state() State { return b.view.Load().State }

// change replaces the view with a changed copy. f must replace maps and
// slices rather than write into them.
func (b *liveSandbox) change(f func(*Sandbox)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changeLocked(f)
}

func (b *liveSandbox) changeLocked(f func(*Sandbox)) {
	sb := *b.view.Load()
	f(&sb)
	b.view.Store(&sb)
}

// setState enters a state, which ends the condition. Needs the transition lock.
func (b *liveSandbox) setState(s State, reason StateReason) {
	b.setStateIf(func() bool { return true }, s, reason)
}

// setStateIf is setState if may, which is called with mu held, returns true. It returns the
// result of may.
func (b *liveSandbox) setStateIf(may func() bool, s State, reason StateReason) (entered bool) {
	b.change(func(sb *Sandbox) {
		if entered = may(); entered {
			sb.State, sb.StateReason, sb.StateSince = s, reason, time.Now().UTC()
			sb.Condition = Condition{}
			if s != StateAsleep && b.endReclaim != nil {
				b.endReclaim() // it uses its memory again
			}
			if reason == ReasonContainerLost {
				sb.Condition = Condition{Code: ConditionDiskLost, Message: diskLostMessage, Since: sb.StateSince}
			}
		}
	})
	b.m.journal.dirty(b)
	return entered
}

// setCondition sets the condition. Since is the time of the first of successive conditions
// with the same code.
func (b *liveSandbox) setCondition(code ConditionCode, message string) {
	b.change(func(sb *Sandbox) {
		since := sb.Condition.Since
		if sb.Condition.Code != code {
			since = time.Now().UTC()
		}
		sb.Condition = Condition{Code: code, Message: cutText(message, maxErrorText), Since: since}
	})
	b.m.journal.dirty(b)
}

// endConditionOf ends the condition if it has that code.
func (b *liveSandbox) endConditionOf(code ConditionCode) {
	if code == "" || b.view.Load().Condition.Code != code {
		return
	}
	b.change(func(sb *Sandbox) { sb.Condition = Condition{} })
	b.m.journal.dirty(b)
}

// failed makes err the sandbox's condition and returns it. A canceled context, of a caller
// or of the closing node, is not a condition of the sandbox.
func (b *liveSandbox) failed(code ConditionCode, err error) error {
	if err != nil && !errors.Is(err, context.Canceled) {
		b.setCondition(code, err.Error())
	}
	return err
}

// save writes the record and returns once it is on disk. After deleteRecord or a failed
// creation it writes nothing.
func (b *liveSandbox) save(ctx context.Context) error {
	b.saving.Lock()
	defer b.saving.Unlock()
	if b.recordDeleted || b.isGone() && b.state() != StateDestroyed {
		return nil
	}
	sb := b.sandbox()
	if err := b.m.deps.Store.PutSandbox(ctx, sb); err != nil {
		return err
	}
	b.noteOrigin(sb)
	return nil
}

// deleteRecord removes the record of a sandbox that is gone.
func (b *liveSandbox) deleteRecord(ctx context.Context) error {
	b.saving.Lock()
	defer b.saving.Unlock()
	err := b.m.deps.Store.DeleteSandbox(ctx, b.id)
	b.recordDeleted = err == nil
	return err
}

func (b *liveSandbox) isGone() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.gone
}

// changeSaved changes the view and writes it. If the write fails, undo reverts exactly the
// changes of f in the present view, which is written too, so that nothing unacknowledged
// stays. For a sandbox that is being destroyed it returns ErrDestroyed.
func (b *liveSandbox) changeSaved(ctx context.Context, f, undo func(*Sandbox)) error {
	b.change(f)
	err := b.save(ctx)
	if b.isGone() {
		err = fmt.Errorf("sandbox %s: %w", b, ErrDestroyed)
	}
	if err != nil {
		b.change(undo)
		// A write that failed may have reached the disk, as may the journal's
		// of the same moment.
		b.m.journal.dirty(b)
	}
	return err
}
