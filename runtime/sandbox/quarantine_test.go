package sandbox_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// loseRecord restarts the node without the record of a sandbox.
func loseRecord(t *testing.T, n *sandboxtest.Node, ids ...sandbox.ID) {
	t.Helper()
	n.Crash(t, func() {
		for _, id := range ids {
			if err := n.Store.DeleteSandbox(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func exited(t *testing.T, n *sandboxtest.Node, id sandbox.ID) bool {
	t.Helper()
	c, err := n.Engine.Inspect(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return c.State == sandbox.ContainerExited
}

func TestSandboxWithoutARecordIsKeptAndCanBeAdopted(t *testing.T) {
	for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep, sandbox.StateStopped} {
		t.Run(string(state), func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sleepAfter := sandbox.Duration(time.Hour)
			made, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{
				Owner: owner, Name: "app", Image: "other", Size: "standard",
				Env: map[string]string{"A": "b"}, Labels: map[string]string{"team": "x"}, SleepAfter: &sleepAfter,
			})
			if err != nil {
				t.Fatal(err)
			}
			switch state {
			case sandbox.StateAsleep:
				mustSleep(t, n.Manager, made.ID)
			case sandbox.StateStopped:
				mustStop(t, n.Manager, made.ID)
			}
			kept := filepath.Join(n.RunDir(made.ID), "kept")
			if err := os.WriteFile(kept, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			loseRecord(t, n, made.ID)
			m := n.Manager
			if _, ok := m.ByID(made.ID); ok {
				t.Error("it is a sandbox without a record")
			}
			testkit.Eventually(t, "it is stopped", func() bool { return exited(t, n, made.ID) })
			if _, err := os.Lstat(kept); err != nil {
				t.Errorf("its run folder: %v", err)
			}
			list := m.Info(t.Context()).Quarantined
			if len(list) != 1 || list[0].ID != made.ID || list[0].Name != "app" || list[0].Owner != owner || list[0].Image != "other" ||
				list[0].Size != "standard" || !list[0].CreatedAt.Equal(made.CreatedAt) || !list[0].Container {
				t.Fatalf("in quarantine: %+v", list)
			}
			if _, err := m.Adopt(t.Context(), "another", made.ID, ""); !errors.Is(err, sandbox.ErrNotQuarantined) {
				t.Errorf("another owner adopts it: %v", err)
			}
			got, err := m.Adopt(t.Context(), owner, made.ID, "")
			if err != nil {
				t.Fatal(err)
			}
			if got.Name != "app" || got.State != sandbox.StateStopped || got.StateReason != sandbox.ReasonAdopted || got.Image != "other" || got.ImageRef != made.ImageRef || got.Size != "standard" ||
				!maps.Equal(got.Env, made.Env) || !maps.Equal(got.Labels, made.Labels) || got.SleepAfter != sleepAfter || !got.CreatedAt.Equal(made.CreatedAt) {
				t.Errorf("adopted: %+v, made: %+v", got, made)
			}
			if len(m.Info(t.Context()).Quarantined) != 0 {
				t.Error("it is still in quarantine")
			}
			n.Crash(t, func() {}) // its record is written
			lease := acquire(t, n.Manager, made.ID)
			lease.Release()
			if n.Engine.Created() != 1 {
				t.Error("its container was made again")
			}
		})
	}
}

func TestQuarantinedContainerIsRemovedOnRequest(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	a, b := create(t, n.Manager, "a"), create(t, n.Manager, "b")
	n.Engine.Fail("stop", syscall.EIO)
	loseRecord(t, n, a.ID, b.ID)
	m := n.Manager
	testkit.Eventually(t, "the failed stop is reported", func() bool { return m.Info(t.Context()).Quarantined[0].Problem != "" })
	n.Engine.Fail("remove", syscall.EIO)
	if err := m.RemoveQuarantined(t.Context(), owner, a.ID); !errors.Is(err, syscall.EIO) {
		t.Errorf("remove: %v", err)
	}
	n.Engine.Fail("remove", nil)
	n.Engine.Fail("stop", nil)
	if err := m.RemoveQuarantined(t.Context(), owner, a.ID); err != nil {
		t.Fatal(err)
	}
	if err := m.RemoveQuarantined(t.Context(), owner, a.ID); !errors.Is(err, sandbox.ErrNotQuarantined) {
		t.Errorf("again: %v", err)
	}
	if list := m.Info(t.Context()).Quarantined; len(list) != 1 || list[0].ID != b.ID {
		t.Errorf("left in quarantine: %+v", list)
	}
	if _, err := os.Lstat(n.RunDir(a.ID)); n.Engine.Count() != 1 || n.Freezer.Prepared(a.ID) || !os.IsNotExist(err) || n.Uplink.Knows(a.ID) {
		t.Errorf("left: %d containers, cgroup %v, run folder %v, egress state %v", n.Engine.Count(), n.Freezer.Prepared(a.ID), err, n.Uplink.Knows(a.ID))
	}
	if !n.Uplink.Knows(b.ID) {
		t.Error("the egress state of one in quarantine is forgotten")
	}
	// Its container may run on: adopted, it is ended later or taken over by its wake.
	if _, err := m.Adopt(t.Context(), owner, b.ID, ""); err != nil {
		t.Fatal(err)
	}
	acquire(t, m, b.ID).Release()
}

// Containers in quarantine are stopped some at a time, and the node serves meanwhile.
func TestContainerAdoptedBeforeItsStopIsStopped(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	var ids []sandbox.ID
	for i := range sandbox.Recoverers + 1 {
		ids = append(ids, create(t, n.Manager, fmt.Sprint("app-", i)).ID)
	}
	healthy := create(t, n.Manager, "healthy").ID
	release := n.Engine.Block("stop")
	loseRecord(t, n, ids...)
	m := n.Manager
	if n.Log.Contains("failed to recover all sandboxes") {
		t.Error("the node has waited for the stop of containers in quarantine")
	}
	acquire(t, m, healthy).Release()
	// All but one are being stopped, and their adoption would wait for that.
	adopted := make(chan sandbox.ID, len(ids))
	for _, id := range ids {
		go func() {
			if _, err := m.Adopt(t.Context(), owner, id, ""); err != nil {
				t.Error(err)
			}
			adopted <- id
		}()
	}
	<-adopted
	release()
	for range len(ids) - 1 {
		<-adopted
	}
	for _, id := range ids {
		testkit.Eventually(t, "its container is stopped", func() bool { return exited(t, n, id) })
	}
}

func TestPartialRemovalFromQuarantinePreventsAdoption(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if err := os.WriteFile(filepath.Join(n.RunDir(sb.ID), "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	loseRecord(t, n, sb.ID)
	m := n.Manager
	n.Engine.Fail("remove_folder", syscall.EIO)
	if err := m.RemoveQuarantined(t.Context(), owner, sb.ID); !errors.Is(err, syscall.EIO) {
		t.Fatalf("remove: %v", err)
	}
	if err := m.StopQuarantined(sb.ID); err != nil { // which was to come before
		t.Fatal(err)
	}
	var invalid *sandbox.InvalidError
	if _, err := m.Adopt(t.Context(), owner, sb.ID, ""); !errors.As(err, &invalid) || invalid.Field != "id" {
		t.Errorf("adopt: %v, want that it has no container", err)
	}
	if list := m.Info(t.Context()).Quarantined; len(list) != 1 || list[0].Container || !strings.Contains(list[0].Problem, syscall.EIO.Error()) {
		t.Errorf("in quarantine: %+v, want the run folder alone, and why", list)
	}
	n.Engine.Fail("remove_folder", nil)
	if err := m.RemoveQuarantined(t.Context(), owner, sb.ID); err != nil {
		t.Error(err)
	}
}

func TestAdoptRefusesInvalidRequests(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	const old, folder = sandbox.ID("madebefore00"), sandbox.ID("onlyafolder0")
	n.Crash(t, func() {
		if err := errors.Join(n.Store.DeleteSandbox(t.Context(), sb.ID), os.Mkdir(n.RunDir(folder), 0o700),
			n.Engine.Create(t.Context(), sandbox.ContainerSpec{ID: old, RunDir: n.RunDir(old), ImageRef: "localhost/doze/base:latest"})); err != nil {
			t.Fatal(err)
		}
	})
	m := n.Manager
	create(t, m, "app")
	var conflict *sandbox.ConflictError
	if _, err := m.Adopt(t.Context(), owner, sb.ID, ""); !errors.As(err, &conflict) {
		t.Errorf("a name that is taken: %v", err)
	}
	if got, err := m.Adopt(t.Context(), owner, sb.ID, "app-2"); err != nil || got.Name != "app-2" {
		t.Errorf("another name: %q, %v", got.Name, err)
	}
	var invalid *sandbox.InvalidError
	for _, c := range []struct {
		id          sandbox.ID
		name, field string
	}{{old, "", "name"}, {old, "No Name", "name"}, {folder, "f", "id"}} {
		if _, err := m.Adopt(t.Context(), owner, c.id, c.name); !errors.As(err, &invalid) || invalid.Field != c.field {
			t.Errorf("%s as %q: %v, want a refusal of %s", c.id, c.name, err, c.field)
		}
	}
	got, err := m.Adopt(t.Context(), owner, old, "old")
	if err != nil || got.ImageRef != "localhost/doze/base:latest" || got.Size != "basic" || got.CreatedAt.IsZero() {
		t.Errorf("one of an earlier version: %+v, %v", got, err)
	}
	acquire(t, m, old).Release()
	if err := m.RemoveQuarantined(t.Context(), owner, folder); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(n.RunDir(folder)); !os.IsNotExist(err) {
		t.Errorf("the folder: %v", err)
	}
	if _, err := m.Adopt(t.Context(), owner, "unknown00000", "x"); !errors.Is(err, sandbox.ErrNotQuarantined) {
		t.Errorf("unknown: %v", err)
	}
}

func TestCreationThatWasNotAcknowledgedIsRemovedAtStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	release := n.Engine.Block("create")
	made := make(chan sandbox.Sandbox, 1)
	go func() {
		sb, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
		if err != nil {
			t.Error(err)
		}
		made <- sb
	}()
	n.Engine.AwaitBlocked(t, "create")
	var journal []sandbox.Sandbox
	if err := n.Store.Sandboxes(t.Context(), func(sb sandbox.Sandbox) error { journal = append(journal, sb); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(journal) != 1 || journal[0].State != sandbox.StateStarting {
		t.Fatalf("before the container is made the store has %+v", journal)
	}
	release()
	sb := <-made
	if got := n.Store.Record(t, sb.ID).State; got != sandbox.StateRunning {
		t.Errorf("acknowledged, its record is %s", got)
	}
	// As when the node was killed before the acknowledgement.
	n.Crash(t, func() { unfinish(t, n, sb.ID) })
	again := create(t, n.Manager, "app") // the name is free immediately
	testkit.Eventually(t, "it is removed", func() bool { return n.Store.Record(t, sb.ID).ID == "" })
	if n.Engine.Count() != 1 || n.Freezer.Prepared(sb.ID) || n.Uplink.Knows(sb.ID) {
		t.Errorf("left: %d containers, cgroup %v, egress state %v", n.Engine.Count(), n.Freezer.Prepared(sb.ID), n.Uplink.Knows(sb.ID))
	}
	if got, err := n.Manager.Get(owner, "app"); err != nil || got.ID != again.ID {
		t.Errorf("app is %s, error %v", got.ID, err)
	}
	if list := n.Manager.Info(t.Context()).Quarantined; len(list) != 0 {
		t.Errorf("in quarantine: %+v", list)
	}
}

// The remains of a failed creation are removed later, and its name is free meanwhile.
func TestFailedCreationThatCannotBeRemovedIsRemovedLater(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.Fail("start", syscall.EIO)
	n.Engine.Fail("remove", syscall.EIO)
	if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"}); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	n.Engine.Fail("start", nil)
	sb := create(t, n.Manager, "app")
	n.Crash(t, func() { n.Engine.Fail("remove", nil) })
	testkit.Eventually(t, "the removal of the remains", func() bool { return n.Engine.Count() == 1 })
	if got, err := n.Manager.Get(owner, "app"); err != nil || got.ID != sb.ID || got.State != sandbox.StateRunning {
		t.Errorf("app is %s, %s, error %v", got.ID, got.State, err)
	}
}

// In an older copy of the store a creation may be unfinished that was finished since.
func TestOlderCopyOfTheStoreRemovesNoUnfinishedCreation(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Restored = true
	n.Crash(t, func() { unfinish(t, n, sb.ID) })
	info := n.Manager.Info(t.Context())
	if !info.Restored || len(info.Quarantined) != 1 || info.Quarantined[0].ID != sb.ID {
		t.Fatalf("restored %v, in quarantine %+v", info.Restored, info.Quarantined)
	}
	if got, err := n.Manager.Adopt(t.Context(), owner, sb.ID, ""); err != nil || got.Name != "app" {
		t.Errorf("adopt: %q, %v", got.Name, err)
	}
	acquire(t, n.Manager, sb.ID).Release()
	if n.Engine.Created() != 1 {
		t.Error("its container was made again")
	}
}

// A copy of the store that is not known to be older, as after a loss of power, may call a
// creation unfinished that was acknowledged since.
func TestAcknowledgedCreationIsNotRemovedAtStart(t *testing.T) {
	for _, state := range []sandbox.State{sandbox.StateRunning, sandbox.StateAsleep, sandbox.StateStopped} {
		t.Run(string(state), func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb, gone := create(t, n.Manager, "app"), create(t, n.Manager, "gone")
			if err := n.Manager.Destroy(t.Context(), gone.ID); err != nil {
				t.Fatal(err)
			}
			switch state {
			case sandbox.StateAsleep:
				mustSleep(t, n.Manager, sb.ID)
			case sandbox.StateStopped:
				mustStop(t, n.Manager, sb.ID)
			}
			kept := filepath.Join(n.RunDir(sb.ID), "kept")
			if err := os.WriteFile(kept, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			n.Crash(t, func() {
				gone.State = sandbox.StateStarting
				record := n.Store.Record(t, sb.ID)
				record.State = sandbox.StateStarting
				if err := errors.Join(n.Store.PutSandbox(t.Context(), record), n.Store.PutSandbox(t.Context(), gone)); err != nil {
					t.Fatal(err)
				}
			})
			info := n.Manager.Info(t.Context())
			if len(info.Quarantined) != 1 || info.Quarantined[0].ID != sb.ID || len(info.Pending) != 0 {
				t.Fatalf("in quarantine %+v, pending %+v", info.Quarantined, info.Pending)
			}
			if got, err := n.Manager.Adopt(t.Context(), owner, sb.ID, ""); err != nil || got.Name != "app" {
				t.Errorf("adopt: %q, %v", got.Name, err)
			}
			acquire(t, n.Manager, sb.ID).Release()
			if _, err := os.Lstat(kept); err != nil || n.Engine.Created() != 2 || n.Engine.Count() != 1 {
				t.Errorf("its run folder: %v; %d containers were made, %d exist", err, n.Engine.Created(), n.Engine.Count())
			}
			if n.Store.Record(t, gone.ID).ID != "" {
				t.Error("the record of one of which nothing is left stays")
			}
		})
	}
}

func TestTheNoteOfACreationEndsWithIt(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	release := n.Engine.Block("create")
	made := make(chan error, 1)
	go func() {
		_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
		made <- err
	}()
	n.Engine.AwaitBlocked(t, "create")
	if ids := pendingCreations(t, n); len(ids) != 1 {
		t.Errorf("before the container is made: %q", ids)
	}
	release()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	if ids := pendingCreations(t, n); len(ids) != 0 {
		t.Errorf("acknowledged: %q", ids)
	}
	n.Engine.Fail("start", syscall.EIO)
	if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "fails"}); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	testkit.Eventually(t, "its note is removed", func() bool { return len(pendingCreations(t, n)) == 0 })
	n.Engine.Fail("start", nil)
	killed := create(t, n.Manager, "killed")
	n.Crash(t, func() { unfinish(t, n, killed.ID) })
	testkit.Eventually(t, "the removal after a kill", func() bool { return len(pendingCreations(t, n)) == 0 && n.Engine.Count() == 1 })
}

// unfinish reverts a sandbox's record and notes to those before its creation was
// acknowledged. Use it in Crash.
func unfinish(t testing.TB, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	record := n.Store.Record(t, id)
	record.State = sandbox.StateStarting
	if err := errors.Join(n.Store.PutSandbox(t.Context(), record), os.WriteFile(filepath.Join(n.Creations, string(id)), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// pendingCreations returns the creations that are noted as under way.
func pendingCreations(t testing.TB, n *sandboxtest.Node) (ids []sandbox.ID) {
	t.Helper()
	files, err := os.ReadDir(n.Creations)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		ids = append(ids, sandbox.ID(f.Name()))
	}
	return ids
}
