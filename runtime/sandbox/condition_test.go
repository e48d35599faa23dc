package sandbox_test

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// mustHaveCondition checks the condition of a sandbox, in memory and on disk.
func mustHaveCondition(t *testing.T, n *sandboxtest.Node, id sandbox.ID, code sandbox.ConditionCode, words string) sandbox.Sandbox {
	t.Helper()
	got, _ := n.Manager.ByID(id)
	if c := got.Condition; c.Code != code || !strings.Contains(c.Message, words) || c.Since.IsZero() || time.Since(c.Since) < 0 {
		t.Errorf("it is %s; its condition is %+v, want %s: %q", got.State, c, code, words)
	}
	testkit.Eventually(t, "the condition is on disk", func() bool { return n.Store.Record(t, id).Condition == got.Condition })
	return got
}

func mustBeWell(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	if got, _ := n.Manager.ByID(id); got.Condition != (sandbox.Condition{}) {
		t.Errorf("it is %s; its condition is %+v, want none", got.State, got.Condition)
	}
	testkit.Eventually(t, "that is on disk", func() bool { return n.Store.Record(t, id).Condition == sandbox.Condition{} })
}

func TestConditionLastsAsLongAsTheFault(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustBeWell(t, n, sb.ID)
	for _, c := range []struct {
		name    string
		spoil   func()
		try     func() error
		code    sandbox.ConditionCode
		words   string
		mend    func()
		succeed func()
	}{{
		name:    "a sleep that fails",
		spoil:   func() { n.Freezer.Fail("freeze", syscall.EBUSY) },
		try:     func() error { _, err := n.Manager.Sleep(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionSleepFailed,
		words:   "freeze " + string(sb.ID) + ": device or resource busy",
		mend:    func() { n.Freezer.Fail("freeze", nil) },
		succeed: func() { mustSleep(t, n.Manager, sb.ID) },
	}, {
		name:    "a stop that fails asleep",
		spoil:   func() { n.Engine.Fail("stop", sandbox.ErrEngineDown) },
		try:     func() error { _, err := n.Manager.Stop(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionStopFailed,
		words:   "stop " + string(sb.ID) + ": the container engine does not respond",
		mend:    func() { n.Engine.Fail("stop", nil) },
		succeed: func() { acquire(t, n.Manager, sb.ID).Release(); mustSleep(t, n.Manager, sb.ID) },
	}, {
		name:    "a warm wake that fails",
		spoil:   func() { n.Freezer.Fail("thaw", syscall.EIO) },
		try:     func() error { _, err := n.Manager.Wake(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionWakeFailed,
		words:   "thaw " + string(sb.ID) + ": input/output error",
		mend:    func() { n.Freezer.Fail("thaw", nil) },
		succeed: func() { acquire(t, n.Manager, sb.ID).Release() },
	}, {
		name:    "a stop that fails",
		spoil:   func() { n.Engine.Fail("stop", sandbox.ErrEngineDown) },
		try:     func() error { _, err := n.Manager.Stop(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionStopFailed,
		words:   "the container engine does not respond",
		mend:    func() { n.Engine.Fail("stop", nil) },
		succeed: func() { mustStop(t, n.Manager, sb.ID) },
	}, {
		name:    "a start that fails",
		spoil:   func() { n.Engine.Fail("start", sandbox.ErrEngineDown) },
		try:     func() error { _, err := n.Manager.Wake(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionWakeFailed,
		words:   "start its container: the container engine does not respond; it last wrote: " + sandboxtest.LastLog,
		mend:    func() { n.Engine.Fail("start", nil) },
		succeed: func() { acquire(t, n.Manager, sb.ID).Release(); mustStop(t, n.Manager, sb.ID) },
	}, {
		name:    "a guest that is refused",
		spoil:   func() { n.Engine.HandleGuest(sandboxtest.UnknownGuest) },
		try:     func() error { _, err := n.Manager.Wake(t.Context(), sb.ID); return err },
		code:    sandbox.ConditionWakeFailed,
		words:   "speaks protocol",
		mend:    func() { n.Engine.HandleGuest(nil) },
		succeed: func() { acquire(t, n.Manager, sb.ID).Release() },
	}} {
		c.spoil()
		if err := c.try(); err == nil {
			t.Errorf("%s: it did not fail", c.name)
		}
		first := mustHaveCondition(t, n, sb.ID, c.code, c.words)
		if err := c.try(); err == nil {
			t.Errorf("%s: it did not fail", c.name)
		}
		if again := mustHaveCondition(t, n, sb.ID, c.code, c.words); !again.Condition.Since.Equal(first.Condition.Since) {
			t.Errorf("%s: its condition is since %v, and was since %v", c.name, again.Condition.Since, first.Condition.Since)
		}
		c.mend()
		c.succeed()
		mustBeWell(t, n, sb.ID)
	}
}

func TestConditionOutlivesTheNode(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	n.Engine.Fail("start", syscall.EIO)
	if _, err := n.Manager.Wake(t.Context(), sb.ID); err == nil {
		t.Error("it woke")
	}
	before := mustHaveCondition(t, n, sb.ID, sandbox.ConditionWakeFailed, "input/output error")
	n.Crash(t, func() {})
	if after := mustHaveCondition(t, n, sb.ID, sandbox.ConditionWakeFailed, "input/output error"); !after.Condition.Since.Equal(before.Condition.Since) {
		t.Errorf("since %v, want %v", after.Condition.Since, before.Condition.Since)
	}
	n.Engine.Fail("start", nil)
	acquire(t, n.Manager, sb.ID).Release()
	mustBeWell(t, n, sb.ID)
}

func TestConditionOfASandboxThatIsNotAdopted(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	stranger := becomeUnknown(n)
	sb := create(t, n.Manager, "app")
	n.Crash(t, func() { stranger.Store(true) })
	got := mustHaveCondition(t, n, sb.ID, sandbox.ConditionRecoveryFailed, "could not be adopted")
	if got.State != sandbox.StateStopped || got.StateReason != sandbox.ReasonRecoveryFailed || !strings.Contains(got.Condition.Message, "speaks protocol") {
		t.Errorf("it is %s (%s): %+v", got.State, got.StateReason, got.Condition)
	}
	n.Engine.HandleGuest(nil)
	acquire(t, n.Manager, sb.ID).Release()
	mustBeWell(t, n, sb.ID)
}

// A container that cannot be ended is a condition until it has ended.
func TestConditionOfALeftover(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	n.Engine.Fail("stop", sandbox.ErrEngineDown)
	n.Engine.Kill(t, sb.ID)
	nextEvent(t, events, sandbox.EventStopped)
	testkit.Eventually(t, "its end is tried", func() bool { return n.Manager.Armed(sb.ID) })
	mustHaveCondition(t, n, sb.ID, sandbox.ConditionStopIncomplete, "cannot be ended: the container engine does not respond")
	n.Engine.Fail("stop", nil)
	n.Manager.RunCheck(sb.ID)
	mustBeWell(t, n, sb.ID)
}

func TestConditionOfAFailedDestruction(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Engine.Fail("remove", sandbox.ErrEngineDown)
	if err := n.Manager.Destroy(t.Context(), sb.ID); err == nil {
		t.Error("it was destroyed")
	}
	if got := mustHaveCondition(t, n, sb.ID, sandbox.ConditionDestroyFailed, "the container engine does not respond"); got.State != sandbox.StateDestroyed {
		t.Errorf("it is %s", got.State)
	}
	n.Engine.Fail("remove", nil)
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Error(err)
	}
}

// A caller who leaves says nothing of the sandbox.
func TestCanceledCallIsNotACondition(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Freezer.FailOnce("freeze", fmt.Errorf("wait for the kernel: %w", context.Canceled))
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); err == nil {
		t.Error("it slept")
	}
	mustBeWell(t, n, sb.ID)
}
