package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// mountAt mounts the bucket data at a path.
func mountAt(t *testing.T, n *sandboxtest.Node, id sandbox.ID, path string) sandbox.Mount {
	t.Helper()
	m, err := n.Manager.Mount(t.Context(), id, sandbox.Mount{Bucket: "data", Prefix: "shared/", Path: path})
	testkit.NoError(t, "Mount", err)
	return m
}

// mounted returns a node, a running sandbox, and the path at which it has the bucket data.
func mounted(t *testing.T) (n *sandboxtest.Node, id sandbox.ID, path string) {
	t.Helper()
	n = sandboxtest.Open(t, nil)
	id = create(t, n.Manager, "box").ID
	path = filepath.Join(t.TempDir(), "data")
	mountAt(t, n, id, path)
	return n, id, path
}

// wantMounts fails unless a sandbox has mounts at these paths, and its record, too.
func wantMounts(t *testing.T, n *sandboxtest.Node, id sandbox.ID, paths ...string) {
	t.Helper()
	if got := slices.Sorted(maps.Keys(n.Buckets.Mounts(id))); !slices.Equal(got, paths) {
		t.Errorf("mounted at %v, want %v", got, paths)
	}
	wantMountsInRecord(t, n, id, paths...)
}

func wantMountsInRecord(t *testing.T, n *sandboxtest.Node, id sandbox.ID, paths ...string) {
	t.Helper()
	sb, _ := n.Manager.ByID(id)
	var got []string
	for _, m := range sb.Mounts {
		got = append(got, m.Path)
	}
	if !slices.Equal(got, paths) {
		t.Errorf("the record has mounts at %v, want %v", got, paths)
	}
}

func TestMountsOutliveStopsAndNodes(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := create(t, n.Manager, "box").ID
	folder := t.TempDir()
	a, b := filepath.Join(folder, "a", "new"), filepath.Join(folder, "b")
	if m := mountAt(t, n, id, b); m.Prefix != "shared" || m.CreatedAt.IsZero() {
		t.Errorf("got %+v", m)
	}
	first := mountAt(t, n, id, a)
	if again := mountAt(t, n, id, a); again != first {
		t.Errorf("the second call returned %+v, want %+v", again, first)
	}
	wantMounts(t, n, id, a, b)

	mustSleep(t, n.Manager, id)
	wantMounts(t, n, id, a, b)
	stopped(t, n, id)
	if mounts := n.Buckets.Mounts(id); len(mounts) != 0 {
		t.Errorf("stopped it has %v", mounts)
	}
	acquire(t, n.Manager, id).Release()
	wantMounts(t, n, id, a, b)

	for state, enter := range map[string]func(){"running": func() {}, "asleep": func() { mustSleep(t, n.Manager, id) }} {
		enter()
		n.Crash(t, n.Buckets.Restart)
		wantMounts(t, n, id, a, b)
		t.Log("the node started again while it was " + state)
	}
	if got := stateOf(t, n.Manager, id); got != sandbox.StateAsleep {
		t.Errorf("mounting again left it %s", got)
	}
	testkit.NoError(t, "Unmount of an asleep sandbox", n.Manager.Unmount(t.Context(), id, a))
	wantMounts(t, n, id, b)
	stopped(t, n, id)
	testkit.NoError(t, "Unmount of a stopped sandbox", n.Manager.Unmount(t.Context(), id, b))
	acquire(t, n.Manager, id).Release()
	wantMounts(t, n, id)
	if err := n.Manager.Unmount(t.Context(), id, b); !errors.Is(err, sandbox.ErrMountNotFound) {
		t.Errorf("the second Unmount returned %v", err)
	}
}

func TestEventsOfMountsHaveADuration(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	testkit.NoError(t, "Unmount", n.Manager.Unmount(t.Context(), id, path))
	events, err := n.Manager.Events(t.Context(), id, 0, 100)
	testkit.NoError(t, "Events", err)
	for _, kind := range []sandbox.EventType{sandbox.EventMounted, sandbox.EventUnmounted} {
		i := slices.IndexFunc(events, func(e sandbox.Event) bool { return e.Type == kind })
		if i < 0 || events[i].Path != path || events[i].DurationMS <= 0 {
			t.Errorf("the event %s is missing or incomplete in %+v", kind, events)
		}
	}
}

func TestForksHaveTheMounts(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := newDisk(t, n, "box")
	path := filepath.Join(t.TempDir(), "data")
	mountAt(t, n, id, path)
	forks, err := n.Manager.Fork(t.Context(), id, sandbox.ForkRequest{Count: 2})
	testkit.NoError(t, "Fork", err)
	for _, fork := range forks {
		wantMounts(t, n, fork.ID, path)
	}
}

// A program that runs without its bucket would write to the disk of the sandbox.
func TestSandboxDoesNotStartWithoutItsBuckets(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	stopped(t, n, id)
	n.Buckets.Fail("mount", sandbox.ErrBucketNotFound)
	_, err := n.Manager.Acquire(t.Context(), id, sandbox.CauseExec)
	if !errors.Is(err, sandbox.ErrBucketNotFound) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if got := stateOf(t, n.Manager, id); got != sandbox.StateStopped {
		t.Errorf("it is %s", got)
	}
	testkit.NoError(t, "Unmount", n.Manager.Unmount(t.Context(), id, path))
	acquire(t, n.Manager, id).Release()
}

func TestSandboxThatCannotBeMountedAgainHasACondition(t *testing.T) {
	t.Parallel()
	n, id, _ := mounted(t)
	n.Crash(t, func() { n.Buckets.Fail("mount", errors.New("no device")) })
	if sb, _ := n.Manager.ByID(id); sb.Condition.Code != sandbox.ConditionMountFailed || !strings.Contains(sb.Condition.Message, "no device") {
		t.Errorf("got %+v", sb.Condition)
	}
	n.Buckets.Fail("mount", nil)
}

// A warm wake must not let its programs run without a bucket, either.
func TestSandboxDoesNotWakeWithoutItsBuckets(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	mustSleep(t, n.Manager, id)
	failed := errors.New("no device")
	n.Crash(t, func() { n.Buckets.Restart(); n.Buckets.Fail("mount", failed) })
	if _, err := n.Manager.Acquire(t.Context(), id, sandbox.CauseExec); !errors.Is(err, failed) {
		t.Errorf("the wake returned %v", err)
	}
	if got := stateOf(t, n.Manager, id); got != sandbox.StateAsleep {
		t.Errorf("it is %s", got)
	}
	n.Buckets.Fail("mount", nil)
	acquire(t, n.Manager, id).Release()
	wantMounts(t, n, id, path)
	if sb, _ := n.Manager.ByID(id); sb.Condition.Code != "" {
		t.Errorf("it has the condition %+v", sb.Condition)
	}
}

func TestFailedMountIsNotLeft(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := create(t, n.Manager, "box").ID
	n.Buckets.FailOnce("mounted", context.DeadlineExceeded)
	_, err := n.Manager.Mount(t.Context(), id, sandbox.Mount{Bucket: "data", Path: filepath.Join(t.TempDir(), "data")})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	wantMounts(t, n, id)
}

// Programs must not write to the folder below a mount that has ended.
func TestMountThatHasEndedStaysUntilItIsMountedAgain(t *testing.T) {
	t.Parallel()
	n, id, _ := mounted(t)
	n.Crash(t, func() {
		n.Buckets.Restart()
		n.Buckets.Fail("mount", sandbox.ErrBucketNotFound)
		n.Buckets.Fail("unmount", errors.New("it was unmounted"))
	})
	sb, _ := n.Manager.ByID(id)
	if sb.Condition.Code != sandbox.ConditionMountFailed || strings.Contains(sb.Condition.Message, "it was unmounted") {
		t.Errorf("the condition: %+v", sb.Condition)
	}
	n.Buckets.Fail("mount", nil)
	n.Buckets.Fail("unmount", nil)
}

// The file system may have ended before the unmount failed.
func TestMountWhoseUnmountFailedIsMountedAgain(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	failed := errors.New("the folder was moved")
	n.Buckets.FailOnce("unmount", failed)
	if err := n.Manager.Unmount(t.Context(), id, path); !errors.Is(err, failed) {
		t.Errorf("got %v", err)
	}
	n.Buckets.Restart()
	mustSleep(t, n.Manager, id)
	acquire(t, n.Manager, id).Release()
	wantMounts(t, n, id, path)
}

func TestUnmountOfAMissingBucketEndsTheCondition(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	n.Crash(t, func() { n.Buckets.Restart(); n.Buckets.Fail("mount", errors.New("no device")) })
	testkit.NoError(t, "Unmount", n.Manager.Unmount(t.Context(), id, path))
	if sb, _ := n.Manager.ByID(id); sb.Condition.Code != "" {
		t.Errorf("it has the condition %+v", sb.Condition)
	}
	mustSleep(t, n.Manager, id)
	acquire(t, n.Manager, id).Release()
}

func TestMountFailureDoesNotHideAnotherCondition(t *testing.T) {
	t.Parallel()
	n, id, _ := mounted(t)
	n.Crash(t, func() {
		n.Buckets.Fail("mount", errors.New("no device"))
		n.Uplink.Fail("attach", errors.New("no network"))
	})
	if sb, _ := n.Manager.ByID(id); sb.Condition.Code != sandbox.ConditionNetworkLost {
		t.Errorf("got %+v", sb.Condition)
	}
}

func TestLostMountsAreMountedAgain(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	running, asleep := create(t, n.Manager, "running").ID, create(t, n.Manager, "asleep").ID
	folder := t.TempDir()
	path, unmounted := filepath.Join(folder, "data"), filepath.Join(folder, "unmounted")
	for _, id := range []sandbox.ID{running, asleep} {
		mountAt(t, n, id, path)
		mountAt(t, n, id, unmounted)
		testkit.NoError(t, "Unmount", n.Manager.Unmount(t.Context(), id, unmounted))
	}
	mustSleep(t, n.Manager, asleep)

	n.Buckets.Fail("mount", errors.New("no device"))
	n.Buckets.Lose()
	for _, id := range []sandbox.ID{running, asleep} {
		testkit.Eventually(t, "the loss is a condition", func() bool {
			sb, _ := n.Manager.ByID(id)
			return sb.Condition.Code == sandbox.ConditionMountFailed && strings.Contains(sb.Condition.Message, "no device")
		})
	}
	n.Buckets.Fail("mount", nil)
	n.Buckets.Lose() // it does not wait for the next attempt
	for _, id := range []sandbox.ID{running, asleep} {
		testkit.Eventually(t, "the buckets are mounted and the condition has ended", func() bool {
			sb, _ := n.Manager.ByID(id)
			return len(n.Buckets.Mounts(id)) == 1 && sb.Condition.Code == ""
		})
		wantMounts(t, n, id, path)
	}
	if got := stateOf(t, n.Manager, asleep); got != sandbox.StateAsleep {
		t.Errorf("mounting again left it %s", got)
	}
}

// A wake that is faster than the report of a loss mounts the buckets first.
func TestWakeAfterALossMountsTheBuckets(t *testing.T) {
	t.Parallel()
	n, id, path := mounted(t)
	mustSleep(t, n.Manager, id)
	n.Buckets.End()
	acquire(t, n.Manager, id).Release()
	wantMounts(t, n, id, path)
}

// The report of a loss is only about mounts of before.
func TestMountAfterALossIsNotMountedAgain(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := create(t, n.Manager, "box").ID
	folder := t.TempDir()
	before, after := filepath.Join(folder, "before"), filepath.Join(folder, "later")
	mountAt(t, n, id, before)
	release := n.Buckets.Block("mount")
	mounted := make(chan error, 1)
	go func() {
		_, err := n.Manager.Mount(t.Context(), id, sandbox.Mount{Bucket: "data", Path: after})
		mounted <- err
	}()
	n.Buckets.AwaitBlocked(t, "mount")
	n.Buckets.End()
	n.Buckets.Report()
	release()
	testkit.NoError(t, "Mount", testkit.Receive(t, "the mount", mounted))
	testkit.Eventually(t, "the lost bucket is mounted", func() bool { return len(n.Buckets.Mounts(id)) == 2 })
	n.Buckets.Report() // a second one, after the first was handled
	n.Buckets.Report()
	mustSleep(t, n.Manager, id)
	acquire(t, n.Manager, id).Release() // which mounts what is missing
	if got := n.Buckets.MountCalls(); got != 3 {
		t.Errorf("%d mounts were made, want 3", got)
	}
	wantMounts(t, n, id, before, after)
}

func TestFailedMountChangesNothing(t *testing.T) {
	failed := errors.New("failed")
	for _, operation := range []string{"check", "mount"} {
		t.Run(operation, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			id := create(t, n.Manager, "box").ID
			n.Buckets.FailOnce(operation, failed)
			path := filepath.Join(t.TempDir(), "data")
			if _, err := n.Manager.Mount(t.Context(), id, sandbox.Mount{Bucket: "data", Path: path}); !errors.Is(err, failed) {
				t.Errorf("got %v", err)
			}
			wantMounts(t, n, id)
			mountAt(t, n, id, path)
			n.Buckets.FailOnce("unmount", failed)
			if err := n.Manager.Unmount(t.Context(), id, path); !errors.Is(err, failed) {
				t.Errorf("got %v", err)
			}
			wantMounts(t, n, id, path)
		})
	}
}

func TestMountsAreRefused(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	id := create(t, n.Manager, "box").ID
	folder := t.TempDir()
	path := filepath.Join(folder, "data")
	mountAt(t, n, id, path)
	for name, c := range map[string]struct {
		mount sandbox.Mount
		want  string
	}{
		"unknown bucket":     {sandbox.Mount{Bucket: "other", Path: "/x"}, "use data, models"},
		"no bucket":          {sandbox.Mount{Path: "/x"}, "use data, models"},
		"relative path":      {sandbox.Mount{Bucket: "data", Path: "x"}, "absolute"},
		"path with ..":       {sandbox.Mount{Bucket: "data", Path: "/x/../y"}, "absolute"},
		"root":               {sandbox.Mount{Bucket: "data", Path: "/"}, "mount point"},
		"proc":               {sandbox.Mount{Bucket: "data", Path: "/proc/x"}, "mount point"},
		"own folder":         {sandbox.Mount{Bucket: "data", Path: "/.doze"}, "mount point"},
		"zero byte":          {sandbox.Mount{Bucket: "data", Path: "/x\x00"}, "UTF-8"},
		"long path":          {sandbox.Mount{Bucket: "data", Path: "/" + strings.Repeat("x", 4095)}, "4096 bytes"},
		"absolute prefix":    {sandbox.Mount{Bucket: "data", Path: "/x", Prefix: "/a"}, "folder in a bucket"},
		"prefix with ..":     {sandbox.Mount{Bucket: "data", Path: "/x", Prefix: "../a"}, "folder in a bucket"},
		"prefix is ..":       {sandbox.Mount{Bucket: "data", Path: "/x", Prefix: ".."}, "folder in a bucket"},
		"prefix with //":     {sandbox.Mount{Bucket: "data", Path: "/x", Prefix: "a//b"}, "folder in a bucket"},
		"long prefix":        {sandbox.Mount{Bucket: "data", Path: "/x", Prefix: strings.Repeat("x", 513)}, "513 bytes"},
		"another bucket":     {sandbox.Mount{Bucket: "models", Path: path}, sandbox.ErrMountExists.Error()},
		"below a mount":      {sandbox.Mount{Bucket: "data", Path: path + "/below"}, sandbox.ErrMountExists.Error()},
		"above a mount":      {sandbox.Mount{Bucket: "data", Path: folder}, sandbox.ErrMountExists.Error()},
		"a file in the path": {sandbox.Mount{Bucket: "data", Path: "/etc/passwd/x"}, sandbox.ErrNoMountPoint.Error()},
	} {
		if _, err := n.Manager.Mount(t.Context(), id, c.mount); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
	wantMounts(t, n, id, path)
	for i := range 15 {
		mountAt(t, n, id, filepath.Join(folder, fmt.Sprint("more-", i)))
	}
	if _, err := n.Manager.Mount(t.Context(), id, sandbox.Mount{Bucket: "data", Path: folder + "/last"}); err == nil || !strings.Contains(err.Error(), "16 mounts") {
		t.Errorf("the 17th mount: %v", err)
	}
}
