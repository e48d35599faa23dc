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
// the node measures disks. Measuring a large disk takes seconds, so the node measures a sandbox only
// if its upper bound exceeds its limit. The upper bound is the last measurement plus all bytes that
// any program has written to the file systems since then while the sandbox was running.

const (
	// diskPeriod is the interval at which a sandbox is measured even if its upper bound is within the
	// limit, provided that its disk may have changed: inodes that one program frees hide inodes that
	// another program allocates. A sandbox that does not run any more is measured once, so that Report
	// has its usage.
	diskPeriod = 5 * time.Minute
	// The default reserve is at most this.
	defaultDiskReserve  = 2 << 30
	defaultFilesReserve = 100_000
	// Growth below this never stops a sandbox to protect the node's reserve.
	minDiskGrowth  = 16 << 20
	minFilesGrowth = 1000
)

// diskState is the measurement state of a sandbox's disk. Guarded by liveSandbox.mu.
type diskState struct {
	run       int       // changes with each start and each new disk
	bound     DiskUsage // upper bound of the usage; see diskPeriod
	measured  time.Time // last attempt; zero: not since the node started
	counted   time.Time // last complete measurement; zero: not since the node started
	changed   bool      // the file systems have changed since
	notBefore time.Time // earliest time of the next measurement
}

// diskWatch is the node's state for enforcing disk limits and the reserve.
type diskWatch struct {
	polling sync.Mutex // held by pollDisks; guards:
	last    []DiskSpace
	lastAt  time.Time
	failed  bool // the last read failed

	// short describes the file system with less than the reserve; nil: none.
	short atomic.Pointer[diskShortage]

	measuring atomic.Bool        // a measuring goroutine is running
	mu        sync.Mutex         // guards:
	interrupt context.CancelFunc // cancels the current measurement when a shortage begins
	urgent    bool               // the shortage has just begun
	rose      DiskUsage          // growth of the file systems since the last call of needsRelief that returned a shortage
	warned    bool               // logged during this shortage that no sandbox has grown
}

// diskShortage is a file system with less free space than the reserve.
type diskShortage struct {
	space   DiskSpace
	reserve DiskUsage
	files   bool // inodes are below the reserve, not bytes
}

// of returns the files or the bytes of a usage, whichever is below the reserve.
func (s *diskShortage) of(u DiskUsage) int64 {
	if s.files {
		return u.Entries
	}
	return u.Bytes
}

// leastGrowth returns the minimum growth for which a sandbox is stopped.
func (s *diskShortage) leastGrowth() int64 { return s.of(DiskUsage{minDiskGrowth, minFilesGrowth}) }

// growth formats the growth of a sandbox.
func (s *diskShortage) growth(by int64) string {
	if s.files {
		return fmt.Sprintf("%d files", by)
	}
	return bytesText(by)
}

func (s *diskShortage) String() string {
	if s.files {
		return fmt.Sprintf("%s had %d free inodes; the reserve is %d", s.space.Path, s.space.Free.Entries, s.reserve.Entries)
	}
	return fmt.Sprintf("%s had %s free; the reserve is %s", s.space.Path, bytesText(s.space.Free.Bytes), bytesText(s.reserve.Bytes))
}

// CheckSpace returns ErrStoreFull (wrapped) while a file system has less free space than the node's
// reserve.
func (m *Manager) CheckSpace() error {
	return m.checkSpace(func(DiskSpace) bool { return true })
}

// CheckUpload is CheckSpace for the file systems with the root file systems of sandboxes.
func (m *Manager) CheckUpload() error {
	return m.checkSpace(func(s DiskSpace) bool { return s.Roots })
}

// checkSpace is CheckSpace for some file systems. During a shortage it reads the free space, so that
// freed space counts immediately.
func (m *Manager) checkSpace(of func(DiskSpace) bool) error {
	short := m.disks.short.Load()
	if short == nil {
		return nil
	}
	if now, err := m.deps.Disks.Space(); err == nil {
		now = slices.DeleteFunc(now, func(s DiskSpace) bool { return !of(s) })
		if short = m.config().shortage(now, true); short == nil {
			return nil
		}
	}
	return fmt.Errorf("%w: %s", ErrStoreFull, short)
}

// watchDisks reads the free space every DiskInterval. Measurements run in a separate goroutine, one
// at a time.
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
	at := time.Now()
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
	// Freed space can hide bytes written in the same interval, so use the written bytes if they are more.
	wrote := rose
	if len(now) > 0 && len(w.last) == len(now) && w.last[0].Written > 0 {
		wrote.Bytes = max(wrote.Bytes, now[0].Written-w.last[0].Written)
	}
	since := w.lastAt
	w.last, w.lastAt = now, at
	if changed || wrote != (DiskUsage{}) {
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

// shortage returns the first file system with less free space than the reserve, or nil. With lasts,
// it requires a quarter more than the reserve, so that a shortage does not end and begin repeatedly.
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
		m.log.Warn("free disk space fell below the reserve", "detail", short.String())
		if w.interrupt != nil {
			w.interrupt() // finding the growing sandbox is more urgent
		}
	case short == nil && before != nil:
		m.log.Info("free disk space recovered", "path", before.space.Path)
	}
}

// needsRelief returns the shortage if it has just begun, or if the file systems have grown since the
// last relief. Otherwise it returns nil.
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

// measureDue first relieves a shortage, then measures the sandboxes that are due. After each
// measurement, it pauses for as long as the measurement took, to leave the machine time for other work.
func (m *Manager) measureDue(ctx context.Context) {
	w := &m.disks
	for ctx.Err() == nil {
		calm, end := w.untilShortage(ctx)
		start := time.Now()
		short, due := w.needsRelief(), (*liveSandbox)(nil)
		if short == nil {
			due = m.dueDisk()
		}
		relieved := false
		switch {
		case short != nil:
			relieved = m.relieveDisk(ctx, short)
		case due != nil && due.state() == StateRunning:
			due.enforceDisk(ctx, calm)
		case due != nil:
			due.remeasureDisk(calm)
		}
		if !relieved && (short != nil || due != nil) {
			_ = pause(calm, time.Since(start)) // a shortage ends it, too
		}
		end()
		if short == nil && due == nil {
			return
		}
	}
}

// untilShortage returns a context that is canceled when a shortage begins, or by end.
func (w *diskWatch) untilShortage(ctx context.Context) (calm context.Context, end func()) {
	calm, cancel := context.WithCancel(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.interrupt = cancel
	if w.urgent {
		cancel()
	}
	return calm, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.interrupt = nil
		cancel()
	}
}

// dueDisk returns the next sandbox to measure, or nil. Sandboxes that may exceed their limits come
// first, then the sandbox with the oldest measurement.
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

// diskDue reports whether to measure the disk of a sandbox now: because it may exceed its limits
// (over), or because its last measurement is too old.
func (b *liveSandbox) diskDue(now time.Time) (over bool, since time.Time, due bool) {
	sb := b.view.Load()
	running := sb.State == StateRunning
	if !running && sb.State != StateAsleep && sb.State != StateStopped {
		return false, time.Time{}, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.disk
	if b.gone || now.Before(d.notBefore) {
		return false, time.Time{}, false
	}
	over = running && d.bound.exceeds(sb.DiskAllowance)
	old := d.changed && now.Sub(d.measured) >= diskPeriod
	return over, d.measured, over || old || running && d.measured.IsZero()
}

// growth is how much the disk of a running sandbox has grown since it was last measured.
type growth struct {
	b     *liveSandbox
	run   int // of its disk
	usage DiskUsage
	by    int64 // in files or bytes, see diskShortage.of
	all   int64 // written by all programs since
}

// relieveDisk stops the running sandbox that has grown the most since it was last measured. It
// reports false if none has grown.
func (m *Manager) relieveDisk(ctx context.Context, short *diskShortage) (stopped bool) {
	var most growth
	for _, b := range m.busiest(ctx) {
		g, err := b.grown(ctx, short)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, ErrNoContainer) && !errors.Is(err, errNotIdle) {
				m.log.Warn("failed to measure the disk of a sandbox, trying again", "sandbox", b.id, "error", err)
			}
			continue
		}
		if g.by > most.by {
			most = g
		}
		if g.by >= short.leastGrowth() && g.by > g.all/2 { // no other sandbox can have grown more
			break
		}
	}
	if most.by < short.leastGrowth() {
		m.disks.mu.Lock()
		defer m.disks.mu.Unlock()
		if !m.disks.warned && ctx.Err() == nil {
			m.log.Warn("free disk space is low and no running sandbox has grown", "detail", short.String())
		}
		m.disks.warned = true
		return false
	}
	stopped = most.b.stopForDisk(ctx, ctx, most.run, ending{reason: ReasonDiskPressure, disk: most.usage, diskLimit: most.b.view.Load().DiskAllowance,
		detail: fmt.Sprintf("%s; of all running sandboxes, this one had grown the most: by %s", short, short.growth(most.by))})
	if !stopped {
		m.disks.mu.Lock()
		defer m.disks.mu.Unlock()
		m.disks.rose = m.disks.rose.plus(DiskUsage{minDiskGrowth, minFilesGrowth}) // try again
	}
	return stopped
}

// grown measures a sandbox and returns its growth. If the sandbox cannot be measured, grown assumes
// that it wrote everything that was written.
func (b *liveSandbox) grown(ctx context.Context, short *diskShortage) (growth, error) {
	before := b.view.Load().Disk
	b.mu.Lock()
	all := short.of(b.disk.bound.minus(before))
	b.mu.Unlock()
	usage, run, err := b.measureDisk(ctx, DiskUsage{})
	if errors.Is(err, errUnmeasurable) {
		return growth{b, run, usage, all, all}, nil
	}
	if err != nil {
		return growth{}, err
	}
	b.noteDisk(usage, run)
	return growth{b, run, usage, short.of(usage.minus(before)), all}, nil
}

// busiest returns the running sandboxes, sorted by recent CPU usage in descending order: a program
// that fills a disk uses CPU time.
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
