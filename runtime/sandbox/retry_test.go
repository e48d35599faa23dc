package sandbox_test

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestFailedDestructionIsRetriedUntilNothingIsLeft(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"asked for": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			if err := n.Manager.Destroy(t.Context(), id); !errors.Is(err, syscall.EIO) {
				t.Fatalf("destroy: %v", err)
			}
		},
		"found at start": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			n.Crash(t, func() {
				record := n.Store.Record(t, id)
				record.State = sandbox.StateDestroyed
				if err := n.Store.PutSandbox(t.Context(), record); err != nil {
					t.Fatal(err)
				}
			})
		},
		"by its TTL": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			ttl := second
			update(t, n.Manager, id, sandbox.Patch{TTL: &ttl})
			testkit.Eventually(t, "its destruction is pending", func() bool { return len(n.Manager.Info(t.Context()).Pending) == 1 })
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			n.Engine.Fail("remove", syscall.EIO)
			begin(t, n, sb.ID)
			m := n.Manager
			pending := m.Info(t.Context()).Pending
			if len(pending) != 1 || pending[0].Operation != sandbox.OperationDestroy || pending[0].ID != sb.ID || pending[0].Error == "" || !pending[0].NextAt.After(pending[0].Since) {
				t.Fatalf("pending: %+v", pending)
			}
			m.RetryNow(sandbox.OperationDestroy, sb.ID)
			again := m.Info(t.Context()).Pending
			if len(again) != 1 || again[0].Attempts != 2 || !again[0].Since.Equal(pending[0].Since) {
				t.Errorf("after another attempt: %+v", again)
			}
			n.Engine.Fail("remove", nil)
			testkit.Eventually(t, "it is tried again by itself", func() bool { return len(m.Info(t.Context()).Pending) == 0 })
			if _, ok := m.ByID(sb.ID); ok || n.Engine.Count() != 0 || n.Freezer.Prepared(sb.ID) || n.Store.Record(t, sb.ID).ID != "" {
				t.Errorf("left: sandbox %v, %d containers, cgroup %v", ok, n.Engine.Count(), n.Freezer.Prepared(sb.ID))
			}
		})
	}
}

func TestDestroyEndsThePendingRetry(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Engine.Fail("remove", syscall.EIO)
	if err := n.Manager.Destroy(t.Context(), sb.ID); !errors.Is(err, syscall.EIO) {
		t.Fatalf("destroy: %v", err)
	}
	n.Engine.Fail("remove", nil)
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if pending := n.Manager.Info(t.Context()).Pending; len(pending) != 0 {
		t.Errorf("pending: %+v", pending)
	}
}

func TestFailedCreationAndStopInQuarantineAreRetried(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	n.Engine.Fail("start", syscall.EIO)
	n.Engine.Fail("remove", syscall.EIO)
	if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"}); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	testkit.Eventually(t, "its removal is pending", func() bool { return len(n.Manager.Info(t.Context()).Pending) == 1 })
	n.Engine.Fail("start", nil)
	n.Engine.Fail("remove", nil)
	testkit.Eventually(t, "the removal of the remains", func() bool { return n.Engine.Count() == 0 && len(n.Manager.Info(t.Context()).Pending) == 0 })

	sb := create(t, n.Manager, "app")
	n.Engine.Fail("stop", syscall.EIO)
	loseRecord(t, n, sb.ID)
	testkit.Eventually(t, "its stop is pending", func() bool { return len(n.Manager.Info(t.Context()).Pending) == 1 })
	n.Engine.Fail("stop", nil)
	testkit.Eventually(t, "it is stopped", func() bool {
		info := n.Manager.Info(t.Context())
		return exited(t, n, sb.ID) && len(info.Pending) == 0 && info.Quarantined[0].Problem == ""
	})
}

// A node that is killed between making a cgroup and a container leaves both the cgroup
// and the run folder.
func TestCgroupOfAnUnfinishedCreationIsRemovedAtStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Crash(t, func() {
		unfinish(t, n, sb.ID)
		if err := n.Engine.Remove(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
	})
	testkit.Eventually(t, "its record is removed", func() bool { return n.Store.Record(t, sb.ID).ID == "" })
	if _, err := os.Lstat(n.RunDir(sb.ID)); !os.IsNotExist(err) || n.Freezer.Prepared(sb.ID) {
		t.Errorf("left: run folder %v, cgroup %v", err, n.Freezer.Prepared(sb.ID))
	}
}
