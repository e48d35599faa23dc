package sandbox_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// openLimited opens a node whose sandboxes may have 100 MiB in 5,000 files.
func openLimited(t *testing.T, configure func(*sandbox.Config)) *sandboxtest.Node {
	t.Helper()
	return sandboxtest.Open(t, func(c *sandbox.Config) {
		c.Sizes["basic"] = sandbox.Limits{Disk: 100 * mib, Files: 5000}
		if configure != nil {
			configure(c)
		}
	})
}

func mustWake(t *testing.T, n *sandboxtest.Node, id sandbox.ID) sandbox.Sandbox {
	t.Helper()
	sb, err := n.Manager.Wake(t.Context(), id)
	testkit.NoError(t, "wake", err)
	return sb
}

// expectStopped fails unless the sandbox was stopped for the reason, or runs if that is empty.
func expectStopped(t *testing.T, n *sandboxtest.Node, id sandbox.ID, reason sandbox.StateReason) {
	t.Helper()
	want := sandbox.StateStopped
	if reason == "" {
		want = sandbox.StateRunning
	}
	if sb, _ := n.Manager.ByID(id); sb.State != want || sb.StateReason != reason {
		t.Errorf("sandbox is %s (%s), want %s (%s)", sb.State, sb.StateReason, want, reason)
	}
}

func TestSandboxBeyondTheLimitOfItsDiskIsStopped(t *testing.T) {
	for _, c := range []struct {
		name   string
		grow   sandbox.DiskUsage
		detail string
	}{
		{"bytes", sandbox.DiskUsage{Bytes: 200 * mib}, "; the limit of size basic is 100 MiB in 5000 files"},
		{"files", sandbox.DiskUsage{Entries: 5000}, "the sandbox used 5001 files of disk"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := openLimited(t, nil)
			id, other := create(t, n.Manager, "box").ID, create(t, n.Manager, "other").ID
			lease := acquire(t, n.Manager, id) // a lease does not protect the sandbox
			events := subscribe(t, n.Manager, id)
			n.Engine.Grow(id, c.grow)
			n.Engine.Grow(other, sandbox.DiskUsage{Bytes: 99 * mib, Entries: 4000})
			n.Manager.WatchDisks()
			lease.Release()
			expectStopped(t, n, id, sandbox.ReasonDiskLimit)
			expectStopped(t, n, other, "")
			ev := nextEvent(t, events, sandbox.EventStopped)
			if ev.Reason != sandbox.ReasonDiskLimit || !strings.Contains(ev.Detail, c.detail) || ev.DiskLimit != (sandbox.DiskUsage{Bytes: 100 * mib, Entries: 5000}) ||
				ev.Disk.Bytes <= ev.DiskLimit.Bytes && ev.Disk.Entries <= ev.DiskLimit.Entries {
				t.Errorf("event %+v", ev)
			}
			if got := counted(t, n, "doze_disk_stops_total", "disk_limit"); got != 1 {
				t.Errorf("%v stops are counted", got)
			}
			sb, _ := n.Manager.ByID(id)
			if want := (sandbox.DiskUsage{Bytes: c.grow.Bytes, Entries: 1 + c.grow.Entries}); sb.Disk != want || sb.DiskStops != 1 || sb.StoppedOnPurpose() {
				t.Errorf("disk usage is %+v (%d stops), want the full usage %+v", sb.Disk, sb.DiskStops, want)
			}
			mustBeWell(t, n, id)
		})
	}
}

func TestExactlyTheLimitIsAllowed(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 100 * mib, Entries: 4999})
	n.Manager.MeasuredLongAgo(id)
	n.Manager.WatchDisks()
	expectStopped(t, n, id, "")
	if u, err := n.Manager.Usage(t.Context(), id); err != nil || u.Disk != (sandbox.DiskUsage{Bytes: 100 * mib, Entries: 5000}) {
		t.Errorf("usage %+v, %v", u, err)
	}
}

func TestStoppedSandboxStartsAgainToDeleteFiles(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	grow := func(bytes int64) {
		n.Engine.Grow(id, sandbox.DiskUsage{Bytes: bytes * mib})
		n.Manager.MeasuredLongAgo(id) // also after files were deleted
		n.Manager.WatchDisks()
	}
	grow(150)
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
	// Each run may add less than the one before.
	for _, slack := range []int64{64, 32, 16} {
		mustWake(t, n, id)
		sb, _ := n.Manager.ByID(id)
		if got := sb.DiskAllowance.Bytes - sb.Disk.Bytes; got != slack*mib || sb.DiskAllowance.Entries != 5000 {
			t.Errorf("allowance at a usage of %s is %s, want %d MiB more than the usage", sb.Disk, sb.DiskAllowance, slack)
		}
		grow(slack)
		expectStopped(t, n, id, "")
		grow(1)
		expectStopped(t, n, id, sandbox.ReasonDiskLimit)
	}
	mustWake(t, n, id)
	grow(-100)
	expectStopped(t, n, id, "") // above the limit, and below what this run may have
	grow(-100)
	if sb, _ := n.Manager.ByID(id); sb.DiskStops != 0 || sb.DiskAllowance.Bytes != 100*mib {
		t.Errorf("within the limit again: %d stops, allowance %s", sb.DiskStops, sb.DiskAllowance)
	}
	grow(50)
	expectStopped(t, n, id, sandbox.ReasonDiskLimit) // the limit counts again
	if sb := mustWake(t, n, id); sb.DiskAllowance.Bytes-sb.Disk.Bytes != 64*mib {
		t.Errorf("after the first stop since: usage %s, allowance %s", sb.Disk, sb.DiskAllowance)
	}
}

func TestDisksAreMeasuredOnlyIfTheyMayExceedTheirLimits(t *testing.T) {
	n := openLimited(t, nil)
	a, b, asleep, stopped := create(t, n.Manager, "a").ID, create(t, n.Manager, "b").ID, create(t, n.Manager, "asleep").ID, create(t, n.Manager, "stopped").ID
	mustSleep(t, n.Manager, asleep)
	mustStop(t, n.Manager, stopped)
	n.Manager.WatchDisks()
	ids := []sandbox.ID{a, b, asleep, stopped}
	expect := func(what string, want int) {
		t.Helper()
		before := n.Disks.Usages()
		n.Manager.WatchDisks()
		if got := n.Disks.Usages() - before; got != want {
			t.Errorf("%s: measured %d, want %d", what, got, want)
		}
	}
	for range 3 {
		expect("nothing has changed", 0)
	}
	n.Manager.MeasuredLongAgo(a)
	expect("others were created since, and it was measured long ago", 1)
	n.Manager.MeasuredLongAgo(a)
	expect("nothing has changed for long", 0)
	n.Engine.Grow(b, sandbox.DiskUsage{Bytes: 60 * mib})
	expect("60 MiB were written, and one was measured long ago", 1)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 39 * mib})
	expect("39 MiB more", 0)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 2 * mib})
	expect("the upper bound of b is 101 MiB, its usage 60", 1)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 39 * mib})
	expect("the upper bound of b is 99 MiB, a's 80", 0)
	n.Disks.Use(sandbox.DiskUsage{Bytes: -39 * mib})
	n.Disks.Use(sandbox.DiskUsage{Entries: 4000})
	expect("space was freed, and a few files made", 0)
	n.Disks.Use(sandbox.DiskUsage{Entries: 1000})
	expect("the upper bound of each is 5,001 files", 2)
	if got := states(t, n, ids); got != "running running asleep stopped" {
		t.Errorf("states of the sandboxes: %s", got)
	}
	// Writes by other programs while a sandbox is not running do not count.
	mustWake(t, n, asleep)
	mustWake(t, n, stopped)
	expect("two woke", 0)
	// A program that deletes as many files as another creates conceals that for a while.
	n.Disks.Use(sandbox.DiskUsage{Entries: -6000})
	n.Engine.Grow(asleep, sandbox.DiskUsage{Entries: 5999})
	expect("concealed", 0)
	expectStopped(t, n, asleep, "")
	n.Manager.MeasuredLongAgo(asleep)
	expect("after a while", 2) // and once stopped
	expectStopped(t, n, asleep, sandbox.ReasonDiskLimit)
}

// A program that frees space does not conceal what another writes.
func TestFreedSpaceDoesNotHideWrites(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Disks.Use(sandbox.DiskUsage{Bytes: 500 * mib})
	n.Disks.Wrote(1)
	n.Manager.WatchDisks()
	n.Disks.Use(sandbox.DiskUsage{Bytes: -500 * mib})
	n.Disks.Wrote(150 * mib)
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 150 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
}

func TestFailedMeasurementStopsNoSandbox(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Disks.Fail("usage", errors.New("the helper is dead"))
	n.Disks.Use(sandbox.DiskUsage{Bytes: 200 * mib})
	for range 3 {
		n.Manager.WatchDisks()
	}
	expectStopped(t, n, id, "")
	if got := n.Disks.Usages(); got != 1 {
		t.Errorf("measured %d times, want once until a pause has passed", got)
	}
	if got := strings.Count(n.Log.String(), "failed to measure the disk"); got != 1 {
		t.Errorf("the log has it %d times", got)
	}
}

func TestFailedReadsOfTheSpaceAreLoggedOnce(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Disks.Fail("space", errors.New("not mounted"))
	for range 3 {
		n.Manager.WatchDisks()
	}
	if got := strings.Count(n.Log.String(), "failed to read the free space"); got != 1 {
		t.Errorf("the log has it %d times", got)
	}
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 200 * mib})
	n.Disks.Fail("space", nil)
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit) // the writes meanwhile count
}

// Programs must not evade the limit with folders that cannot be measured.
func TestSandboxThatCannotBeMeasuredIsStoppedOnceItMayHaveExceededItsLimit(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Disks.Fail("usage", sandbox.ErrTooDeep)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 90 * mib})
	n.Manager.MeasuredLongAgo(id)
	n.Manager.WatchDisks()
	expectStopped(t, n, id, "")
	n.Manager.TryAgain(id)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 20 * mib})
	events := subscribe(t, n.Manager, id)
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
	if ev := nextEvent(t, events, sandbox.EventStopped); !strings.Contains(ev.Detail, "nested too deep") || ev.Disk != (sandbox.DiskUsage{}) {
		t.Errorf("event %+v", ev)
	}
	// It starts again, and has space to remove them, but not its whole limit.
	mustWake(t, n, id)
	n.Manager.TryAgain(id)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 50 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, "")
	n.Manager.TryAgain(id)
	n.Disks.Use(sandbox.DiskUsage{Bytes: 20 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
}

func TestAllowanceSurvivesARestartOfTheNode(t *testing.T) {
	n := openLimited(t, nil)
	id, other := create(t, n.Manager, "box").ID, create(t, n.Manager, "other").ID
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 150 * mib})
	n.Manager.WatchDisks()
	want := mustWake(t, n, id).DiskAllowance
	testkit.Eventually(t, "it is on disk", func() bool { return n.Store.Record(t, id).DiskAllowance == want })
	n.Crash(t, func() { n.Engine.Grow(other, sandbox.DiskUsage{Bytes: 101 * mib}) })
	n.Manager.WatchDisks()
	expectStopped(t, n, id, "") // it runs with 150 MiB
	expectStopped(t, n, other, sandbox.ReasonDiskLimit)
	if sb, _ := n.Manager.ByID(id); sb.DiskAllowance != want || sb.DiskStops != 1 {
		t.Errorf("allowance is %s (%d stops), want %s", sb.DiskAllowance, sb.DiskStops, want)
	}
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 65 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
}

func TestLowerLimitAppliesFromTheNextStart(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 90 * mib})
	n.Manager.MeasuredLongAgo(id)
	n.Manager.WatchDisks()
	n.Reconfigure(t, func(c *sandbox.Config) { c.Sizes["basic"] = sandbox.Limits{Disk: 20 * mib, Files: 5000} })
	n.Disks.Use(sandbox.DiskUsage{Bytes: 50 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, "")
	mustStop(t, n.Manager, id)
	if sb := mustWake(t, n, id); sb.DiskAllowance.Bytes != (90+64)*mib {
		t.Errorf("allowance is %s", sb.DiskAllowance)
	}
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 65 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
}

func TestDiskOfASnapshotDoesNotCount(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 150 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
	if _, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{}); err != nil {
		t.Fatal(err)
	}
	sb := mustWake(t, n, id) // its disk is empty, above the snapshot
	if sb.Disk != (sandbox.DiskUsage{}) || sb.DiskStops != 0 || sb.DiskAllowance.Bytes != 100*mib {
		t.Errorf("usage %s (%d stops), allowance %s", sb.Disk, sb.DiskStops, sb.DiskAllowance)
	}
}

func TestSandboxThatFillsItsDiskIsStoppedDuringASnapshot(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	release := n.Disks.Block("prefetch")
	snapshotted := make(chan error, 1)
	go func() {
		_, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{})
		snapshotted <- err
	}()
	n.Disks.AwaitBlocked(t, "prefetch")
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 150 * mib})
	n.Manager.WatchDisks()
	expectStopped(t, n, id, sandbox.ReasonDiskLimit)
	release()
	testkit.NoError(t, "the snapshot", testkit.Receive(t, "the snapshot", snapshotted))
	mustWake(t, n, id)
}

func TestRestoredDiskCountsFromNothing(t *testing.T) {
	n := openLimited(t, nil)
	id := create(t, n.Manager, "box").ID
	s, err := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{})
	testkit.NoError(t, "snapshot", err)
	n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 150 * mib})
	n.Manager.WatchDisks()
	if _, err := n.Manager.Restore(t.Context(), id, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if sb := mustWake(t, n, id); sb.DiskAllowance.Bytes != 100*mib || sb.DiskStops != 0 {
		t.Errorf("allowance is %s (%d stops)", sb.DiskAllowance, sb.DiskStops)
	}
}
