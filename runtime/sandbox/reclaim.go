package sandbox

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// reclaimLimit bounds the reclaim of one sandbox. zram takes about 1 GB in two seconds.
	reclaimLimit = time.Minute
	// minReclaimed is the least that is worth an event: each sleep after a short wake would
	// add one.
	minReclaimed = 1 << 20
)

// reclaims are the sandboxes whose memory is to be reclaimed, in the order in which that became
// due. They are reclaimed one at a time: compression takes a core, and many sandboxes may fall
// asleep together. The goroutine that does it ends when none is left.
type reclaims struct {
	// possible: the node has the memory controller, and the kernel has not refused yet.
	possible atomic.Bool

	mu      sync.Mutex
	queue   []*liveSandbox
	running bool
}

// reclaimIn is how long the sandbox must stay asleep until its memory is reclaimed; 0 or less
// means now. If due is false, it is not to be reclaimed in this sleep, or again.
func (b *liveSandbox) reclaimIn() (left time.Duration, due bool) {
	sb := b.view.Load()
	after := b.m.config().ReclaimAfter
	if after == 0 || sb.State != StateAsleep || b.reclaimed.Load() == sb.StateSince.UnixNano() || !b.m.canReclaim() {
		return 0, false
	}
	return time.Until(sb.StateSince.Add(after)), true
}

// canReclaim reports whether the host can reclaim memory, as far as is known.
func (m *Manager) canReclaim() bool {
	memory := m.memory.Load()
	return memory != nil && memory.Swap > 0 && m.reclaims.possible.Load()
}

// armSleeping sets the timers of all sleeping sandboxes again, after a change of what is due.
func (m *Manager) armSleeping() {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, b := range m.sandboxes {
		if b.state() == StateAsleep {
			b.arm()
		}
	}
}

// reclaimLater queues the sandbox, once in each sleep.
func (m *Manager) reclaimLater(b *liveSandbox) {
	b.reclaimed.Store(b.view.Load().StateSince.UnixNano())
	r := &m.reclaims
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = append(r.queue, b)
	if !r.running {
		r.running = m.spawn(m.reclaimQueued)
	}
}

// reclaimQueued reclaims until the queue is empty or the Manager closes.
func (m *Manager) reclaimQueued(ctx context.Context) {
	r := &m.reclaims
	for {
		r.mu.Lock()
		if len(r.queue) == 0 || ctx.Err() != nil {
			r.queue, r.running = nil, false
			r.mu.Unlock()
			return
		}
		b := r.queue[0]
		r.queue = r.queue[1:]
		r.mu.Unlock()
		b.reclaim(ctx)
	}
}

// reclaim reclaims the memory of a sandbox that is still in the sleep for which it was queued.
// The next change of its state interrupts it.
func (b *liveSandbox) reclaim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, reclaimLimit)
	defer cancel()
	if !b.beginReclaim(cancel) {
		return
	}
	defer b.setEndReclaim(nil)
	start := time.Now()
	r, err := b.m.deps.Freezer.Reclaim(ctx, b.id)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		if b.m.reclaims.possible.Swap(false) {
			b.m.log.Warn("failed to reclaim memory on this host, not trying again", "error", err)
		}
		return
	case err != nil && ctx.Err() == nil:
		b.m.log.Warn("failed to reclaim the memory of a sandbox", "sandbox", b.id, "error", err)
		return
	case err != nil:
		return // it woke, or is being removed
	}
	b.m.metrics.reclaimed(r)
	if r.Before-r.After >= minReclaimed && !errors.Is(ctx.Err(), context.Canceled) {
		b.emit(Event{Type: EventReclaimed, DurationMS: milliseconds(time.Since(start)), MemoryBefore: r.Before, MemoryAfter: r.After})
	}
}

// beginReclaim makes cancel interrupt the reclaim of a sandbox that is still asleep.
func (b *liveSandbox) beginReclaim(cancel context.CancelFunc) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	sb := b.view.Load()
	if b.gone || b.wake != nil || sb.State != StateAsleep || sb.StateSince.UnixNano() != b.reclaimed.Load() {
		return false
	}
	b.endReclaim = cancel
	return true
}

func (b *liveSandbox) setEndReclaim(end context.CancelFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.endReclaim = end
}

// interruptReclaim ends a reclaim under way, without waiting for its end, and keeps one that is
// queued from beginning.
func (b *liveSandbox) interruptReclaim() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reclaimed.Store(0)
	if b.endReclaim != nil {
		b.endReclaim()
	}
}
