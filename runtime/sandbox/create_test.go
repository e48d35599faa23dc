package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestCreateIsIdempotentByName(t *testing.T) {
	m := sandboxtest.New(t)
	first := create(t, m, "app")
	again, created, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	if err != nil || created || again.ID != first.ID {
		t.Fatalf("again: id %s (want %s), created %v, error %v", again.ID, first.ID, created, err)
	}
	other, created, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: "another", Name: "app"})
	if err != nil || !created || other.ID == first.ID {
		t.Fatalf("another owner's: created %v, error %v", created, err)
	}
	for _, req := range []sandbox.CreateRequest{
		{Owner: owner, Name: "app", Image: "other"},
		{Owner: owner, Name: "app", Size: "standard"},
	} {
		var conflict *sandbox.ConflictError
		if _, _, err := m.Create(t.Context(), req); !errors.As(err, &conflict) {
			t.Errorf("with image %q and size %q: %v, want a conflict", req.Image, req.Size, err)
		}
	}
}

func TestConcurrentCreatesMakeOne(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	var made atomic.Int32
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			_, created, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
			if err != nil {
				t.Error(err)
			}
			if created {
				made.Add(1)
			}
		})
	}
	wg.Wait()
	if made.Load() != 1 || n.Engine.Created() != 1 {
		t.Errorf("%d callers made it, %d containers; want 1 and 1", made.Load(), n.Engine.Created())
	}
}

func TestCreateRefusesBadInput(t *testing.T) {
	m := sandboxtest.New(t)
	tooShort := sandbox.Duration(time.Millisecond)
	many := map[string]string{}
	for i := range 300 {
		many[fmt.Sprint("V", i)] = "x"
	}
	for name, c := range map[string]struct {
		req   sandbox.CreateRequest
		field string
	}{
		"empty label key":    {sandbox.CreateRequest{Labels: map[string]string{"": "x"}}, "labels"},
		"name with a space":  {sandbox.CreateRequest{Name: "a b"}, "name"},
		"name of 1 MB":       {sandbox.CreateRequest{Name: strings.Repeat("a", 1<<20)}, "name"},
		"name with a hyphen": {sandbox.CreateRequest{Name: "-a"}, "name"},
		"unknown size":       {sandbox.CreateRequest{Size: "huge"}, "size"},
		"unknown image":      {sandbox.CreateRequest{Image: "evil/image"}, "image"},
		"image of 1 MB":      {sandbox.CreateRequest{Image: strings.Repeat("a", 1<<20)}, "image"},
		"bad variable":       {sandbox.CreateRequest{Env: map[string]string{"1A": "x"}}, "env"},
		"NUL in a variable":  {sandbox.CreateRequest{Env: map[string]string{"A": "\x00"}}, "env"},
		"many variables":     {sandbox.CreateRequest{Env: many}, "env"},
		"short sleep_after":  {sandbox.CreateRequest{SleepAfter: &tooShort}, "sleep_after"},
	} {
		t.Run(name, func(t *testing.T) {
			c.req.Owner = owner
			_, _, err := m.Create(t.Context(), c.req)
			var invalid *sandbox.InvalidError
			if !errors.As(err, &invalid) || invalid.Field != c.field {
				t.Fatalf("got %v, want a refusal of %s", err, c.field)
			}
			if len(err.Error()) > 1000 {
				t.Errorf("the error repeats %d bytes of the input", len(err.Error()))
			}
			if list, _ := m.List(owner, sandbox.Filter{}, "", 0); len(list) != 0 {
				t.Errorf("something was made: %v", list)
			}
		})
	}
}

func TestFailedCreationLeavesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.Fail("start", errors.New("no room"))
	_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	var we *sandbox.WakeError
	if !errors.As(err, &we) || !strings.Contains(err.Error(), "no room") {
		t.Fatalf("got %v, want a WakeError with the reason", err)
	}
	if _, err := n.Manager.Get(owner, "app"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("it still exists: %v", err)
	}
	if n.Engine.Count() != 0 || n.Freezer.Prepared(we.ID) {
		t.Errorf("left: %d containers, cgroup %v", n.Engine.Count(), n.Freezer.Prepared(we.ID))
	}
	n.Engine.Fail("start", nil)
	create(t, n.Manager, "app")
}

// TestSandboxesAreDurable: a creation is acknowledged when its container survives a loss of power, and a record is removed
// when no loss of power can bring back the container.
func TestSandboxesAreDurable(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Disks.FailOnce("sync", syscall.EIO)
	if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"}); !errors.Is(err, syscall.EIO) {
		t.Errorf("created a sandbox that is not durable: %v", err)
	}
	if n.Engine.Count() != 0 {
		t.Error("its container is left")
	}
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	testkit.NoError(t, "remove the container outside of doze", n.Engine.Remove(t.Context(), sb.ID))
	n.Disks.FailOnce("sync", syscall.EIO)
	if _, err := n.Manager.Wake(t.Context(), sb.ID); !errors.Is(err, syscall.EIO) {
		t.Errorf("started a container that is not durable: %v", err)
	}
	if n.Engine.Count() != 0 {
		t.Error("its next container is left, and the next start would not sync it")
	}
	n.Disks.Fail("sync", syscall.EIO)
	if err := n.Manager.Destroy(t.Context(), sb.ID); !errors.Is(err, syscall.EIO) {
		t.Errorf("destroy: %v", err)
	}
	if state := n.Store.Record(t, sb.ID).State; state != sandbox.StateDestroyed {
		t.Errorf("the record is %s", state)
	}
	n.Disks.Fail("sync", nil)
	testkit.NoError(t, "destroy again", n.Manager.Destroy(t.Context(), sb.ID))
}

func TestCreationOutlivesItsCaller(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	release := n.Engine.Block("start")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, _, err := n.Manager.Create(ctx, sandbox.CreateRequest{Owner: owner, Name: "app"})
		done <- err
	}()
	n.Engine.AwaitBlocked(t, "start")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	release()
	sb, created, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	if err != nil || created || sb.State != sandbox.StateRunning {
		t.Fatalf("joined: state %s, created %v, error %v", sb.State, created, err)
	}
}

func TestDestroyLeavesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	lease := acquire(t, n.Manager, sb.ID) // destroy does not wait for it
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	lease.Release()
	nextEvent(t, events, sandbox.EventDestroyed)
	if _, open := <-events; open {
		t.Error("the event channel is open after destroyed")
	}
	if _, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CauseExec); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("acquire: %v", err)
	}
	if n.Engine.Count() != 0 || n.Freezer.Prepared(sb.ID) {
		t.Errorf("left: %d containers, cgroup %v", n.Engine.Count(), n.Freezer.Prepared(sb.ID))
	}
	create(t, n.Manager, "app") // the name is free again
}

func TestDestroyFailsItsWaiters(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	release := n.Engine.Block("start")
	defer release()
	woken := make(chan error, 1)
	go func() {
		_, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CauseExec)
		woken <- err
	}()
	n.Engine.AwaitBlocked(t, "start")
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Errorf("destroy: %v", err)
	}
	if err := <-woken; !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("acquire: %v", err)
	}
}

// Destroying is what makes room on a full disk.
func TestDestroyOnAFullDiskIsFinishedLater(t *testing.T) {
	for name, finish := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"by the next call": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			n.Store.Fill(false)
			n.Engine.Fail("remove", nil)
			if err := n.Manager.Destroy(t.Context(), id); err != nil {
				t.Errorf("destroying it again: %v", err)
			}
			n.Crash(t, func() {})
		},
		"by the next start": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			n.Store.Fill(false)
			testkit.Eventually(t, "it is on disk", func() bool { return n.Store.Record(t, id).State == sandbox.StateDestroyed })
			n.Crash(t, func() { n.Engine.Fail("remove", nil) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			n.Store.Fill(true)
			n.Engine.Fail("remove", syscall.EIO)
			for range 2 {
				if err := n.Manager.Destroy(t.Context(), sb.ID); !errors.Is(err, syscall.EIO) {
					t.Errorf("destroy: %v", err)
				}
				if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateDestroyed {
					t.Errorf("it is %s", s)
				}
			}
			finish(t, n, sb.ID)
			if got, ok := n.Manager.ByID(sb.ID); ok {
				t.Errorf("it came back %s", got.State)
			}
			if n.Engine.Count() != 0 || n.Freezer.Prepared(sb.ID) {
				t.Errorf("left: %d containers, cgroup %v", n.Engine.Count(), n.Freezer.Prepared(sb.ID))
			}
			create(t, n.Manager, "app") // the name is free again
		})
	}
}

func TestTimelineHasTheProgressOfAPull(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.Pulls("fetching layer 1 of 2", "fetching layer 2 of 2")
	sb := create(t, n.Manager, "app")
	events, err := n.Manager.Events(t.Context(), sb.ID, 0, 10)
	if err != nil {
		t.Fatal(err)
	}
	var progress []string
	for _, ev := range events {
		progress = append(progress, string(ev.Type)+" "+ev.Progress)
	}
	if got := strings.Join(progress, ", "); got != "image_pull_progress fetching layer 1 of 2, image_pull_progress fetching layer 2 of 2, created " {
		t.Errorf("timeline: %s", got)
	}
}

func TestMissingImageLeavesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.RemoveImage("localhost/doze/base:latest")
	_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	if !errors.Is(err, sandbox.ErrImageMissing) {
		t.Fatalf("got %v", err)
	}
	if _, err := n.Manager.Get(owner, "app"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("it still exists: %v", err)
	}
}

func TestGuestOfAnotherProtocolIsRefused(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.HandleGuest(sandboxtest.UnknownGuest)
	_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"})
	var version *guest.VersionError
	if !errors.As(err, &version) {
		t.Fatalf("got %v", err)
	}
	if n.Engine.Count() != 0 {
		t.Errorf("%d containers are left", n.Engine.Count())
	}
}
