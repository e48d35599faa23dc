// Package freezertest is the conformance suite of sandbox.Freezer.
package freezertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// System is a Freezer with processes that it can freeze. It gets new ids, which are unknown
// before Prepare.
type System struct {
	Freezer sandbox.Freezer
	// Start runs a counter in a sandbox that was prepared, with the parent that
	// Prepare gave. Several may run in one sandbox.
	Start func(t testing.TB, id sandbox.ID, cgroupParent string) Counter
}

// Counter is a process, or a substitute, that only counts while it may run.
type Counter interface {
	Count() uint64
	// Stop ends it and waits until it has ended, frozen or not. Idempotent; the suite
	// always calls it.
	Stop()
}

// Run runs the suite. Each test opens a System of its own, which ends by
// t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"FreezeStopsEveryProcessAndThawResumesIt", freezeAndThaw},
		{"FreezeLeavesOtherSandboxesRunning", othersRun},
		{"FreezeAndThawAreIdempotent", idempotent},
		{"PrepareAgainLeavesTheSandboxFrozen", prepareAgain},
		{"FreezeWithAnEndedContextLeavesItThawed", endedContext},
		{"AnEmptySandboxFreezes", emptyFreezes},
		{"CPUTimeCountsRunningProcesses", cpuTime},
		{"MemoryCountsProcessesFrozenOrNot", memory},
		{"ReclaimLeavesTheSandboxAsItIs", reclaim},
		{"ReclaimEndsWithItsContext", reclaimEnded},
		{"UnknownSandboxesAreErrors", unknown},
		{"RemovedSandboxIsUnknown", remove},
		{"FreezeAndThawAreSafeForConcurrentUse", concurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(&suite{T: t, ctx: testkit.Context(t), System: open(t)})
		})
	}
}

type suite struct {
	*testing.T
	System
	ctx context.Context
}

// box is a prepared sandbox with running counters.
type box struct {
	s        *suite
	id       sandbox.ID
	parent   string
	counters []Counter
}

var limits = sandbox.Limits{CPUs: 1, Memory: 256 << 20, PIDs: 64}

func (s *suite) box(counters int) *box {
	s.Helper()
	b := &box{s: s, id: sandbox.NewID()}
	var err error
	b.parent, err = s.Freezer.Prepare(b.id, limits)
	testkit.NoError(s, "Prepare", err)
	s.Cleanup(func() {
		for _, c := range b.counters {
			c.Stop()
		}
		if err := s.Freezer.Remove(b.id); err != nil {
			s.Errorf("Remove: %v", err)
		}
	})
	for range counters {
		b.counters = append(b.counters, s.Start(s, b.id, b.parent))
	}
	b.advances()
	return b
}

// advances waits until every counter has advanced.
func (b *box) advances() {
	b.s.Helper()
	for i, c := range b.counters {
		from := c.Count()
		testkit.Eventually(b.s, fmt.Sprintf("counter %d of %s advances beyond %d", i, b.id, from), func() bool { return c.Count() > from })
	}
}

// standsStill fails if a counter moves while reference advances 20 times.
func (b *box) standsStill(reference *box) {
	b.s.Helper()
	var before []uint64
	for _, c := range b.counters {
		before = append(before, c.Count())
	}
	for range 20 {
		reference.advances()
	}
	for i, c := range b.counters {
		if now := c.Count(); now != before[i] {
			b.s.Fatalf("counter %d of %s went from %d to %d while frozen", i, b.id, before[i], now)
		}
	}
}

func (b *box) freeze() {
	b.s.Helper()
	testkit.NoError(b.s, "Freeze", b.s.Freezer.Freeze(b.s.ctx, b.id))
}

func (b *box) thaw() {
	b.s.Helper()
	testkit.NoError(b.s, "Thaw", b.s.Freezer.Thaw(b.s.ctx, b.id))
}

func (b *box) isFrozen(want bool) {
	b.s.Helper()
	got, err := b.s.Freezer.Frozen(b.s.ctx, b.id)
	testkit.NoError(b.s, "Frozen", err)
	if got != want {
		b.s.Fatalf("Frozen returned %v, want %v", got, want)
	}
}

func freezeAndThaw(s *suite) {
	b, reference := s.box(3), s.box(1)
	b.isFrozen(false)
	for range 3 {
		b.freeze()
		b.isFrozen(true)
		b.standsStill(reference)
		b.thaw()
		b.isFrozen(false)
		b.advances()
	}
}

func othersRun(s *suite) {
	b, other := s.box(1), s.box(1)
	b.freeze()
	other.isFrozen(false)
	other.advances()
}

func idempotent(s *suite) {
	b, reference := s.box(1), s.box(1)
	b.thaw()
	b.advances()
	b.freeze()
	b.freeze()
	b.standsStill(reference)
	b.thaw()
	b.thaw()
	b.advances()
}

func prepareAgain(s *suite) {
	b, reference := s.box(1), s.box(1)
	b.freeze()
	again, err := s.Freezer.Prepare(b.id, sandbox.Limits{CPUs: 2})
	testkit.NoError(s, "Prepare", err)
	if again != b.parent {
		s.Fatalf("the second Prepare gave %q, the first %q", again, b.parent)
	}
	b.isFrozen(true)
	b.standsStill(reference)
	b.thaw()
	b.advances()
}

func endedContext(s *suite) {
	b := s.box(1)
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	if err := s.Freezer.Freeze(ended, b.id); err == nil {
		s.Fatal("Freeze with an ended context succeeded")
	}
	b.isFrozen(false)
	b.advances()
}

func emptyFreezes(s *suite) {
	b := s.box(0)
	b.freeze()
	b.isFrozen(true)
	b.thaw()
	b.isFrozen(false)
}

func cpuTime(s *suite) {
	b, reference := s.box(1), s.box(1)
	read := func() time.Duration {
		s.Helper()
		d, err := s.Freezer.CPUTime(s.ctx, b.id)
		testkit.NoError(s, "CPUTime", err)
		return d
	}
	from := read()
	for read() <= from {
		b.advances()
	}
	b.freeze()
	later := func() time.Duration {
		s.Helper()
		for range 20 {
			reference.advances()
		}
		return read()
	}
	// A process counts as frozen when it is about to leave its CPU; the kernel
	// adds that last stretch, of microseconds, to its time just after.
	still := read()
	for now := later(); now != still; now = later() {
		if s.ctx.Err() != nil {
			s.Fatalf("CPU time still grows while frozen: %v, then %v", still, now)
		}
		still = now
	}
	if now := later(); now != still {
		s.Fatalf("CPU time went from %v to %v while frozen", still, now)
	}
	b.thaw()
	for read() <= still {
		b.advances()
	}
}

func memory(s *suite) {
	b := s.box(2)
	// A process of any kind takes more than its stack and less than the machine.
	const least, most = 64 << 10, 1 << 40
	check := func(state string) {
		s.Helper()
		n, err := s.Freezer.Memory(s.ctx, b.id)
		testkit.NoError(s, "Memory", err)
		if n < least || n > most {
			s.Errorf("%s: %d bytes, want %d to %d", state, n, least, int64(most))
		}
	}
	check("running")
	b.freeze()
	check("frozen")
}

// supported reports whether the Freezer can reclaim memory. If not, the error is
// ErrUnsupported, and nothing has changed.
func (s *suite) supported(err error) bool {
	s.Helper()
	if errors.Is(err, errors.ErrUnsupported) {
		s.Logf("not supported here: %v", err)
		return false
	}
	testkit.NoError(s, "Reclaim", err)
	return true
}

func reclaim(s *suite) {
	b, reference := s.box(2), s.box(1)
	for _, frozen := range []bool{true, false} {
		if frozen {
			b.freeze()
		}
		r, err := s.Freezer.Reclaim(s.ctx, b.id)
		// A few pages may come and go with the kernel's own work.
		if s.supported(err) && (r.Before <= 0 || r.After < 0 || r.After > r.Before+1<<20) {
			s.Errorf("frozen %v: %d bytes before, %d after", frozen, r.Before, r.After)
		}
		b.isFrozen(frozen)
		if frozen {
			b.standsStill(reference)
			b.thaw()
		}
		b.advances()
	}
}

func reclaimEnded(s *suite) {
	b := s.box(1)
	b.freeze()
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	r, err := s.Freezer.Reclaim(ended, b.id)
	if s.supported(err) && r.Before != r.After {
		s.Errorf("%d bytes before, %d after", r.Before, r.After)
	}
	b.isFrozen(true)
	b.thaw()
	b.advances()
}

func unknown(s *suite) {
	id := sandbox.NewID()
	f := s.Freezer
	_, frozenErr := f.Frozen(s.ctx, id)
	_, cpuErr := f.CPUTime(s.ctx, id)
	_, memoryErr := f.Memory(s.ctx, id)
	_, reclaimErr := f.Reclaim(s.ctx, id)
	for method, err := range map[string]error{
		"Freeze": f.Freeze(s.ctx, id), "Thaw": f.Thaw(s.ctx, id), "Frozen": frozenErr, "CPUTime": cpuErr, "Memory": memoryErr, "Reclaim": reclaimErr,
	} {
		if err == nil {
			s.Errorf("%s of an unknown sandbox succeeded", method)
		}
	}
	testkit.NoError(s, "Remove of an unknown sandbox", f.Remove(id))
	for _, bad := range []sandbox.ID{"", "..", "a/b", "../../x"} {
		if _, err := f.Prepare(bad, limits); err == nil {
			s.Errorf("Prepare accepted the id %q", bad)
		}
	}
}

func remove(s *suite) {
	b := s.box(1)
	b.freeze()
	b.counters[0].Stop() // a frozen process can be killed
	testkit.NoError(s, "Remove", s.Freezer.Remove(b.id))
	if err := s.Freezer.Thaw(s.ctx, b.id); err == nil {
		s.Error("Thaw after Remove succeeded")
	}
	testkit.NoError(s, "second Remove", s.Freezer.Remove(b.id))
	// The id is reusable, and not frozen then.
	parent, err := s.Freezer.Prepare(b.id, limits)
	testkit.NoError(s, "Prepare after Remove", err)
	b.counters = []Counter{s.Start(s, b.id, parent)}
	b.isFrozen(false)
	b.advances()
}

func concurrent(s *suite) {
	const boxes, workers, rounds = 3, 4, 25
	var all []*box
	for range boxes {
		all = append(all, s.box(1))
	}
	var wg sync.WaitGroup
	for _, b := range all {
		for worker := range workers {
			wg.Go(func() {
				for round := range rounds {
					var err error
					if (worker+round)%2 == 0 {
						err = s.Freezer.Freeze(s.ctx, b.id)
					} else {
						err = s.Freezer.Thaw(s.ctx, b.id)
					}
					if err == nil {
						_, err = s.Freezer.Frozen(s.ctx, b.id)
					}
					if err != nil {
						s.Errorf("%s, worker %d, round %d: %v", b.id, worker, round, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	reference := s.box(1)
	for _, b := range all {
		b.thaw()
		b.advances()
		b.freeze()
		b.standsStill(reference)
	}
}
