package policy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/loglimit"
)

// maxConfig bounds the configuration of a policy, in bytes: rules are not meant to carry
// data sets.
const maxConfig = 64 << 10

// Policy is a module with a configuration: a pool of instances. Each instance handles
// one exchange at a time and retains its memory for the next. Owners that must not see
// each other's data need separate Policies.
type Policy struct {
	module  *program
	name    string
	digest  string
	config  []byte
	host    *Host
	logger  logger
	slots   chan struct{} // semaphore of instances in use
	retains atomic.Int64  // 0: it has ended
	owner   string
	// forgotten means that values and lines of exchanges in progress are dropped; see
	// Host.Forget.
	forgotten atomic.Bool

	mu     sync.Mutex
	ended  bool
	idle   []*instance              // least recently used first
	shares map[string]chan struct{} // semaphores of instances in use, by sharer
}

// Configure makes a policy and starts an instance of it, so that Configure returns an
// error if the policy rejects its configuration. The module defines the format of the
// configuration; JSON is usual. The caller owns the policy and must release it.
func (m *Module) Configure(ctx context.Context, config []byte) (*Policy, error) {
	if len(config) > maxConfig {
		return nil, fmt.Errorf("the configuration of policy %.80s has %d bytes; use at most %d", m.name, len(config), maxConfig)
	}
	h := m.program.host
	p := &Policy{
		module: m.program,
		name:   m.name,
		digest: "sha256:" + m.program.digest,
		owner:  m.Owner,
		config: slices.Clone(config),
		host:   h,
		slots:  make(chan struct{}, h.config.Instances),
	}
	p.logger = logger{log: h.config.Log.With("policy", m.name), limit: loglimit.New(logRate, logBurst)}
	if m.Lines != nil {
		p.logger.sink = func(l policylog.Line) {
			if !p.forgotten.Load() { // or nothing would delete the lines
				m.Lines(l)
			}
		}
	}
	if m.Owner != "" {
		p.logger.log = p.logger.log.With("owner", m.Owner)
	}
	p.retains.Store(1)

	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, errClosed
	}
	m.program.references++
	h.policies[p] = struct{}{}
	h.configuring.Add(1)
	h.mu.Unlock()
	defer h.configuring.Done()

	i, err := p.acquire(ctx, "")
	if err != nil {
		p.Release()
		return nil, err
	}
	p.put(i)
	return p, nil
}

// Digest returns the digest of the policy's module: sha256: and 64 hexadecimal digits.
func (p *Policy) Digest() string { return p.digest }

// Retain adds a holder, which must call Release. It returns false if the last holder
// has already released the policy.
func (p *Policy) Retain() bool {
	for {
		n := p.retains.Load()
		if n <= 0 {
			return false
		}
		if p.retains.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Ended reports whether the last holder has released the policy.
func (p *Policy) Ended() bool { return p.retains.Load() <= 0 }

// Forgotten reports whether Host.Forget has deleted the values of the policy. It stores none
// any more.
func (p *Policy) Forgotten() bool { return p.forgotten.Load() }

// Release releases the policy. Its instances end when the last holder releases it;
// exchanges in progress are holders.
func (p *Policy) Release() {
	if p.retains.Add(-1) > 0 {
		return
	}
	p.drain()
	p.host.mu.Lock()
	delete(p.host.policies, p)
	p.host.mu.Unlock()
	p.module.release()
}

// Memory returns the memory of the idle instances, in bytes.
func (p *Policy) Memory() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	total := 0
	for _, i := range p.idle {
		total += int(i.module.Memory().Size())
	}
	return total
}

var errBusy = errors.New("busy")

// acquire returns an idle instance or a new one. It counts toward the share of sharer,
// unless sharer is empty. Errors: errBusy if no slot becomes free within WaitLimit,
// *StartError, or ctx.Err().
func (p *Policy) acquire(ctx context.Context, sharer string) (i *instance, err error) {
	share := p.share(sharer)
	if share != nil {
		if err := p.host.acquireSlot(ctx, share); err != nil {
			return nil, err
		}
	}
	if err = p.host.acquireSlot(ctx, p.slots); err == nil {
		if i = p.idleInstance(); i == nil {
			if i, err = p.start(ctx); err != nil {
				<-p.slots
			}
		}
	}
	if err == nil {
		i.share = share
	} else if share != nil {
		<-share
	}
	return i, err
}

// idleInstance removes an instance from the idle ones. It returns nil if there are none.
func (p *Policy) idleInstance() *instance {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.idle) - 1
	if last < 0 {
		return nil
	}
	i := p.idle[last]
	p.idle = slices.Delete(p.idle, last, last+1)
	return i
}

// shared is the divisor of a sharer's share: a sharer can use a quarter of a policy's
// instances.
const shared = 4

// share returns the semaphore of a sharer, or nil for an empty one. Semaphores are not
// removed: the policy has at most one for each owner of the node.
func (p *Policy) share(sharer string) chan struct{} {
	if sharer == "" {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.shares[sharer]
	if s == nil {
		if p.shares == nil {
			p.shares = map[string]chan struct{}{}
		}
		s = make(chan struct{}, max(1, cap(p.slots)/shared))
		p.shares[sharer] = s
	}
	return s
}

// releaseSlots releases an instance's slot in slots, and in share if it is not nil.
func (p *Policy) releaseSlots(share chan struct{}) {
	<-p.slots
	if share != nil {
		<-share
	}
}

// acquireSlot acquires a slot. It waits at most WaitLimit.
func (h *Host) acquireSlot(ctx context.Context, slots chan<- struct{}) error {
	select {
	case slots <- struct{}{}:
		return nil
	default:
	}
	timer := time.NewTimer(h.config.WaitLimit)
	defer timer.Stop()
	select {
	case slots <- struct{}{}:
		return nil
	case <-timer.C:
		return errBusy
	case <-ctx.Done():
		return ctx.Err()
	}
}

// reserveInstance acquires a slot in h.instances. If none is free, idle instances end, and so do
// instances that become idle while it waits.
func (h *Host) reserveInstance(ctx context.Context) error {
	select {
	case h.instances <- struct{}{}:
		return nil
	default:
	}
	h.short.Add(1) // first, so that no instance becomes idle after the idle ones end
	defer h.short.Add(-1)
	for _, p := range h.live() {
		p.trim(time.Now())
	}
	return h.acquireSlot(ctx, h.instances)
}

// put releases an instance that can be used again.
func (p *Policy) put(i *instance) {
	i.reset()
	share := i.share
	i.share = nil
	p.mu.Lock()
	keep := !p.ended && p.host.short.Load() == 0
	if keep {
		i.idleSince = time.Now()
		p.idle = append(p.idle, i)
	}
	p.mu.Unlock()
	if !keep {
		i.close()
	}
	p.releaseSlots(share)
}

// drop ends an instance that must not be used again.
func (p *Policy) drop(i *instance) {
	i.close()
	p.releaseSlots(i.share)
}

// trim ends the instances that have been idle since the given time.
func (p *Policy) trim(since time.Time) {
	p.mu.Lock()
	n := 0
	for n < len(p.idle) && !p.idle[n].idleSince.After(since) {
		n++
	}
	old := slices.Clone(p.idle[:n])
	p.idle = slices.Delete(p.idle, 0, n)
	p.mu.Unlock()
	for _, i := range old {
		i.close()
	}
}

// drain ends all idle instances now, and each other instance when it is released.
func (p *Policy) drain() {
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.trim(time.Now())
}
