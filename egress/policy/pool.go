package policy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// maxConfig bounds what a policy is configured with: a rule is no data set.
const maxConfig = 64 << 10

// Policy is a module with a configuration: a pool of instances, each of which
// handles one exchange at a time and keeps its memory for the next. Whoever must
// not see what another's exchange left there needs a Policy of his own.
type Policy struct {
	module  *program
	name    string
	digest  string
	config  []byte
	host    *Host
	logger  logger
	places  chan struct{} // taken by instances in use
	retains atomic.Int64  // 0: it has ended
	owner   string
	// forgotten: what exchanges that are under way store is dropped, see Host.Forget.
	forgotten atomic.Bool

	mu     sync.Mutex
	ended  bool
	idle   []*instance              // the last one used last
	shares map[string]chan struct{} // taken as places, by who has a share of them
}

// Configure makes a policy, and starts an instance of it, so that a configuration
// that the policy does not like is an error here. The policy is the caller's, who
// releases it. Which text is right is the module's to say; JSON is usual.
func (m *Module) Configure(ctx context.Context, config []byte) (*Policy, error) {
	if len(config) > maxConfig {
		return nil, fmt.Errorf("the configuration of policy %.80s has %d bytes: at most %d fit", m.name, len(config), maxConfig)
	}
	h := m.program.host
	p := &Policy{
		module: m.program,
		name:   m.name,
		digest: "sha256:" + m.program.digest,
		owner:  m.Owner,
		config: slices.Clone(config),
		host:   h,
		places: make(chan struct{}, h.config.Instances),
	}
	p.logger.log, p.logger.sink = h.config.Log.With("policy", m.name), m.Lines
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

// Name of the policy's module.
func (p *Policy) Name() string { return p.name }

// Digest of the policy's module: sha256: and 64 hexadecimal digits.
func (p *Policy) Digest() string { return p.digest }

// Retain adds a holder, who calls Release. It returns false if the last holder
// has released the policy.
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

// Release gives the policy up. When its last holder does, and exchanges under way
// are holders, its instances end.
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

// Memory that instances have which are idle now, in bytes.
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

// acquire takes an instance, or makes one, for one who has a share of them, or for
// nobody in particular. Errors: errBusy where there is no room for one within
// WaitLimit, *StartError, or that of ctx.
func (p *Policy) acquire(ctx context.Context, sharer string) (*instance, error) {
	share := p.share(sharer)
	if share != nil {
		if err := p.host.take(ctx, share); err != nil {
			return nil, err
		}
	}
	i, err := p.taken(ctx)
	if err == nil {
		i.share = share
	} else if share != nil {
		<-share
	}
	return i, err
}

// taken is an instance with its place.
func (p *Policy) taken(ctx context.Context) (*instance, error) {
	if err := p.host.take(ctx, p.places); err != nil {
		return nil, err
	}
	p.mu.Lock()
	if last := len(p.idle) - 1; last >= 0 {
		i := p.idle[last]
		p.idle[last] = nil
		p.idle = p.idle[:last]
		p.mu.Unlock()
		return i, nil
	}
	p.mu.Unlock()
	i, err := p.start(ctx)
	if err != nil {
		<-p.places
		return nil, err
	}
	return i, nil
}

// shared is the part of a policy's instances that one who shares them can have.
const shared = 4

// share is the places of one who shares; nil for nobody. They stay with the policy:
// there are no more than the node has owners.
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
		s = make(chan struct{}, max(1, cap(p.places)/shared))
		p.shares[sharer] = s
	}
	return s
}

// leave gives back the place of an instance, and that in a share if there is one.
func (p *Policy) leave(share chan struct{}) {
	<-p.places
	if share != nil {
		<-share
	}
}

// take takes a place, and waits for one no longer than WaitLimit.
func (h *Host) take(ctx context.Context, places chan<- struct{}) error {
	select {
	case places <- struct{}{}:
		return nil
	default:
	}
	timer := time.NewTimer(h.config.WaitLimit)
	defer timer.Stop()
	select {
	case places <- struct{}{}:
		return nil
	case <-timer.C:
		return errBusy
	case <-ctx.Done():
		return ctx.Err()
	}
}

// makeRoom takes the place of an instance among all. Where there is none, those
// end that are idle, and those that would be.
func (h *Host) makeRoom(ctx context.Context) error {
	select {
	case h.instances <- struct{}{}:
		return nil
	default:
	}
	h.short.Add(1) // before the idle ones end: after that there are no new ones
	defer h.short.Add(-1)
	for _, p := range h.live() {
		p.trim(time.Now())
	}
	return h.take(ctx, h.instances)
}

// put takes an instance back that can go on.
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
	p.leave(share)
}

// drop ends an instance that must not be used again.
func (p *Policy) drop(i *instance) {
	i.close()
	p.leave(i.share)
}

// trim ends instances that were not used since then.
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

// drain ends all instances, those in use when they are put back.
func (p *Policy) drain() {
	p.mu.Lock()
	p.ended = true
	old := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, i := range old {
		i.close()
	}
}
