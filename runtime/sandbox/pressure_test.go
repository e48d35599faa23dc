package sandbox_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

const mib = 1 << 20

// The fake has 1 GiB: the reserve is 51.2 MiB, pressure ends at 64 MiB, and stalls count below
// 204.8 MiB.
func available(n *sandboxtest.Node, bytes int64) {
	n.Memory.Change(func(s *sandbox.MemoryState) { s.Available = bytes })
}

// asleep creates sandboxes that fall asleep in this order.
func asleep(t *testing.T, n *sandboxtest.Node, names ...string) (ids []sandbox.ID) {
	t.Helper()
	for _, name := range names {
		ids = append(ids, create(t, n.Manager, name).ID)
	}
	for _, id := range ids {
		mustSleep(t, n.Manager, id)
	}
	return ids
}

// states are the states of sandboxes as one text.
func states(t *testing.T, n *sandboxtest.Node, ids []sandbox.ID) string {
	t.Helper()
	var list []string
	for _, id := range ids {
		list = append(list, string(stateOf(t, n.Manager, id)))
	}
	return strings.Join(list, " ")
}

func expectStates(t *testing.T, n *sandboxtest.Node, ids []sandbox.ID, want string) {
	t.Helper()
	if got := states(t, n, ids); got != want {
		t.Errorf("they are %s, want %s", got, want)
	}
}

// expectRelieve does what is due in a second, and fails unless it reports want: that the memory
// is to be read again immediately.
func expectRelieve(t *testing.T, n *sandboxtest.Node, want bool) {
	t.Helper()
	if again := n.Manager.Relieve(); again != want {
		t.Errorf("to be read again immediately: %v, want %v", again, want)
	}
}

// counted returns the value of the node's metric with one label's value, which may be empty.
func counted(t *testing.T, n *sandboxtest.Node, metric, label string) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(n.Manager)
	families, err := registry.Gather()
	testkit.NoError(t, "Gather", err)
	for _, family := range families {
		for _, sample := range family.GetMetric() {
			if family.GetName() == metric && (label == "" || sample.GetLabel()[0].GetValue() == label) {
				return sample.GetCounter().GetValue() + sample.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func TestLongestAsleepIsStoppedFirst(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "first", "second", "third")
	running := create(t, n.Manager, "running")
	all := append(slices.Clone(ids), running.ID)
	events := subscribe(t, n.Manager, ids[0])
	available(n, 10*mib)
	for _, want := range []string{"stopped asleep asleep running", "stopped stopped asleep running", "stopped stopped stopped running"} {
		expectRelieve(t, n, true) // a stop frees memory before it returns
		expectStates(t, n, all, want)
	}
	expectRelieve(t, n, false)
	expectStates(t, n, all, "stopped stopped stopped running")
	ev := nextEvent(t, events, sandbox.EventStopped)
	if want := "10 MiB of 1.0 GiB of memory were available, 5% are required"; ev.Reason != sandbox.ReasonMemoryPressure || ev.Detail != want || ev.Error != "" {
		t.Errorf("event %+v; want the detail %q", ev, want)
	}
	sb, _ := n.Manager.ByID(ids[0])
	if sb.StateReason != sandbox.ReasonMemoryPressure || sb.StoppedOnPurpose() {
		t.Errorf("its reason is %s, stopped on purpose: %v", sb.StateReason, sb.StoppedOnPurpose())
	}
	mustBeWell(t, n, ids[0])
	if record := n.Store.Record(t, ids[0]); record.State != sandbox.StateStopped || record.StateReason != sandbox.ReasonMemoryPressure {
		t.Errorf("its record has %s (%s)", record.State, record.StateReason)
	}
	if got := counted(t, n, "doze_memory_pressure_stops_total", "stopped"); got != 3 {
		t.Errorf("%v stops are counted, want 3", got)
	}
	if got := counted(t, n, "doze_memory_pressure", ""); got != 1 {
		t.Errorf("the metric of the pressure is %v", got)
	}
	if n := strings.Count(n.Log.String(), "memory pressure began"); n != 1 {
		t.Errorf("the log has the beginning %d times", n)
	}
}

func TestStopsEndWithThePressure(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "first", "second", "third")
	for _, c := range []struct {
		name      string
		available int64
		again     bool
		want      string
		pressure  float64
	}{
		{"enough", 52 * mib, false, "asleep asleep asleep", 0},
		{"too little", 51 * mib, true, "stopped asleep asleep", 1},
		{"the reserve, and little more", 63 * mib, true, "stopped stopped asleep", 1},
		{"the reserve and a quarter", 65 * mib, false, "stopped stopped asleep", 0},
		{"the reserve, and little more, without pressure", 52 * mib, false, "stopped stopped asleep", 0},
		{"too little again", 1 * mib, true, "stopped stopped stopped", 1},
		{"enough again", 512 * mib, false, "stopped stopped stopped", 0},
	} {
		available(n, c.available)
		if again, got := n.Manager.Relieve(), states(t, n, ids); again != c.again || got != c.want {
			t.Errorf("%s: they are %s, again %v; want %s, %v", c.name, got, again, c.want, c.again)
		}
		if got := counted(t, n, "doze_memory_pressure", ""); got != c.pressure {
			t.Errorf("%s: the metric is %v, want %v", c.name, got, c.pressure)
		}
	}
	if got := counted(t, n, "doze_memory_available_bytes", ""); got != 512*mib {
		t.Errorf("%v bytes are available, as the metric has it", got)
	}
}

// The node's own timer goes on without a pause until the pressure has ended.
func TestWatchStopsUntilThePressureEnds(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.MemoryInterval = time.Millisecond })
	ids := asleep(t, n, "first", "second", "third", "fourth")
	second := subscribe(t, n.Manager, ids[1])
	n.Memory.OnRead(func(s *sandbox.MemoryState) {
		left := 0
		for _, id := range ids {
			if sb, _ := n.Manager.ByID(id); sb.State == sandbox.StateAsleep {
				left++
			}
		}
		s.Available = int64(5-left) * 40 * mib / 2 // 20 MiB with four, 60 with two, 80 with one
	})
	nextEvent(t, second, sandbox.EventStopped)
	n.Log.Await("memory pressure ended")
	expectStates(t, n, ids, "stopped stopped stopped asleep")
}

func TestSandboxesInUseAreNotStopped(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	ids := []sandbox.ID{}
	for _, name := range []string{"running", "leased", "asleep-leased", "asleep-held", "asleep-waking", "stopped"} {
		ids = append(ids, create(t, m, name).ID)
	}
	lease, paused := acquire(t, m, ids[1]), acquire(t, m, ids[2])
	if _, err := m.ForceSleep(t.Context(), ids[2]); err != nil {
		t.Fatal(err)
	}
	mustSleep(t, m, ids[3])
	askAPI(t, n, ids[3], time.Hour)
	mustSleep(t, m, ids[4])
	endWake := m.WarmWake(ids[4])
	mustStop(t, m, ids[5])
	available(n, 0)
	const want = "running running asleep asleep asleep stopped"
	for range 3 {
		expectRelieve(t, n, false)
		expectStates(t, n, ids, want)
	}
	if n := strings.Count(n.Log.String(), "no sandbox that sleeps can be stopped"); n != 1 {
		t.Errorf("the log has that nothing can be stopped %d times", n)
	}
	// The same sandboxes, once they are not in use.
	paused.Release()
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "running running stopped asleep asleep stopped")
	askAPI(t, n, ids[3], 0)
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "running running stopped stopped asleep stopped")
	endWake()
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "running running stopped stopped stopped stopped")
	lease.Release()
	expectRelieve(t, n, false)
	expectStates(t, n, ids, "running running stopped stopped stopped stopped")
}

// stall makes programs wait for that share of each second.
func stall(n *sandboxtest.Node, share float64) {
	n.Memory.OnRead(func(s *sandbox.MemoryState) {
		s.Stalls, s.Stalled = true, s.Stalled+time.Duration(share*float64(time.Second))
	})
}

func TestStallsCountWhenLittleIsAvailable(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "first", "second", "third", "fourth")
	// A sandbox at its own limit stalls, too.
	stall(n, 0.9)
	for range 20 {
		expectRelieve(t, n, false)
	}
	available(n, 206*mib)
	expectRelieve(t, n, false)
	expectStates(t, n, ids, "asleep asleep asleep asleep")
	available(n, 200*mib)
	expectRelieve(t, n, false) // the effect of the stop is known after two seconds
	expectStates(t, n, ids, "stopped asleep asleep asleep")
	sb, _ := n.Manager.ByID(ids[0])
	events, err := n.Manager.Events(t.Context(), ids[0], 0, 100)
	testkit.NoError(t, "Events", err)
	want := "programs waited for memory 90% of the time, the threshold is 10%; 200 MiB of 1.0 GiB were available"
	if last := events[len(events)-1]; last.Detail != want || sb.StateReason != sandbox.ReasonMemoryPressure {
		t.Errorf("%s: detail %q, want %q", sb.StateReason, last.Detail, want)
	}
	for _, want := range []string{"stopped asleep asleep asleep", "stopped asleep asleep asleep", "stopped stopped asleep asleep"} {
		expectRelieve(t, n, false)
		expectStates(t, n, ids, want)
	}
	// Half of the threshold is still pressure, less is not.
	stall(n, 0.06)
	for range 3 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "stopped stopped stopped asleep")
	stall(n, 0.04)
	for range 20 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "stopped stopped stopped asleep")
	if got := counted(t, n, "doze_memory_pressure", ""); got != 0 {
		t.Errorf("the metric of the pressure is %v", got)
	}
	stall(n, 0.09)
	for range 20 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "stopped stopped stopped asleep")
}

// Stalls are averaged over ten seconds: a program that starts causes shorter ones.
func TestShortStallIsNotPressure(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "app")
	available(n, 100*mib)
	stall(n, 0)
	for range 20 {
		expectRelieve(t, n, false)
	}
	stall(n, 0.9)
	expectRelieve(t, n, false)
	stall(n, 0)
	for range 20 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "asleep")
	stall(n, 0.9)
	for range 2 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "stopped")
}

func TestThresholdsAreConfigurable(t *testing.T) {
	for name, c := range map[string]struct {
		reserve, stall float64
		want           string
	}{
		"defaults":         {0.05, 0.1, "stopped"},
		"no reserve":       {0, 0.1, "asleep"},
		"no stalls":        {0.05, 0, "asleep"},
		"more stalls":      {0.05, 0.6, "asleep"},
		"a reserve of 10%": {0.1, 0, "stopped"},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, func(c *sandbox.Config) { c.MemoryReserve, c.MemoryStall = 0.3, 0.01 })
			cfg := sandbox.DefaultConfig()
			cfg.RunDir, cfg.MemoryInterval, cfg.MemoryReserve, cfg.MemoryStall = n.RunDir(""), time.Hour, c.reserve, c.stall
			ids := asleep(t, n, "app")
			testkit.NoError(t, "Configure", n.Manager.Configure(cfg)) // as by a reload
			available(n, 100*mib)
			stall(n, 0.5)
			for range 20 {
				n.Manager.Relieve()
			}
			expectStates(t, n, ids, c.want)
		})
	}
}

func TestInvalidThresholdsAreRefused(t *testing.T) {
	for name, change := range map[string]func(*sandbox.Config){
		"memory_reserve":  func(c *sandbox.Config) { c.MemoryReserve = 1 },
		"memory_stall":    func(c *sandbox.Config) { c.MemoryStall = -0.1 },
		"memory_interval": func(c *sandbox.Config) { c.MemoryInterval = 0 },
		"reclaim_after":   func(c *sandbox.Config) { c.ReclaimAfter = time.Millisecond },
	} {
		cfg := sandbox.DefaultConfig()
		change(&cfg)
		invalid, ok := errors.AsType[*sandbox.InvalidError](cfg.Validate())
		if !ok || invalid.Field != name {
			t.Errorf("%s: %v", name, invalid)
		}
	}
}

func TestNodeWithoutPSIHasItsReserve(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "app")
	available(n, 52*mib)
	for range 30 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "asleep")
	available(n, 50*mib)
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "stopped")
}

func TestUnreadableMemoryStopsNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "app")
	available(n, 0)
	n.Memory.Fail(syscall.EIO)
	for range 3 {
		expectRelieve(t, n, false)
	}
	expectStates(t, n, ids, "asleep")
	if n := strings.Count(n.Log.String(), "failed to read the memory"); n != 1 {
		t.Errorf("the log has the failure %d times", n)
	}
	n.Memory.Fail(nil)
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "stopped")
}

func TestSandboxThatDoesNotStopIsSkipped(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "first", "second")
	available(n, 0)
	attempts := func() int { _, thaws := n.Freezer.Counts(); return thaws } // each begins with a thaw
	n.Engine.FailOnce("stop", syscall.EIO)
	expectRelieve(t, n, false)
	expectStates(t, n, ids, "asleep asleep")
	if sb, _ := n.Manager.ByID(ids[0]); sb.Condition.Code != sandbox.ConditionStopFailed {
		t.Errorf("its condition is %+v", sb.Condition)
	}
	expectRelieve(t, n, true)
	expectStates(t, n, ids, "asleep stopped")
	for range 50 { // of the minute in which it is not tried again
		expectRelieve(t, n, false)
	}
	if n := attempts(); n != 2 {
		t.Errorf("%d attempts to stop, want one of each", n)
	}
	for range 10 {
		n.Manager.Relieve()
	}
	expectStates(t, n, ids, "stopped stopped")
	if n := attempts(); n != 3 {
		t.Errorf("%d attempts to stop, want 3", n)
	}
	if got := counted(t, n, "doze_memory_pressure_stops_total", "failed"); got != 1 {
		t.Errorf("%v failures are counted", got)
	}
	mustBeWell(t, n, ids[0])
}

func TestRequestDuringTheStopStartsTheSandbox(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "app")
	events := subscribe(t, n.Manager, ids[0])
	available(n, 0)
	release := n.Engine.Block("stop")
	relieved := make(chan bool, 1)
	go func() { relieved <- n.Manager.Relieve() }()
	n.Engine.AwaitBlocked(t, "stop")
	woken := make(chan sandbox.WakeInfo, 1)
	go func() {
		lease, err := n.Manager.Acquire(t.Context(), ids[0], sandbox.CausePreview)
		if err != nil {
			t.Error(err)
			close(woken)
			return
		}
		defer lease.Release()
		woken <- lease.Wake()
	}()
	testkit.Eventually(t, "the request waits", func() bool { return n.Manager.Info(t.Context()).Waiters == 1 })
	release()
	if wake := testkit.Receive(t, "the wake", woken); wake.Kind != sandbox.WakeCold {
		t.Errorf("the wake was %+v", wake)
	}
	testkit.Receive(t, "the end of the stop", relieved)
	if ev := nextEvent(t, events, sandbox.EventStopped); ev.Reason != sandbox.ReasonMemoryPressure {
		t.Errorf("%+v", ev)
	}
	if ev := nextEvent(t, events, sandbox.EventWoke); ev.Kind != sandbox.WakeCold || ev.Cause != sandbox.CausePreview {
		t.Errorf("%+v", ev)
	}
	expectStates(t, n, ids, "running")
}

// A request that arrives just before the stop wakes the sandbox from memory.
func TestRequestBeforeTheStopKeepsTheMemory(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "app")
	available(n, 0)
	release := n.Freezer.Block("thaw")
	woken := make(chan sandbox.WakeInfo, 1)
	go func() {
		lease, err := n.Manager.Acquire(t.Context(), ids[0], sandbox.CausePreview)
		if err != nil {
			t.Error(err)
			close(woken)
			return
		}
		defer lease.Release()
		woken <- lease.Wake()
	}()
	n.Freezer.AwaitBlocked(t, "thaw")
	expectRelieve(t, n, false)
	// Also if it was chosen just before.
	stopped := make(chan error, 1)
	go func() { stopped <- n.Manager.StopForMemory(ids[0]) }()
	release()
	if wake := testkit.Receive(t, "the wake", woken); wake.Kind != sandbox.WakeWarm {
		t.Errorf("the wake was %+v", wake)
	}
	if err := testkit.Receive(t, "the end of the stop", stopped); err == nil {
		t.Error("it was stopped while it woke")
	}
	expectStates(t, n, ids, "running")
}

func TestRequestsSucceedUnderPressure(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	ids := asleep(t, n, "a", "b", "c")
	available(n, 0)
	var wg sync.WaitGroup
	done := make(chan struct{})
	relieving := make(chan struct{})
	go func() {
		defer close(relieving)
		for {
			select {
			case <-done:
				return
			default:
				n.Manager.Relieve()
			}
		}
	}()
	for _, id := range ids {
		for range 3 {
			wg.Go(func() {
				for range 20 {
					lease, err := n.Manager.Acquire(t.Context(), id, sandbox.CausePreview)
					if err != nil {
						t.Errorf("acquire: %v", err)
						return
					}
					if s := lease.Sandbox().State; s != sandbox.StateRunning {
						t.Errorf("it is %s under a lease", s)
					}
					lease.Release()
					if _, err := n.Manager.Sleep(t.Context(), id); err != nil && !errors.Is(err, sandbox.ErrBusy) {
						t.Errorf("sleep: %v", err)
					}
				}
			})
		}
	}
	wg.Wait()
	close(done)
	testkit.Closed(t, "the last stop", relieving)
	for _, id := range ids {
		mustBeWell(t, n, id)
	}
}

// Without pressure no sandbox is visited.
func TestWatchCostsTheSameForManySandboxes(t *testing.T) {
	allocations := func(sleeping int) float64 {
		n := sandboxtest.Open(t, nil)
		n.Manager.AddSleeping(sleeping)
		return testing.AllocsPerRun(100, func() { n.Manager.Relieve() })
	}
	if few, many := allocations(0), allocations(10_000); many > few {
		t.Errorf("%v allocations with 10,000 sleeping sandboxes, %v without", many, few)
	}
	n := sandboxtest.Open(t, nil)
	n.Manager.AddSleeping(10_000)
	// With pressure, one is stopped in a second at most.
	available(n, 0)
	n.Manager.Relieve()
	if tried := counted(t, n, "doze_memory_pressure_stops_total", "failed"); tried != 1 { // they have no container
		t.Errorf("%v stops in one second", tried)
	}
}

func BenchmarkWatchWith10000Sleeping(b *testing.B) {
	for name, bytes := range map[string]int64{"enough": 512 * mib, "pressure": 0} {
		b.Run(name, func(b *testing.B) {
			n := sandboxtest.Open(b, nil)
			n.Manager.AddSleeping(10_000)
			available(n, bytes)
			for b.Loop() {
				n.Manager.Relieve()
			}
		})
	}
}
