package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Project quotas need privileges that a rootless node does not have (docs/RATIONALE.md). Therefore
// the node measures. That takes seconds for a large disk, so it measures a sandbox only if that can
// have exceeded its limit: for each sandbox it has an upper bound, the last measurement and all
// that was written to the file systems since then while the sandbox ran, by any program.

const (
	// diskPeriod is how often a running sandbox is measured even so, if anything has changed: a
	// program that deletes files conceals others that create some.
	diskPeriod = 5 * time.Minute
	// A reserve that is not configured is at most this.
	defaultDiskReserve  = 2 << 30
	defaultFilesReserve = 100_000
	// A sandbox is stopped for the node's reserve only if it has grown by this.
	minDiskGrowth  = 16 << 20
	minFilesGrowth = 1000
)

// diskState is what is known about the disk of a sandbox. Guarded by liveSandbox.mu.
type diskState struct {
	bound     DiskUsage // it has at most this, see diskPeriod
	measured  time.Time // zero: not by this run of the node
	changed   bool      // something has changed since
	notBefore time.Time // when to try again
}

// diskWatch is the state of the rules for disks.
type diskWatch struct {
	polling sync.Mutex // held by pollDisks; guards:
	last    []DiskSpace
	lastAt  time.Time
	failed  bool // the last read failed

	// short describes the file system with less than the reserve; nil: none.
	short atomic.Pointer[diskShortage]

	measuring atomic.Bool        // by a goroutine
	mu        sync.Mutex         // guards:
	interrupt context.CancelFunc // of the measurement under way, which a shortage interrupts
	urgent    bool               // the shortage has just begun
	rose      DiskUsage          // written since the last relief
	warned    bool               // that no sandbox has grown, in this shortage
}

// diskShortage is a file system with less free space than the reserve.
type diskShortage struct {
	space   DiskSpace
	reserve DiskUsage
	files   bool // inodes are short, not bytes
}

// of is the part of a usage that is short.
func (s *diskShortage) of(u DiskUsage) int64 {
	if s.files {
		return u.Entries
	}
	return u.Bytes
}

// leastGrowth is the least for which a sandbox is stopped.
func (s *diskShortage) leastGrowth() int64 { return s.of(DiskUsage{minDiskGrowth, minFilesGrowth}) }

// growth describes by how much a sandbox has grown.
func (s *diskShortage) growth(by int64) string {
	if s.files {
		return fmt.Sprintf("%d files", by)
	}
	return bytesText(by)
}

func (s *diskShortage) String() string {
	if s.files {
		return fmt.Sprintf("%s had %d free inodes, %d are reserved", s.space.Path, s.space.Free.Entries, s.reserve.Entries)
	}
	return fmt.Sprintf("%s had %s free, %s are reserved", s.space.Path, bytesText(s.space.Free.Bytes), bytesText(s.reserve.Bytes))
}

// CheckSpace returns ErrStoreFull (wrapped) while the disks have less free space than the reserve of
// the node.
func (m *Manager) CheckSpace() error {
	if short := m.disks.short.Load(); short != nil {
		return fmt.Errorf("%w: %s", ErrStoreFull, short)
	}
	return nil
}

// watchDisks reads the free space every DiskInterval. Measurements are made in another goroutine,
// one at a time.
func (m *Manager) watchDisks(ctx context.Context) {
	for pause(ctx, m.config().DiskInterval) == nil {
		m.pollDisks()
		if m.disks.measuring.Swap(true) {
			continue
		}
		if !m.spawn(func(ctx context.Context) {
			defer m.disks.measuring.Store(false)
			m.measureDue(ctx)
		}) {
			return
		}
	}
}

// pollDisks reads the free space.
func (m *Manager) pollDisks() {
	w := &m.disks
	w.polling.Lock()
	defer w.polling.Unlock()
	now, err := m.deps.Disks.Space()
	if err != nil {
		if !w.failed {
			m.log.Warn("failed to read the free space of the disks", "error", err)
		}
		w.failed = true
		return
	}
	w.failed = false
	var rose DiskUsage
	changed := false
	if len(w.last) == len(now) {
		for i, s := range now {
			grown := s.Used.minus(w.last[i].Used)
			rose = rose.plus(DiskUsage{max(grown.Bytes, 0), max(grown.Entries, 0)})
			changed = changed || s.Used != w.last[i].Used
		}
	}
	// Space that is freed does not conceal what is written at the same time.
	wrote := rose
	if len(now) > 0 && len(w.last) == len(now) {
		wrote.Bytes = max(wrote.Bytes, now[0].Written-w.last[0].Written)
	}
	since := w.lastAt
	w.last, w.lastAt = now, time.Now()
	if changed {
		m.growDisks(wrote, since)
	}
	m.noteShortage(now, rose)
}

// growDisks raises the bounds of the sandboxes that have run since the last poll.
func (m *Manager) growDisks(rose DiskUsage, since time.Time) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, b := range m.sandboxes {
		if sb := b.view.Load(); sb.State != StateRunning && sb.StateSince.Before(since) {
			continue
		}
		b.mu.Lock()
		b.disk.bound = b.disk.bound.plus(rose)
		b.disk.changed = true
		b.mu.Unlock()
	}
}

// diskReserve is the reserve of a file system.
func (c *Config) diskReserve(s DiskSpace) DiskUsage {
	bytes := min(s.Total.Bytes/20, defaultDiskReserve)
	if c.DiskReserve > 0 {
		bytes = c.DiskReserve
	}
	return DiskUsage{bytes, min(s.Total.Entries/20, defaultFilesReserve)}
}

// shortage returns the first file system with less than the reserve, or nil. A shortage that lasts
// ends when a quarter more than the reserve is free.
func (c *Config) shortage(spaces []DiskSpace, lasts bool) *diskShortage {
	for _, s := range spaces {
		reserve := c.diskReserve(s)
		least := reserve
		if lasts {
			least = DiskUsage{least.Bytes / 4 * 5, least.Entries / 4 * 5}
		}
		switch {
		case s.Free.Bytes < least.Bytes:
			return &diskShortage{space: s, reserve: reserve}
		case s.Free.Entries < least.Entries:
			return &diskShortage{space: s, reserve: reserve, files: true}
		}
	}
	return nil
}

func (m *Manager) noteShortage(now []DiskSpace, rose DiskUsage) {
	w := &m.disks
	before := w.short.Load()
	short := m.config().shortage(now, before != nil)
	w.short.Store(short)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rose = w.rose.plus(rose)
	switch {
	case short != nil && before == nil:
		w.urgent, w.warned = true, false
		m.log.Warn("disk shortage began", "detail", short.String())
		if w.interrupt != nil {
			w.interrupt() // those that grow are more urgent
		}
	case short == nil && before != nil:
		m.log.Info("disk shortage ended", "path", before.space.Path)
	}
}

// needsRelief returns the shortage if it has just begun, or if more was written since.
func (w *diskWatch) needsRelief() *diskShortage {
	short := w.short.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	if short == nil || !w.urgent && short.of(w.rose) < short.leastGrowth() {
		return nil
	}
	w.urgent, w.rose = false, DiskUsage{}
	return short
}

// measureDue measures the sandboxes that are due, and relieves a shortage first. In the time between
// two measurements, as long as the last one, the machine has other work to do.
func (m *Manager) measureDue(ctx context.Context) {
	w := &m.disks
	for ctx.Err() == nil {
		start := time.Now()
		if short := w.needsRelief(); short != nil {
			if m.relieveDisk(ctx, short) {
				continue
			}
		} else if b := m.dueDisk(); b != nil {
			w.interruptible(ctx, b.enforceDisk)
		} else {
			return
		}
		if pause(ctx, time.Since(start)) != nil {
			return
		}
	}
}

// interruptible calls f with a context that the beginning of a shortage ends.
func (w *diskWatch) interruptible(ctx context.Context, f func(context.Context)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	set := func(interrupt context.CancelFunc) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.interrupt = interrupt
	}
	set(cancel)
	defer set(nil)
	f(ctx)
}

// dueDisk returns a sandbox to measure: first those that may exceed their limits, then the one that
// was measured longest ago.
func (m *Manager) dueDisk() *liveSandbox {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var due *liveSandbox
	var dueOver bool
	var dueSince time.Time
	now := time.Now()
	for _, b := range m.sandboxes {
		over, since, ok := b.diskDue(now)
		if ok && (due == nil || over && !dueOver || over == dueOver && since.Before(dueSince)) {
			due, dueOver, dueSince = b, over, since
		}
	}
	return due
}

// diskDue reports whether to measure the disk of a sandbox now: over, because it may exceed its
// limits, or because it was measured long ago.
func (b *liveSandbox) diskDue(now time.Time) (over bool, since time.Time, due bool) {
	sb := b.view.Load()
	if sb.State != StateRunning {
		return false, time.Time{}, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.disk
	if b.gone || now.Before(d.notBefore) || sb.DiskAllowance == (DiskUsage{}) {
		return false, time.Time{}, false
	}
	over = d.bound.exceeds(sb.DiskAllowance)
	return over, d.measured, over || d.measured.IsZero() || d.changed && now.Sub(d.measured) >= diskPeriod
}

// growth is how much the disk of a running sandbox has grown since it was last measured.
type growth struct {
	b     *liveSandbox
	usage DiskUsage
	by    int64 // of what is short
	all   int64 // written by all programs since
}

// relieveDisk stops the running sandbox that has grown most since it was last measured, if any has
// grown.
func (m *Manager) relieveDisk(ctx context.Context, short *diskShortage) (stopped bool) {
	var most growth
	for _, b := range m.busiest(ctx) {
		g, err := b.grown(ctx, short)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, ErrNoContainer) {
				m.log.Warn("failed to measure the disk of a sandbox, trying again", "sandbox", b.id, "error", err)
			}
			continue
		}
		if g.by > most.by {
			most = g
		}
		if g.by >= short.leastGrowth() && g.by > g.all/2 { // no other has written more
			break
		}
	}
	if most.by < short.leastGrowth() {
		m.disks.mu.Lock()
		defer m.disks.mu.Unlock()
		if !m.disks.warned && ctx.Err() == nil {
			m.log.Warn("disk is short and no running sandbox has grown", "detail", short.String())
		}
		m.disks.warned = true
		return false
	}
	most.b.stopForDisk(ctx, ending{reason: ReasonDiskPressure, disk: most.usage, diskLimit: most.b.view.Load().DiskAllowance,
		detail: fmt.Sprintf("%s, and of all that ran it had grown most: by %s", short, short.growth(most.by))})
	return true
}

// grown measures a sandbox. One that cannot be measured counts as grown by all that was written.
func (b *liveSandbox) grown(ctx context.Context, short *diskShortage) (growth, error) {
	before := b.view.Load().Disk
	b.mu.Lock()
	all := short.of(b.disk.bound.minus(before))
	b.mu.Unlock()
	usage, err := b.measureDisk(ctx, DiskUsage{})
	if errors.Is(err, errUnmeasurable) {
		return growth{b, usage, all, all}, nil
	}
	if err != nil {
		return growth{}, err
	}
	b.noteDisk(usage)
	return growth{b, usage, short.of(usage.minus(before)), all}, nil
}

// busiest returns the running sandboxes, by the CPU time that they have recently used: a program
// that fills a disk uses some.
func (m *Manager) busiest(ctx context.Context) []*liveSandbox {
	share := map[*liveSandbox]float64{}
	m.mu.RLock()
	for _, b := range m.sandboxes {
		if b.state() == StateRunning {
			share[b] = 0
		}
	}
	m.mu.RUnlock()
	for b := range share {
		b.mu.Lock()
		before := b.cpu
		b.mu.Unlock()
		if used, err := m.deps.Freezer.CPUTime(ctx, b.id); err == nil && !before.at.IsZero() {
			share[b] = float64(used-before.used) / float64(max(time.Since(before.at), time.Millisecond))
		}
	}
	return slices.SortedFunc(maps.Keys(share), func(a, b *liveSandbox) int { return cmp.Compare(share[b], share[a]) })
}
