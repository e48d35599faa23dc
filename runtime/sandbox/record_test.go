package sandbox_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

func TestExposeKeepsItsToken(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	first, err := m.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000})
	if err != nil || len(first.Token) < 16 || first.Wake != sandbox.WakeNavigation || first.Host != sandbox.HostAuto || first.Protocol != sandbox.ProtocolAuto {
		t.Fatalf("%+v, error %v", first, err)
	}
	second, err := m.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000, Wake: sandbox.WakeNever})
	if err != nil || second.Token != first.Token || second.Wake != sandbox.WakeNever {
		t.Fatalf("%+v, error %v", second, err)
	}
	public, err := m.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000, Access: sandbox.AccessPublic})
	if err != nil || public.Token != "" {
		t.Fatalf("%+v, error %v", public, err)
	}
	var invalid *sandbox.InvalidError
	for _, bad := range []sandbox.Port{{Port: 0}, {Port: 1, Access: "x"}, {Port: 1, Wake: "x"}, {Port: 1, Host: "x"}, {Port: 1, Protocol: "x"}, {Port: 1, WebSocket: "x"}} {
		if _, err := m.Expose(t.Context(), sb.ID, bad); !errors.As(err, &invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := m.Unexpose(t.Context(), sb.ID, 3000); err != nil {
		t.Fatal(err)
	}
	if err := m.Unexpose(t.Context(), sb.ID, 3000); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a second time: %v", err)
	}
}

func TestFullDiskChangesNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	port, err := m.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000})
	if err != nil {
		t.Fatal(err)
	}
	n.Store.Fill(true)
	if _, err := m.Expose(t.Context(), sb.ID, sandbox.Port{Port: 4000}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("expose: %v", err)
	}
	if err := m.Unexpose(t.Context(), sb.ID, 3000); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("unexpose: %v", err)
	}
	name := "other"
	if _, err := m.Update(t.Context(), sb.ID, sandbox.Patch{Name: &name}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("update: %v", err)
	}
	if _, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "second"}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Errorf("create: %v", err)
	}
	// Waking, sleeping and stopping need no disk.
	mustSleep(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	if got, err := m.Stop(t.Context(), sb.ID); err != nil || got.State != sandbox.StateStopped {
		t.Errorf("stop: %s, %v", got.State, err)
	}
	acquire(t, m, sb.ID).Release()
	n.Store.Fill(false)
	got, err := m.Get(owner, "app")
	if err != nil || len(got.Ports) != 1 || got.Ports[0] != port {
		t.Errorf("%+v, error %v", got.Ports, err)
	}
	if list, _ := m.List(owner, sandbox.Filter{}, "", 0); len(list) != 1 || n.Engine.Count() != 1 {
		t.Errorf("%d sandboxes and %d containers", len(list), n.Engine.Count())
	}
}

func TestUpdateRenames(t *testing.T) {
	m := sandboxtest.New(t)
	a, b := create(t, m, "a"), create(t, m, "b")
	taken, free := "b", "c"
	var conflict *sandbox.ConflictError
	if _, err := m.Update(t.Context(), a.ID, sandbox.Patch{Name: &taken}); !errors.As(err, &conflict) {
		t.Errorf("to a taken name: %v", err)
	}
	if _, err := m.Update(t.Context(), a.ID, sandbox.Patch{Name: &free}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Get(owner, "a"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("the old name: %v", err)
	}
	if got, err := m.Get(owner, "c"); err != nil || got.ID != a.ID {
		t.Errorf("the new name: %v %v", got.ID, err)
	}
	if got, err := m.Get(owner, string(b.ID)); err != nil || got.Name != "b" {
		t.Errorf("by id: %v %v", got.Name, err)
	}
	if _, err := m.Get("another", string(b.ID)); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("another owner by id: %v", err)
	}
}

func TestListPages(t *testing.T) {
	m := sandboxtest.New(t)
	for _, name := range []string{"c", "a", "b"} {
		create(t, m, name)
	}
	page, next := m.List(owner, sandbox.Filter{}, "", 2)
	if len(page) != 2 || page[0].Name != "a" || next != "b" {
		t.Fatalf("first page %v, next %q", page, next)
	}
	page, next = m.List(owner, sandbox.Filter{}, next, 2)
	if len(page) != 1 || page[0].Name != "c" || next != "" {
		t.Fatalf("second page %v, next %q", page, next)
	}
	if page, _ := m.List(owner, sandbox.Filter{State: sandbox.StateAsleep}, "", 0); len(page) != 0 {
		t.Errorf("asleep: %v", page)
	}
}

// Records of before the modes of waking had other names keep what they meant.
func TestPortsOfEarlierVersionsKeepTheirMode(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	n.Crash(t, func() {
		record := n.Store.Record(t, sb.ID)
		record.Ports = []sandbox.Port{
			{Port: 3000, Access: sandbox.AccessToken, Token: "t", Wake: "hold", Host: sandbox.HostRewrite, WebSocket: sandbox.WebSocketSleep},
			{Port: 4000, Access: sandbox.AccessPublic, Wake: "refuse", Host: sandbox.HostPreserve, WebSocket: sandbox.WebSocketKeepAwake},
		}
		if err := n.Store.PutSandbox(t.Context(), record); err != nil {
			t.Fatal(err)
		}
	})
	got, ok := n.Manager.ByID(sb.ID)
	if !ok || len(got.Ports) != 2 {
		t.Fatalf("ports: %+v", got.Ports)
	}
	want := []sandbox.Port{
		{Port: 3000, Access: sandbox.AccessToken, Token: "t", Wake: sandbox.WakeNavigation, Host: sandbox.HostRewrite, Protocol: sandbox.ProtocolAuto, WebSocket: sandbox.WebSocketSleep},
		{Port: 4000, Access: sandbox.AccessPublic, Wake: sandbox.WakeNever, Host: sandbox.HostPreserve, Protocol: sandbox.ProtocolAuto, WebSocket: sandbox.WebSocketKeepAwake},
	}
	if !slices.Equal(got.Ports, want) {
		t.Errorf("ports %+v, want %+v", got.Ports, want)
	}
}
