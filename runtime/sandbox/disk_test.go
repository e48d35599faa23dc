package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// hang makes an operation of the store hang until finish, and then return an
// error; reached is closed when the first call does.
func hang(t *testing.T, n *sandboxtest.Node, id sandbox.ID, operation string, then error) (reached <-chan struct{}, finish func()) {
	t.Helper()
	// Earlier changes are written earlier.
	if _, err := n.Manager.Events(t.Context(), id, 0, 1); err != nil {
		t.Fatal(err)
	}
	in, out := make(chan struct{}), make(chan struct{})
	var once, end sync.Once
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op != operation {
			return nil
		}
		once.Do(func() { close(in) })
		<-out
		return then
	})
	finish = func() { end.Do(func() { close(out) }) }
	t.Cleanup(finish)
	return in, finish
}

func TestFailedWriteThatReachedTheDiskIsReverted(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Events(t.Context(), sb.ID, 0, 1); err != nil { // nothing else waits to be written
		t.Fatal(err)
	}
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op == "after_put" {
			return syscall.EIO // as a sync that fails
		}
		return nil
	})
	if _, err := n.Manager.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000}); !errors.Is(err, syscall.EIO) {
		t.Fatalf("expose: %v", err)
	}
	if got, _ := n.Manager.ByID(sb.ID); len(got.Ports) != 0 {
		t.Errorf("the sandbox has a port that was refused: %+v", got.Ports)
	}
	n.Store.Hook(nil)
	testkit.Eventually(t, "it is gone from the disk", func() bool { return len(n.Store.Record(t, sb.ID).Ports) == 0 })
}

func TestContainerWithoutDiskSpaceIsErrStoreFull(t *testing.T) {
	for _, call := range []string{"create", "start"} {
		t.Run(call, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			n.Engine.Fail(call, syscall.ENOSPC)
			if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"}); !errors.Is(err, sandbox.ErrStoreFull) {
				t.Errorf("got %v", err)
			}
			if count := n.Engine.Count(); count != 0 {
				t.Errorf("%d containers are left", count)
			}
			n.Engine.Fail(call, nil)
			create(t, n.Manager, "app")
		})
	}
}

func TestSlowDiskDoesNotBlockBeyondTheContext(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Crash(t, func() {}) // so that the timeline must be read
	reached, finish := hang(t, n, sb.ID, "last", nil)
	first := make(chan error, 1)
	go func() {
		lease, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
		if err == nil {
			lease.Release()
		}
		first <- err
	}()
	<-reached
	left := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err := n.Manager.Acquire(ctx, sb.ID, sandbox.CausePreview)
		left <- err
	}()
	if err := testkit.Receive(t, "the end of the caller's context", left); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("acquire: %v", err)
	}
	finish()
	if err := <-first; err != nil {
		t.Error(err)
	}
}

func TestUnreadableTimelineIsNotOverwritten(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Crash(t, func() {})
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op == "last" {
			return syscall.EIO
		}
		return nil
	})
	acquire(t, n.Manager, sb.ID).Release()
	n.Store.Hook(nil)
	mustSleep(t, n.Manager, sb.ID)
	events, err := n.Manager.Events(t.Context(), sb.ID, 0, 10)
	var types []sandbox.EventType
	for _, ev := range events {
		types = append(types, ev.Type)
	}
	if want := []sandbox.EventType{sandbox.EventCreated, sandbox.EventSlept, sandbox.EventSlept}; err != nil || !slices.Equal(types, want) {
		t.Errorf("timeline %v, error %v, want %v", types, err, want)
	}
}

// Otherwise it would delay the records of all sandboxes, and fill the node's log.
func TestRecordThatTheStoreRefusesIsWrittenAfterItsNextChange(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op == "put" {
			return &sandbox.InvalidError{Field: "sandbox", Reason: "its record is too large", Want: "make env smaller"}
		}
		return nil
	})
	mustSleep(t, n.Manager, sb.ID)
	n.Log.Await("failed to write a record, which the store refuses")
	n.Store.Hook(nil)
	acquire(t, n.Manager, sb.ID).Release()
	mustSleep(t, n.Manager, sb.ID)
	testkit.Eventually(t, "the next change is written", func() bool { return n.Store.Record(t, sb.ID).State == sandbox.StateAsleep })
	if n.Log.Contains("trying again") {
		t.Error("the record is written again without a change")
	}
}

func TestListDuringARenameShowsItOnce(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "old")
	reached, finish := hang(t, n, sb.ID, "put", nil)
	done := make(chan error, 1)
	go func() {
		name := "new"
		_, err := n.Manager.Update(t.Context(), sb.ID, sandbox.Patch{Name: &name})
		done <- err
	}()
	<-reached
	if list, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0); len(list) != 1 {
		t.Errorf("the list has %d sandboxes, want 1", len(list))
	}
	finish()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if list, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0); len(list) != 1 || list[0].Name != "new" {
		t.Errorf("after the rename the list is %+v", list)
	}
}

func TestFailedHoldDoesNotEndTheGuestsHold(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	reached, finish := hang(t, n, sb.ID, "put", syscall.EIO)
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.Hold(t.Context(), sb.ID, time.Hour)
		done <- err
	}()
	<-reached
	holdAsSandbox(t, n, sb.ID, 2*time.Hour)
	until := nextEvent(t, events, sandbox.EventHeld).Until
	finish()
	if err := <-done; !errors.Is(err, syscall.EIO) {
		t.Errorf("hold: %v", err)
	}
	n.Store.Hook(nil)
	if got, _ := n.Manager.ByID(sb.ID); !got.HoldUntil.Equal(until) {
		t.Errorf("held until %v, want %v", got.HoldUntil, until)
	}
}

func TestHotPathNeedsNoDisk(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Events(t.Context(), sb.ID, 0, 1); err != nil {
		t.Fatal(err)
	}
	n.Store.Close() // from here on it responds to nothing
	acquire(t, n.Manager, sb.ID).Release()
	if _, err := n.Manager.AcquireRunning(sb.ID); err != nil {
		t.Error(err)
	}
	if _, err := n.Manager.Get(owner, "app"); err != nil {
		t.Error(err)
	}
	if list, _ := n.Manager.List(owner, sandbox.Filter{}, "", 0); len(list) != 1 {
		t.Errorf("the list has %d sandboxes", len(list))
	}
}

// A node that ends writes the state of each sandbox; one sync after the other
// could take longer than it is given.
func TestStatesAreWrittenConcurrently(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	var ids []sandbox.ID
	for _, name := range []string{"a", "b", "c", "d"} {
		ids = append(ids, create(t, n.Manager, name).ID)
	}
	n.Store.Fill(true)
	for _, id := range ids {
		mustSleep(t, n.Manager, id)
	}
	var waiting atomic.Int32
	all := make(chan struct{})
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op != "put" {
			return nil
		}
		if waiting.Add(1) == int32(len(ids)) {
			close(all)
		}
		select {
		case <-all:
		case <-time.After(testkit.Patience):
			t.Error("a record is written only after another")
		}
		return nil
	})
	n.Store.Fill(false)
	for _, id := range ids {
		testkit.Eventually(t, "it is written", func() bool { return n.Store.Record(t, id).State == sandbox.StateAsleep })
	}
}
