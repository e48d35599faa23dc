package sandbox_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// The fake has 1 TiB: the reserve is 2 GiB, and the shortage ends at 2.5 GiB. It has 100,000,000
// inodes: 100,000 are reserved.
const reserve = 2 << 30

// openUnlimited opens a node whose sandboxes have no limits of their own.
func openUnlimited(t *testing.T) *sandboxtest.Node {
	t.Helper()
	return sandboxtest.Open(t, func(c *sandbox.Config) { c.Sizes["basic"] = sandbox.Limits{} })
}

// setFree makes programs outside the sandboxes use all but this many bytes.
func setFree(n *sandboxtest.Node, free int64) {
	spaces, _ := n.Disks.Space()
	n.Disks.Use(sandbox.DiskUsage{Bytes: spaces[0].Free.Bytes - free})
}

func TestSandboxThatGrewMostIsStoppedWhenTheDiskIsShort(t *testing.T) {
	for _, files := range []bool{false, true} {
		n := openUnlimited(t)
		usage := func(part int64) sandbox.DiskUsage {
			if files {
				return sandbox.DiskUsage{Entries: part * 1000}
			}
			return sandbox.DiskUsage{Bytes: part * 16 * mib}
		}
		ids := []sandbox.ID{}
		for _, name := range []string{"idle", "small", "most", "asleep"} {
			ids = append(ids, create(t, n.Manager, name).ID)
		}
		n.Engine.Grow(ids[3], usage(9000))
		mustSleep(t, n.Manager, ids[3])
		n.Manager.WatchDisks()
		if files {
			spaces, _ := n.Disks.Space()
			n.Disks.Use(sandbox.DiskUsage{Entries: spaces[0].Free.Entries - 100_000})
		} else {
			setFree(n, reserve)
		}
		events := subscribe(t, n.Manager, ids[2])
		n.Manager.WatchDisks()
		if err := n.Manager.CheckSpace(); err != nil {
			t.Errorf("with the reserve: %v", err)
		}
		n.Engine.Grow(ids[1], usage(1))
		n.Engine.Grow(ids[2], usage(3))
		n.Manager.WatchDisks()
		expectStates(t, n, ids, "running running stopped asleep")
		ev := nextEvent(t, events, sandbox.EventStopped)
		want := "/disks had 1.9 GiB free; the reserve is 2.0 GiB; of all running sandboxes, this one had grown the most: by 48 MiB"
		if files {
			want = "/disks had 96000 free inodes; the reserve is 100000; of all running sandboxes, this one had grown the most: by 3001 files"
		}
		if ev.Reason != sandbox.ReasonDiskPressure || ev.Detail != want {
			t.Errorf("event %+v; want the detail %q", ev, want)
		}
		// Free space is still low. The node stops another sandbox only when that sandbox grows.
		for range 3 {
			n.Manager.WatchDisks()
		}
		expectStates(t, n, ids, "running running stopped asleep")
		n.Engine.Grow(ids[0], usage(2))
		n.Manager.WatchDisks()
		expectStates(t, n, ids, "stopped running stopped asleep")
		if got := counted(t, n, "doze_disk_stops_total", "disk_pressure"); got != 2 {
			t.Errorf("%v stops are counted", got)
		}
		// A stopped sandbox can start again, so that files can be deleted.
		mustWake(t, n, ids[2])
		n.Manager.WatchDisks()
		expectStates(t, n, ids, "stopped running running asleep")
	}
}

func TestWritesByOtherProgramsStopNoSandbox(t *testing.T) {
	n := openUnlimited(t)
	id := create(t, n.Manager, "box").ID
	n.Manager.WatchDisks()
	setFree(n, reserve-1)
	for range 3 {
		n.Disks.Use(sandbox.DiskUsage{Bytes: 100 * mib})
		n.Engine.Grow(id, sandbox.DiskUsage{Bytes: 15 * mib}) // below minDiskGrowth
		n.Manager.WatchDisks()
	}
	expectStopped(t, n, id, "")
	if got := strings.Count(n.Log.String(), "no running sandbox has grown"); got != 1 {
		t.Errorf("the log has it %d times", got)
	}
}

func TestShortDiskRefusesWhatNeedsSpace(t *testing.T) {
	n := openUnlimited(t)
	id := create(t, n.Manager, "box").ID
	refuses := func(want bool) {
		t.Helper()
		_, _, created := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "new"})
		_, snapshot := n.Manager.CreateSnapshot(t.Context(), id, sandbox.SnapshotRequest{})
		_, forked := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 1})
		_, backup := n.Manager.Backup(t.Context(), id, sandbox.BackupRequest{}, nil)
		for what, err := range map[string]error{"create": created, "snapshot": snapshot, "fork": forked, "backup": backup, "check": n.Manager.CheckSpace(), "upload": n.Manager.CheckUpload()} {
			if errors.Is(err, sandbox.ErrStoreFull) != want || want && !strings.Contains(err.Error(), "/disks had 2.0 GiB free; the reserve is 2.0 GiB") {
				t.Errorf("%s: %v", what, err)
			}
		}
		if got := counted(t, n, "doze_disk_short", ""); got != 0 != want {
			t.Errorf("the metric is %v", got)
		}
	}
	setFree(n, reserve-4096)
	n.Manager.WatchDisks()
	refuses(true)
	// Existing sandboxes go on: they are found, sleep, wake, stop and start.
	if sb, created, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "box"}); err != nil || created || sb.ID != id {
		t.Errorf("the existing one: %v, %v", created, err)
	}
	mustSleep(t, n.Manager, id)
	mustWake(t, n, id)
	mustStop(t, n.Manager, id)
	mustWake(t, n, id)
	setFree(n, reserve/4*5-4096)
	n.Manager.WatchDisks()
	if err := n.Manager.CheckSpace(); err == nil {
		t.Error("CheckSpace succeeded before a quarter more than the reserve was free")
	}
	setFree(n, reserve/4*5)
	testkit.NoError(t, "CheckSpace, after space was freed", n.Manager.CheckSpace())
	n.Manager.WatchDisks()
	refuses(false)
	if log := n.Log.String(); strings.Count(log, "free disk space fell below the reserve") != 1 || strings.Count(log, "free disk space recovered") != 1 {
		t.Errorf("the log: %s", log)
	}
}

// Uploads do not need the disk of the node's own data.
func TestShortDiskWithoutSandboxesRefusesNoUploads(t *testing.T) {
	n := openUnlimited(t)
	n.Disks.SetApart()
	setFree(n, reserve-4096)
	n.Manager.WatchDisks()
	if err := n.Manager.CheckSpace(); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("CheckSpace: %v", err)
	}
	testkit.NoError(t, "CheckUpload", n.Manager.CheckUpload())
}

func TestReserveIsConfigured(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.DiskReserve = 100 << 30 })
	setFree(n, 100<<30-4096)
	n.Manager.WatchDisks()
	if err := n.Manager.CheckSpace(); err == nil || !strings.Contains(err.Error(), "the reserve is 100 GiB") {
		t.Errorf("got %v", err)
	}
}

// The measurement of a large disk does not delay the relief of a shortage.
func TestShortageInterruptsAMeasurement(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) {
		c.Sizes["basic"] = sandbox.Limits{Disk: 100 * mib}
		c.DiskInterval = time.Millisecond
	})
	slow := create(t, n.Manager, "slow").ID
	release := n.Disks.Block("usage")
	defer release()
	n.Disks.Use(sandbox.DiskUsage{Bytes: 200 * mib})
	n.Disks.AwaitBlocked(t, "usage")
	setFree(n, reserve-100*mib)
	n.Log.Await("free disk space fell below the reserve")
	release() // of the relief's own measurement
	n.Log.Await("no running sandbox has grown")
	expectStopped(t, n, slow, "")
}

func TestCloseInterruptsAMeasurement(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) {
		c.Sizes["basic"] = sandbox.Limits{Disk: 100 * mib}
		c.DiskInterval = time.Millisecond
	})
	create(t, n.Manager, "box")
	release := n.Disks.Block("usage")
	defer release()
	n.Disks.Use(sandbox.DiskUsage{Bytes: 200 * mib})
	n.Disks.AwaitBlocked(t, "usage")
	testkit.NoError(t, "Close", n.Manager.Close(t.Context()))
}
