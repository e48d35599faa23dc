package sandboxtest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Freezer is a sandbox.Freezer that freezes what it counts.
// Its zero value is not usable: see NewFreezer. It can be made to fail and to hang, by
// operation: "freeze", "thaw", "reclaim", or "after_freeze", as when the response to a request is
// lost.
type Freezer struct {
	Faults

	mu      sync.Mutex
	cgroups map[sandbox.ID]*cgroup
	freezes int
	thaws   int

	enforced  []string
	reclaimed []sandbox.ID
}

type cgroup struct {
	limits sandbox.Limits
	frozen bool
	cpu    time.Duration
	share  float64 // of a core, which it uses since the time below
	since  time.Time
	memory int64

	usageErr error
}

func (c *cgroup) used() time.Duration {
	return c.cpu + time.Duration(c.share*float64(time.Since(c.since)))
}

// NewFreezer returns a Freezer without sandboxes.
func NewFreezer() *Freezer { return &Freezer{cgroups: map[sandbox.ID]*cgroup{}} }

// Counts returns how often a sandbox was frozen and thawed; calls that changed
// nothing are not counted.
func (f *Freezer) Counts() (freezes, thaws int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.freezes, f.thaws
}

// Work adds CPU time to a sandbox.
func (f *Freezer) Work(id sandbox.ID, d time.Duration) {
	_ = f.with(id, func(c *cgroup) error { c.cpu += d; return nil })
}

// WorkAlways makes a sandbox use this share of a core from now on, frozen or not.
func (f *Freezer) WorkAlways(id sandbox.ID, share float64) {
	_ = f.with(id, func(c *cgroup) error {
		c.cpu, c.share, c.since = c.used(), share, time.Now()
		return nil
	})
}

// FailUsage makes CPUTime and Memory of a sandbox return err; nil ends that.
func (f *Freezer) FailUsage(id sandbox.ID, err error) {
	_ = f.with(id, func(c *cgroup) error { c.usageErr = err; return nil })
}

// Limits returns the limits that the sandbox was last prepared with.
func (f *Freezer) Limits(id sandbox.ID) (limits sandbox.Limits) {
	_ = f.with(id, func(c *cgroup) error { limits = c.limits; return nil })
	return limits
}

// Prepared reports whether the sandbox has a cgroup.
func (f *Freezer) Prepared(id sandbox.ID) bool {
	return f.with(id, func(*cgroup) error { return nil }) == nil
}

// SetMemory sets the bytes that a sandbox holds.
func (f *Freezer) SetMemory(id sandbox.ID, bytes int64) {
	_ = f.with(id, func(c *cgroup) error { c.memory = bytes; return nil })
}

// Enforce sets the result of Enforced, which a Manager reads when it is made.
func (f *Freezer) Enforce(limits ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.enforced = limits
}

// Reclaims are the sandboxes whose memory was reclaimed, in that order, also if that failed.
func (f *Freezer) Reclaims() []sandbox.ID {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.reclaimed)
}

func (f *Freezer) with(id sandbox.ID, do func(*cgroup) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.cgroups[id]
	if c == nil {
		return fmt.Errorf("sandbox %s was not prepared", id)
	}
	return do(c)
}

// Prepare implements sandbox.Freezer.
func (f *Freezer) Prepare(id sandbox.ID, limits sandbox.Limits) (string, error) {
	if !sandbox.IsID(string(id)) {
		return "", fmt.Errorf("%q is not a sandbox id", id)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cgroups[id] == nil {
		f.cgroups[id] = &cgroup{memory: 1 << 20}
	}
	f.cgroups[id].limits = limits
	return "/fake/" + string(id), nil
}

// Freeze implements sandbox.Freezer.
func (f *Freezer) Freeze(ctx context.Context, id sandbox.ID) error {
	if err := f.begin(ctx, "freeze"); err != nil {
		return err
	}
	err := f.with(id, func(c *cgroup) error {
		if !c.frozen {
			c.frozen = true
			f.freezes++
		}
		return nil
	})
	return cmp.Or(err, f.begin(context.WithoutCancel(ctx), "after_freeze"))
}

// Thaw implements sandbox.Freezer.
func (f *Freezer) Thaw(ctx context.Context, id sandbox.ID) error {
	if err := f.begin(context.WithoutCancel(ctx), "thaw"); err != nil {
		return err
	}
	return f.with(id, func(c *cgroup) error {
		if c.frozen {
			c.frozen = false
			f.thaws++
		}
		return nil
	})
}

// Frozen implements sandbox.Freezer.
func (f *Freezer) Frozen(_ context.Context, id sandbox.ID) (frozen bool, err error) {
	err = f.with(id, func(c *cgroup) error { frozen = c.frozen; return nil })
	return frozen, err
}

// CPUTime implements sandbox.Freezer.
func (f *Freezer) CPUTime(_ context.Context, id sandbox.ID) (used time.Duration, err error) {
	err = f.with(id, func(c *cgroup) error { used = c.used(); return c.usageErr })
	return used, err
}

// Memory implements sandbox.Freezer: a megabyte for each sandbox, unless SetMemory was called.
func (f *Freezer) Memory(_ context.Context, id sandbox.ID) (bytes int64, err error) {
	err = f.with(id, func(c *cgroup) error { bytes = c.memory; return c.usageErr })
	return bytes, err
}

// Reclaim implements sandbox.Freezer. It leaves a tenth of the memory.
func (f *Freezer) Reclaim(ctx context.Context, id sandbox.ID) (r sandbox.Reclaimed, err error) {
	f.mu.Lock()
	f.reclaimed = append(f.reclaimed, id)
	f.mu.Unlock()
	interrupted := f.begin(ctx, "reclaim")
	err = f.with(id, func(c *cgroup) error {
		r.Before, r.After = c.memory, c.memory
		if ctx.Err() != nil {
			return nil
		}
		if interrupted == nil {
			c.memory /= 10
			r.After = c.memory
		}
		return interrupted
	})
	return r, err
}

// Remove implements sandbox.Freezer.
func (f *Freezer) Remove(id sandbox.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.cgroups, id)
	return nil
}

// Enforced implements sandbox.Freezer: nothing is, unless Enforce was called.
func (f *Freezer) Enforced() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.enforced)
}
