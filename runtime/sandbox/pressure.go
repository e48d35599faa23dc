package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/dustin/go-humanize"
)

const (
	// stallWindow is the time over which stalls are averaged: the shortest of the kernel's own
	// averages. stallSettle is the time after a stop; the stalls before it do not count.
	stallWindow = 10 * time.Second
	stallSettle = 2 * time.Second
	// stallGuard: stalls count only if less than this many times the reserve is available. A
	// program that reaches the limit of its own sandbox stalls, too, and that must not stop
	// other sandboxes.
	stallGuard = 4
	// Pressure has ended when the reserve is exceeded by a quarter, and stalls have halved:
	// otherwise a node at the threshold would begin with each program that starts.
	reliefReserve = 1.25
	reliefStall   = 0.5
	// failedStopPause is the time until a sandbox that could not be stopped is tried again.
	failedStopPause = time.Minute
)

// pressure is the state of the rule that stops sleeping sandboxes when memory is short. Only
// the goroutine of watchMemory uses it.
type pressure struct {
	lasts   bool             // it has begun and not ended
	samples []MemoryState    // of stallWindow at most, oldest first, since the last stop
	failed  map[ID]time.Time // when a stop failed, of those that failed within failedStopPause
	warned  bool             // that no sandbox can be stopped has been logged
}

// watchMemory reads the memory every MemoryInterval and stops sleeping sandboxes while it is
// short.
func (m *Manager) watchMemory(ctx context.Context) {
	for pause(ctx, m.config().MemoryInterval) == nil {
		for m.relieve(ctx) { // at most one sandbox each
		}
	}
}

// readMemory reads the memory. After an error it returns nil, and the last state remains.
func (m *Manager) readMemory() *MemoryState {
	if m.deps.Memory == nil {
		return nil
	}
	now, err := m.deps.Memory.Read()
	if err != nil {
		if !m.memoryFailed.Swap(true) {
			m.log.Warn("failed to read the memory of the node", "error", err)
		}
		return nil
	}
	m.memoryFailed.Store(false)
	before := m.memory.Swap(&now)
	if before != nil && before.Swap == 0 && now.Swap > 0 {
		m.armSleeping() // their memory can be reclaimed from now on
	}
	return &now
}

// relieve stops the sandbox that has been asleep longest if memory is short. It reports whether
// to read again immediately, because a stop frees memory before it returns. It does not
// after a failure, or when stalls alone show the pressure: they need time to settle.
func (m *Manager) relieve(ctx context.Context) (again bool) {
	now := m.readMemory()
	if now == nil || ctx.Err() != nil {
		return false
	}
	p := &m.pressure
	lasted := p.lasts
	why, low := p.judge(m.config(), *now)
	m.metrics.pressure(p.lasts)
	switch {
	case p.lasts && !lasted:
		m.log.Warn("memory pressure began", "detail", why, "available_bytes", now.Available, "total_bytes", now.Total)
	case !p.lasts && lasted:
		m.log.Info("memory pressure ended", "available_bytes", now.Available, "total_bytes", now.Total)
		p.warned = false
	}
	if why == "" {
		return false
	}
	b := m.longestAsleep(func(id ID) bool { return p.mayStop(id, now.At) })
	if b == nil {
		if !p.warned {
			m.log.Warn("memory is short and no sandbox that sleeps can be stopped", "detail", why)
		}
		p.warned = true
		return false
	}
	err := b.stop(ctx, modePressure, ending{reason: ReasonMemoryPressure, detail: why})
	switch {
	case err == nil:
		m.metrics.pressureStops.WithLabelValues("stopped").Inc()
		p.samples = nil
		return low
	case errors.Is(err, errNotIdle), errors.Is(err, ErrDestroyed), ctx.Err() != nil:
		return false // it is in use again, or gone
	}
	m.metrics.pressureStops.WithLabelValues("failed").Inc()
	m.log.Error("failed to stop a sandbox for want of memory, trying others first", "sandbox", b.id, "error", err)
	p.noteFailed(b.id, now.At)
	return false
}

// judge decides whether memory is short, and describes the measurement if so. low: too little is
// available, as opposed to stalls.
func (p *pressure) judge(cfg *Config, now MemoryState) (why string, low bool) {
	p.add(now)
	reserve, stall, settle := cfg.MemoryReserve, cfg.MemoryStall, stallWindow
	if reserve == 0 {
		p.lasts = false
		return "", false
	}
	if p.lasts {
		reserve, stall, settle = min(reserve*reliefReserve, 1), stall*reliefStall, stallSettle
	}
	available := float64(now.Available) / float64(now.Total)
	if available < reserve {
		p.lasts = true
		return fmt.Sprintf("%s of %s of memory were available, %s are required", bytesText(now.Available), bytesText(now.Total), percent(reserve)), true
	}
	if cfg.MemoryStall == 0 || !now.Stalls || available >= stallGuard*reserve {
		p.lasts = false
		return "", false
	}
	stalled, over := p.stalled()
	if over < settle {
		return "", false // it lasts if it did: the effect of the last stop is not known yet
	}
	if stalled < stall {
		p.lasts = false
		return "", false
	}
	p.lasts = true
	return fmt.Sprintf("programs waited for memory %s of the time, the threshold is %s; %s of %s were available",
		percent(stalled), percent(stall), bytesText(now.Available), bytesText(now.Total)), false
}

// add adds a sample and removes those before stallWindow.
func (p *pressure) add(now MemoryState) {
	if !now.Stalls {
		p.samples = nil
		return
	}
	if n := len(p.samples); n > 0 && (now.Stalled < p.samples[n-1].Stalled || !now.At.After(p.samples[n-1].At)) {
		p.samples = nil // of another counter, or clock
	}
	p.samples = append(p.samples, now)
	for len(p.samples) > 2 && now.At.Sub(p.samples[1].At) >= stallWindow {
		p.samples = p.samples[1:]
	}
}

// stalled is the share of the time in which programs waited for memory, and that time.
func (p *pressure) stalled() (share float64, over time.Duration) {
	if len(p.samples) < 2 {
		return 0, 0
	}
	first, last := p.samples[0], p.samples[len(p.samples)-1]
	over = last.At.Sub(first.At)
	return float64(last.Stalled-first.Stalled) / float64(over), over
}

// mayStop reports whether no stop of the sandbox has failed within failedStopPause.
func (p *pressure) mayStop(id ID, now time.Time) bool {
	at, failed := p.failed[id]
	return !failed || now.Sub(at) >= failedStopPause
}

func (p *pressure) noteFailed(id ID, now time.Time) {
	if p.failed == nil {
		p.failed = map[ID]time.Time{}
	}
	maps.DeleteFunc(p.failed, func(id ID, _ time.Time) bool { return p.mayStop(id, now) })
	p.failed[id] = now
}

// longestAsleep returns the unused sandbox that has been asleep longest and may be stopped, or nil.
// It takes microseconds for thousands of sandboxes.
func (m *Manager) longestAsleep(may func(ID) bool) *liveSandbox {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var longest *liveSandbox
	var since time.Time
	for _, b := range m.sandboxes {
		sb := b.view.Load()
		if sb.State != StateAsleep || longest != nil && !sb.StateSince.Before(since) {
			continue
		}
		if may(b.id) && b.unused() {
			longest, since = b, sb.StateSince
		}
	}
	return longest
}

// unused reports whether the sandbox is asleep, without a lease, a hold or a wake under way.
func (b *liveSandbox) unused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	sb := b.view.Load()
	return sb.State == StateAsleep && !b.gone && b.wake == nil && b.leases() == 0 && !time.Now().Before(sb.HoldUntil)
}

func bytesText(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

func percent(share float64) string { return fmt.Sprintf("%.3g%%", 100*share) }
