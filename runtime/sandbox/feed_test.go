package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func feedOf(t *testing.T, m *sandbox.Manager, owner, cursor string) *sandbox.FeedReader {
	t.Helper()
	r, err := m.Feed(owner, cursor)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func nextOf(t *testing.T, r *sandbox.FeedReader) sandbox.FeedEvent {
	t.Helper()
	ev, err := r.Next(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return ev
}

func TestFeedHasTheEventsOfAllSandboxesOfAnOwner(t *testing.T) {
	m := sandboxtest.Open(t, nil).Manager
	for _, c := range []struct{ owner, name string }{{"ann", "one"}, {"bob", "other"}, {"ann", "two"}} {
		if _, _, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: c.owner, Name: c.name}); err != nil {
			t.Fatal(err)
		}
	}
	r := feedOf(t, m, "ann", "")
	first, second := nextOf(t, r), nextOf(t, r)
	if first.Name != "one" || second.Name != "two" || first.Type != sandbox.EventCreated || second.Type != sandbox.EventCreated {
		t.Errorf("got %s of %s, %s of %s", first.Type, first.Name, second.Type, second.Name)
	}
	if _, ok, err := r.Poll(); ok || err != nil {
		t.Errorf("there is a third event, error %v: another owner's?", err)
	}
	sb, err := m.Get("ann", "one")
	if err != nil {
		t.Fatal(err)
	}
	mustSleep(t, m, sb.ID)
	if ev := nextOf(t, r); ev.Type != sandbox.EventSlept || ev.Sandbox != sb.ID {
		t.Errorf("got %s of %s, want that it slept", ev.Type, ev.Name)
	}
	if ev := nextOf(t, feedOf(t, m, "ann", first.Cursor)); ev.Cursor != second.Cursor {
		t.Errorf("after the first event comes %s of %s", ev.Type, ev.Name)
	}
}

func TestFeedReportsAGap(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	r := feedOf(t, m, sb.Owner, "")
	cursor := nextOf(t, r).Cursor
	for i := range sandbox.FeedSize + 10 {
		name := fmt.Sprintf("app-%d", i)
		m.EmitForTest(sb.ID, sandbox.Event{Type: sandbox.EventUpdated, Error: name})
	}
	behind := feedOf(t, m, sb.Owner, cursor)
	if _, err := behind.Next(t.Context()); !errors.Is(err, sandbox.ErrFeedGap) {
		t.Fatalf("error %v, want a gap", err)
	}
	if ev := nextOf(t, behind); ev.Error != "app-10" {
		t.Errorf("goes on with %q, want the oldest kept event", ev.Error)
	}
	if err := m.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.Restart(t)
	after := feedOf(t, n.Manager, sb.Owner, cursor)
	if _, err := after.Next(t.Context()); !errors.Is(err, sandbox.ErrFeedGap) {
		t.Errorf("after a restart: error %v, want a gap", err)
	}
}

func TestFeedEndsWithTheNode(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	r := feedOf(t, n.Manager, "operator", "")
	ended := make(chan error, 1)
	go func() {
		_, err := r.Next(context.Background())
		ended <- err
	}()
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("error %v, want ErrClosed", err)
	}
}

func TestMalformedFeedCursorIsRefused(t *testing.T) {
	m := sandboxtest.Open(t, nil).Manager
	for _, cursor := range []string{"7", "-7", "run-", "run-x", "run--1", "run-99999999999999999999"} {
		var invalid *sandbox.InvalidError
		if _, err := m.Feed("operator", cursor); !errors.As(err, &invalid) {
			t.Errorf("cursor %q: error %v, want an InvalidError", cursor, err)
		}
	}
}
