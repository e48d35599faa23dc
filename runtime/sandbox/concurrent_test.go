package sandbox_test

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

// destroyBlocked begins a Destroy that hangs at the engine until finish.
func destroyBlocked(t *testing.T, n *sandboxtest.Node, id sandbox.ID) (finish func()) {
	t.Helper()
	release := n.Engine.Block("remove")
	done := make(chan error, 1)
	go func() { done <- n.Manager.Destroy(t.Context(), id) }()
	n.Engine.AwaitBlocked(t, "remove")
	return func() {
		t.Helper()
		release()
		if err := <-done; err != nil {
			t.Errorf("destroy: %v", err)
		}
	}
}

func TestRenameDuringDestroyLeavesBothNamesFree(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	finish := destroyBlocked(t, n, sb.ID)
	name := "renamed"
	if _, err := n.Manager.Update(t.Context(), sb.ID, sandbox.Patch{Name: &name}); !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("update: %v", err)
	}
	finish()
	create(t, n.Manager, "app")
	create(t, n.Manager, "renamed")
}

func TestCreateDuringDestroyDoesNotReturnTheDestroyedOne(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	finish := destroyBlocked(t, n, sb.ID)
	if got, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "app"}); !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("create: state %s, error %v", got.State, err)
	}
	if _, err := n.Manager.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000}); !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("expose: %v", err)
	}
	finish()
	create(t, n.Manager, "app")
}

// A token that was handed out must be the one that opens the port.
func TestConcurrentExposesCreateOneToken(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	for range 500 {
		var wg sync.WaitGroup
		begin := make(chan struct{})
		returned := make([]sandbox.Port, 4)
		for i := range returned {
			wg.Go(func() {
				<-begin
				var err error
				if returned[i], err = n.Manager.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000}); err != nil {
					t.Error(err)
				}
			})
		}
		close(begin)
		wg.Wait()
		got, _ := n.Manager.ByID(sb.ID)
		for _, p := range returned {
			if len(got.Ports) != 1 || p != got.Ports[0] {
				t.Fatalf("a caller got %+v, the sandbox has %+v", p, got.Ports)
			}
		}
		if err := n.Manager.Unexpose(t.Context(), sb.ID, 3000); err != nil {
			t.Fatal(err)
		}
	}
}

// Concurrent calls with different modes take effect one after the other, never mixed.
func TestConcurrentExposesEndAsOneOfThem(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	asked := []sandbox.Port{
		{Port: 3000, Access: sandbox.AccessToken, Wake: sandbox.WakeNavigation, Host: sandbox.HostAuto, Protocol: sandbox.ProtocolAuto, WebSocket: sandbox.WebSocketSleep},
		{Port: 3000, Access: sandbox.AccessPublic, Wake: sandbox.WakeNever, Host: sandbox.HostPreserve, Protocol: sandbox.ProtocolH2C, WebSocket: sandbox.WebSocketKeepAwake},
	}
	const rounds = 400 // with two events each, fewer than a timeline keeps
	for range rounds {
		returned := make([]sandbox.Port, len(asked))
		var wg sync.WaitGroup
		begin := make(chan struct{})
		for i, p := range asked {
			wg.Go(func() {
				<-begin
				var err error
				if returned[i], err = n.Manager.Expose(t.Context(), sb.ID, p); err != nil {
					t.Error(err)
				}
			})
		}
		close(begin)
		wg.Wait()
		for i, p := range asked {
			p.Token, p.CreatedAt = returned[i].Token, returned[i].CreatedAt
			if returned[i] != p || (p.Token == "") != (p.Access == sandbox.AccessPublic) {
				t.Fatalf("requested %+v, returned %+v", asked[i], returned[i])
			}
		}
		got, _ := n.Manager.ByID(sb.ID)
		if len(got.Ports) != 1 || got.Ports[0] != returned[0] && got.Ports[0] != returned[1] {
			t.Fatalf("the sandbox has %+v, its callers got %+v", got.Ports, returned)
		}
		if kept := n.Store.Record(t, sb.ID).Ports; len(kept) != 1 || kept[0] != got.Ports[0] {
			t.Fatalf("on disk is %+v, in memory %+v", kept, got.Ports)
		}
		if !returned[0].CreatedAt.Equal(returned[1].CreatedAt) {
			t.Fatalf("one port was made at %v and at %v", returned[0].CreatedAt, returned[1].CreatedAt)
		}
		if err := n.Manager.Unexpose(t.Context(), sb.ID, 3000); err != nil {
			t.Fatal(err)
		}
	}
	events, err := n.Manager.Events(t.Context(), sb.ID, 0, 1000)
	exposed := 0
	for _, ev := range events {
		if ev.Type == sandbox.EventPortExposed {
			exposed++
		}
	}
	if err != nil || exposed != rounds {
		t.Errorf("the timeline has %d exposed ports, want %d; error %v", exposed, rounds, err)
	}
}

func TestRefusedEventDoesNotBlockTheTimeline(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	a, b := create(t, n.Manager, "a"), create(t, n.Manager, "b")
	n.Store.Hook(func(_ string, events []sandbox.Event) error {
		if slices.ContainsFunc(events, func(ev sandbox.Event) bool { return ev.Port == 3000 }) {
			return &sandbox.InvalidError{Field: "event", Reason: "is too large", Want: "make it smaller"}
		}
		return nil
	})
	for _, port := range []uint16{3000, 3001} {
		if _, err := n.Manager.Expose(t.Context(), a.ID, sandbox.Port{Port: port}); err != nil {
			t.Fatal(err)
		}
	}
	mustSleep(t, n.Manager, b.ID)
	for id, want := range map[sandbox.ID]sandbox.EventType{a.ID: sandbox.EventPortExposed, b.ID: sandbox.EventSlept} {
		events, err := n.Manager.Events(t.Context(), id, 0, 100)
		if err != nil || len(events) != 2 || events[1].Type != want {
			t.Errorf("events %+v, error %v, want created and %s", events, err, want)
		}
	}
}
