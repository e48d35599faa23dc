package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// deafen makes a guest unreachable.
func deafen(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	if err := os.Remove(filepath.Join(n.RunDir(id), guest.SocketName)); err != nil {
		t.Fatal(err)
	}
}

func TestUnresponsiveSandboxDoesNotBlockOthersAtStart(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	healthy, unreachable, half := create(t, n.Manager, "healthy"), create(t, n.Manager, "deaf"), create(t, n.Manager, "half")
	var hangs atomic.Bool
	g := hostile(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if hangs.Load() {
			<-r.Context().Done()
			return
		}
		g.ServeHTTP(w, r)
	}))
	slow := create(t, n.Manager, "slow")
	n.Engine.HandleGuest(nil)
	if err := n.Engine.Create(t.Context(), sandbox.ContainerSpec{ID: "orphan000000"}); err != nil {
		t.Fatal(err)
	}
	n.Engine.Fail("remove", syscall.EIO)
	if err := n.Manager.Destroy(t.Context(), half.ID); !errors.Is(err, syscall.EIO) {
		t.Fatalf("destroy: %v", err)
	}
	n.Engine.Fail("stop", syscall.EIO)
	n.Crash(t, func() { deafen(t, n, unreachable.ID); hangs.Store(true) })
	m := n.Manager

	for _, id := range []sandbox.ID{unreachable.ID, slow.ID} {
		mustHaveCondition(t, n, id, sandbox.ConditionUnresponsive, "it has not responded since the node started")
	}
	hangs.Store(false)
	if kind := acquire(t, m, slow.ID).Wake().Kind; kind != sandbox.WakeNone { // adopted meanwhile
		t.Errorf("woke %q", kind)
	}
	mustBeWell(t, n, slow.ID)
	acquire(t, m, healthy.ID).Release()
	if _, err := m.Acquire(t.Context(), half.ID, sandbox.CauseExec); !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("acquire of the half-destroyed one: %v", err)
	}
	n.Engine.Fail("remove", nil)
	if err := m.Destroy(t.Context(), half.ID); err != nil {
		t.Errorf("destroying it again: %v", err)
	}
	testkit.Eventually(t, "the deaf one is given up", func() bool { return stateOf(t, m, unreachable.ID) == sandbox.StateStopped })
	testkit.Eventually(t, "a condition with the reason", func() bool {
		got, _ := m.ByID(unreachable.ID)
		return got.Condition.Code == sandbox.ConditionRecoveryFailed
	})
	n.Engine.Fail("stop", nil)
	testkit.Eventually(t, "its container is stopped", func() bool {
		c, err := n.Engine.Inspect(t.Context(), unreachable.ID)
		return err == nil && c.State == sandbox.ContainerExited
	})
	acquire(t, m, unreachable.ID).Release()
	mustBeWell(t, n, unreachable.ID)
}

func TestSleepingSandboxWithUnusableGuestIsStartedAgain(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, func(cfg *sandbox.Config) { cfg.WakeTimeout = 5 * time.Second })
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Crash(t, func() { deafen(t, n, sb.ID) })
	lease := acquire(t, n.Manager, sb.ID)
	defer lease.Release()
	if kind := lease.Wake().Kind; kind != sandbox.WakeCold {
		t.Errorf("wake %q, want a cold one", kind)
	}
}

func TestSandboxThatNeitherStopsNorFreezesIsRunning(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Engine.Fail("stop", syscall.EIO)
	n.Freezer.Fail("freeze", syscall.EBUSY)
	if _, err := n.Manager.Stop(t.Context(), sb.ID); !errors.Is(err, syscall.EIO) || !errors.Is(err, syscall.EBUSY) {
		t.Errorf("stop: %v", err)
	}
	n.Freezer.Fail("freeze", nil)
	if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateRunning {
		t.Errorf("its processes run and its state is %s", s)
	}
	mustSleep(t, n.Manager, sb.ID)
}

// The timer of stop_after fires while the sandbox is just being woken.
func TestStopAfterDoesNotStopAWokenSandbox(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	mustSleep(t, m, sb.ID)
	slept, _ := m.ByID(sb.ID)
	n.Engine.Fail("stop", syscall.EIO)
	release := n.Engine.Block("stop")
	go m.Stop(t.Context(), sb.ID) // has the transition lock until release, and fails
	n.Engine.AwaitBlocked(t, "stop")
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		if lease, err := m.Acquire(ctx, sb.ID, sandbox.CausePreview); err == nil {
			lease.Release()
		}
	}()
	testkit.Eventually(t, "a waiter for the wake", func() bool { return m.Info(t.Context()).Waiters == 1 })
	cancel()
	<-left
	update(t, m, sb.ID, sandbox.Patch{StopAfter: &second}) // the timer comes after the wake
	testkit.Eventually(t, "stop_after passes", func() bool { return time.Since(slept.StateSince) > 1500*time.Millisecond })
	n.Engine.Fail("stop", nil)
	release()
	testkit.Eventually(t, "it woke", func() bool { return stateOf(t, m, sb.ID) != sandbox.StateAsleep })
	mustSleep(t, m, sb.ID) // in its turn, after the timer
}

func TestDestroyEndsACreation(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	release := n.Engine.Block("image")
	defer release()
	made := make(chan error, 1)
	go func() {
		_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
		made <- err
	}()
	n.Engine.AwaitBlocked(t, "image")
	sb, err := n.Manager.Get(owner, "app")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Manager.Destroy(testkit.Context(t), sb.ID); err != nil {
		t.Errorf("destroy: %v", err)
	}
	if err := <-made; !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("create: %v", err)
	}
	if _, err := n.Manager.Get(owner, "app"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
}

func TestFailedCreationThatCannotBeRemovedEndsItsSubscriptions(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	release := n.Engine.Block("image")
	n.Engine.Fail("create", syscall.EIO)
	n.Engine.Fail("remove", syscall.EIO)
	made := make(chan error, 1)
	go func() {
		_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
		made <- err
	}()
	n.Engine.AwaitBlocked(t, "image")
	sb, err := n.Manager.Get(owner, "app")
	if err != nil {
		t.Fatal(err)
	}
	events := subscribe(t, n.Manager, sb.ID)
	release()
	if err := <-made; !errors.Is(err, syscall.EIO) {
		t.Errorf("create: %v", err)
	}
	select {
	case ev, open := <-events:
		if open {
			t.Errorf("got %+v, want the end", ev)
		}
	case <-time.After(testkit.Patience):
		t.Error("the subscription does not end")
	}
}

func TestCloseFailsWaitersWithErrClosed(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	release := n.Engine.Block("start")
	defer release()
	woken := make(chan error, 1)
	go func() {
		_, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
		woken <- err
	}()
	n.Engine.AwaitBlocked(t, "start")
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-woken; !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("acquire: %v", err)
	}
}

func TestFreezeThatFailsHalfWayLeavesItThawed(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Freezer.Fail("after_freeze", syscall.ETIMEDOUT)
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("sleep: %v", err)
	}
	n.Freezer.Fail("after_freeze", nil)
	if frozen, err := n.Freezer.Frozen(t.Context(), sb.ID); err != nil || frozen {
		t.Errorf("it is %s and frozen: %v, error %v", stateOf(t, n.Manager, sb.ID), frozen, err)
	}
}

func TestStopOfAVanishedContainerStops(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Crash(t, func() {}) // adopted asleep, its guest has no watcher
	if err := n.Engine.Remove(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := n.Manager.Stop(t.Context(), sb.ID); err != nil || got.State != sandbox.StateStopped {
		t.Errorf("stop: state %s, error %v", got.State, err)
	}
	acquire(t, n.Manager, sb.ID).Release()
}

func TestManagerClosesAfterAnAbandonedStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	var ids []sandbox.ID
	for i := range 10 { // more than are recovered concurrently
		ids = append(ids, create(t, n.Manager, fmt.Sprintf("deaf-%d", i)).ID)
	}
	n.Crash(t, func() {})
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		deafen(t, n, id)
	}
	m := n.Unstarted(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := m.Start(ctx, n.Uplink); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("start: %v", err)
	}
	if err := m.Close(testkit.Context(t)); err != nil {
		t.Errorf("close: %v", err)
	}
}

// The folder may hold what the node's user may not remove.
func TestEngineRemovesTheRunFolder(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	destroyed := create(t, n.Manager, "app")
	litter := func(id sandbox.ID) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(n.RunDir(id), "d", "f"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	there := func(id sandbox.ID) bool {
		_, err := os.Lstat(n.RunDir(id))
		return err == nil
	}
	refused := errors.New("not yet")
	n.Engine.Fail("remove_folder", refused)
	litter(destroyed.ID)
	if err := n.Manager.Destroy(t.Context(), destroyed.ID); !errors.Is(err, refused) {
		t.Errorf("the engine was not asked: %v", err)
	}
	n.Engine.Fail("remove_folder", nil)
	if err := n.Manager.Destroy(t.Context(), destroyed.ID); err != nil || there(destroyed.ID) {
		t.Errorf("Destroy again: %v, its folder exists: %v", err, there(destroyed.ID))
	}
}
