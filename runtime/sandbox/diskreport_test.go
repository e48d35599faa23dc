package sandbox_test

import (
	"errors"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// fileBytes is the disk space of a file of a fake Engine.
const fileBytes = 4096

func reportOf(t *testing.T, n *sandboxtest.Node, limit int) sandbox.DiskReport {
	t.Helper()
	r, err := n.Manager.DiskReport(t.Context(), owner, limit)
	testkit.NoError(t, "DiskReport", err)
	return r
}

// freedBy returns what the destruction of each sandbox frees, by name.
func freedBy(r sandbox.DiskReport) map[string]int64 {
	freed := map[string]int64{}
	for _, d := range r.Largest {
		freed[d.Name] = d.Freed
	}
	return freed
}

func TestDiskReportHasTheLargestDisksAsLastMeasured(t *testing.T) {
	n := openLimited(t, nil)
	small, large := create(t, n.Manager, "small"), create(t, n.Manager, "large")
	create(t, n.Manager, "empty")
	other, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: "other", Name: "other"})
	testkit.NoError(t, "Create", err)
	n.Manager.WatchDisks()
	n.Engine.Grow(small.ID, sandbox.DiskUsage{Bytes: 20 * mib, Entries: 1})
	n.Engine.Grow(large.ID, sandbox.DiskUsage{Bytes: 50 * mib, Entries: 1})
	n.Engine.Grow(other.ID, sandbox.DiskUsage{Bytes: 10 * mib, Entries: 1})
	n.Disks.Use(sandbox.DiskUsage{Bytes: 5 * mib})
	before := reportOf(t, n, 2)
	if before.Sandboxes != (sandbox.DiskTotal{Count: 3}) {
		t.Errorf("before a measurement: %+v", before.Sandboxes)
	}
	start := time.Now()
	for _, id := range []sandbox.ID{small.ID, large.ID, other.ID} {
		n.Manager.MeasuredLongAgo(id)
	}
	n.Manager.WatchDisks()
	got := reportOf(t, n, 2)
	for i := range got.Largest {
		if at := got.Largest[i].MeasuredAt; at.Before(start) || at.After(time.Now()) {
			t.Errorf("%s was measured at %v", got.Largest[i].Name, at)
		}
		got.Largest[i].MeasuredAt = time.Time{}
	}
	const used = 85 * mib // by sandboxes and other programs
	testkit.Diff(t, "report", got, sandbox.DiskReport{
		Sandboxes: sandbox.DiskTotal{Count: 3, Bytes: 70 * mib},
		FileSystems: []sandbox.FileSystem{{
			Path: "/disks", Total: 1 << 40, Used: used, Free: 1<<40 - used, Reserve: reserve, Other: 15 * mib,
		}},
		Largest: []sandbox.SandboxDisk{
			{ID: large.ID, Name: "large", State: sandbox.StateRunning, Bytes: 50 * mib, Limit: 100 * mib, Freed: 50 * mib},
			{ID: small.ID, Name: "small", State: sandbox.StateRunning, Bytes: 20 * mib, Limit: 100 * mib, Freed: 20 * mib},
		},
	})
	testkit.NoError(t, "Close", n.Manager.Close(t.Context()))
	n.Restart(t)
	if got := reportOf(t, n, 1).Largest[0]; got.Bytes != 50*mib || !got.MeasuredAt.IsZero() {
		t.Errorf("after a start of the node: %+v", got)
	}
}

func TestSandboxThatSleepsIsMeasuredOnce(t *testing.T) {
	n := openLimited(t, nil)
	asleep, halted := create(t, n.Manager, "asleep").ID, create(t, n.Manager, "stopped").ID
	n.Manager.WatchDisks()
	for _, id := range []sandbox.ID{asleep, halted} {
		n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 50 * mib, Entries: 1})
	}
	mustSleep(t, n.Manager, asleep)
	mustStop(t, n.Manager, halted)
	measured := func() int {
		before := n.Disks.Usages()
		n.Manager.WatchDisks()
		return n.Disks.Usages() - before
	}
	if got := measured(); got != 0 {
		t.Errorf("immediately, %d were measured", got)
	}
	n.Manager.MeasuredLongAgo(asleep)
	n.Manager.MeasuredLongAgo(halted)
	if got := measured(); got != 2 {
		t.Errorf("later, %d were measured", got)
	}
	if got := reportOf(t, n, 2).Sandboxes.Bytes; got != 100*mib {
		t.Errorf("they have %d bytes", got)
	}
	n.Disks.Use(sandbox.DiskUsage{Bytes: mib})
	n.Manager.MeasuredLongAgo(asleep)
	n.Manager.MeasuredLongAgo(halted)
	if got := measured(); got != 0 {
		t.Errorf("again, %d were measured", got)
	}
	expectStates(t, n, []sandbox.ID{asleep, halted}, "asleep stopped")
}

func TestDiskReportHasWhatTheDeletionOfSnapshotsFrees(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	snapshotOf(t, n, id, "used")
	createFrom(t, n, "copy", "used")
	n.Engine.Write(id, "b", "2")
	unused := snapshotOf(t, n, id, "unused")
	r := reportOf(t, n, 10)
	testkit.Diff(t, "snapshots", r.Snapshots, sandbox.DiskTotal{Count: 2, Bytes: 3 * fileBytes})
	testkit.Diff(t, "unused snapshots", r.Unused, sandbox.DiskTotal{Count: 1, Bytes: 2 * fileBytes})
	testkit.Diff(t, "bases", r.Bases, sandbox.DiskTotal{})

	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, unused.ID))
	testkit.Eventually(t, "its files are removed", func() bool { return n.Engine.Snapshots() == 1 })
	testkit.Diff(t, "unused snapshots after their deletion", reportOf(t, n, 10).Unused, sandbox.DiskTotal{})

	// Its sandbox has the files of a deleted snapshot.
	used, err := n.Manager.Snapshot(owner, "used")
	testkit.NoError(t, "Snapshot", err)
	testkit.NoError(t, "DeleteSnapshot", n.Manager.DeleteSnapshot(t.Context(), owner, used.ID))
	r = reportOf(t, n, 10)
	testkit.Diff(t, "snapshots", r.Snapshots, sandbox.DiskTotal{})
	testkit.Diff(t, "bases", r.Bases, sandbox.DiskTotal{Count: 1, Bytes: fileBytes})
	testkit.Diff(t, "freed", freedBy(r), map[string]int64{"box": 0, "copy": fileBytes})
}

func TestDiskReportHasTheBasesOfForks(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2, Names: []string{"x", "y"}})
	testkit.NoError(t, "Fork", err)
	r := reportOf(t, n, 10)
	testkit.Diff(t, "bases", r.Bases, sandbox.DiskTotal{Count: 1, Bytes: fileBytes})
	testkit.Diff(t, "freed while two have the base", freedBy(r), map[string]int64{"box": 0, "x": 0, "y": 0})
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), forks[0].ID))
	testkit.Diff(t, "freed while one has it", freedBy(reportOf(t, n, 10)), map[string]int64{"box": 0, "y": fileBytes})
	snapshotOf(t, n, forks[1].ID, "of-y") // is based on it, too
	testkit.Diff(t, "freed while a snapshot is based on it", freedBy(reportOf(t, n, 10)), map[string]int64{"box": 0, "y": 0})
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), forks[1].ID))
	r = reportOf(t, n, 10)
	testkit.Diff(t, "unused with the base that only they have", r.Unused, sandbox.DiskTotal{Count: 1, Bytes: 2 * fileBytes})
}

// Each backup of a stopped sandbox makes its disk a temporary snapshot that is based on the previous one. Their
// files stay until the sandbox is destroyed, although Disks has no snapshots of those names any more.
func TestDiskReportHasTheLayersOfADisk(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	for range 3 {
		mustWake(t, n, id)
		n.Engine.Write(id, string(sandbox.NewID()), "1")
		stopped(t, n, id)
		_, err := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
		testkit.NoError(t, "Backup", err)
	}
	want := sandbox.DiskTotal{Count: 3, Bytes: (2 + 3 + 4) * fileBytes} // the fake counts the files below, too
	bases := func(what string) {
		t.Helper()
		testkit.Eventually(t, what, func() bool { r := reportOf(t, n, 1); return r.Bases == want && r.Largest[0].Freed == want.Bytes })
	}
	bases("the layers are measured")
	mustWake(t, n, id)
	testkit.Eventually(t, "only the last one is in use", func() bool { return n.Engine.Snapshots() == 1 })
	bases("the layers are counted")
	n.Crash(t, func() {})
	bases("the layers are counted after a start of the node")
	testkit.NoError(t, "Destroy", n.Manager.Destroy(t.Context(), id))
	testkit.Eventually(t, "they are removed", func() bool { return n.Engine.Snapshots() == 0 })
	n.Manager.CollectSnapshots()
	testkit.Diff(t, "bases", reportOf(t, n, 1).Bases, sandbox.DiskTotal{})
	testkit.NoError(t, "Snapshots", n.Store.Snapshots(t.Context(), func(s sandbox.Snapshot) error {
		t.Errorf("the store has %+v", s)
		return nil
	}))
}

func TestDiskOfAStoppedSandboxCountsOnce(t *testing.T) {
	n := openLimited(t, nil)
	id := newDisk(t, n, "box")
	n.Manager.WatchDisks()
	n.Manager.MeasuredLongAgo(id)
	n.Engine.Write(id, "b", "2")
	n.Manager.WatchDisks()
	stopped(t, n, id)
	if got := reportOf(t, n, 1).Sandboxes.Bytes; got != 2*fileBytes {
		t.Errorf("the sandbox has %d bytes", got)
	}
	snapshotOf(t, n, id, "s")
	testkit.Eventually(t, "the snapshot is measured", func() bool { return reportOf(t, n, 1).Snapshots.Bytes == 2*fileBytes })
	r := reportOf(t, n, 1)
	testkit.Diff(t, "sandboxes", r.Sandboxes, sandbox.DiskTotal{Count: 1})
	testkit.Diff(t, "unused", r.Unused, sandbox.DiskTotal{})
}

func TestDiskReportFailsWithTheFileSystem(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	failure := errors.New("the disk has failed")
	n.Disks.Fail("space", failure)
	if _, err := n.Manager.DiskReport(t.Context(), owner, 1); !errors.Is(err, failure) {
		t.Errorf("error %v", err)
	}
}
