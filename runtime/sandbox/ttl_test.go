package sandbox_test

import (
	"errors"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestSandboxIsDestroyedWhenItsTTLPasses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		enter func(*testing.T, *sandbox.Manager, sandbox.ID)
	}{
		{"running", func(*testing.T, *sandbox.Manager, sandbox.ID) {}},
		{"in use", func(t *testing.T, m *sandbox.Manager, id sandbox.ID) {
			lease := acquire(t, m, id)
			t.Cleanup(lease.Release)
		}},
		{"asleep", mustSleep},
		{"stopped", mustStop},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			m := n.Manager
			sb := create(t, m, "app")
			events := subscribe(t, m, sb.ID)
			c.enter(t, m, sb.ID)
			ttl := second
			update(t, m, sb.ID, sandbox.Patch{TTL: &ttl})
			if ev := nextEvent(t, events, sandbox.EventDestroyed); ev.Reason != sandbox.ReasonTTLExpired {
				t.Errorf("destroyed for %q, want its TTL", ev.Reason)
			}
			testkit.Eventually(t, "nothing is left of it", func() bool {
				_, err := m.Get(sb.Owner, "app")
				return errors.Is(err, sandbox.ErrNotFound)
			})
			if _, err := n.Engine.Inspect(t.Context(), sb.ID); !errors.Is(err, sandbox.ErrNoContainer) {
				t.Errorf("its container still exists, error %v", err)
			}
		})
	}
}

func TestTTLCountsFromItsLastChange(t *testing.T) {
	m := sandboxtest.Open(t, nil).Manager
	ttl := sandbox.Duration(time.Hour)
	sb, _, err := m.Create(t.Context(), sandbox.CreateRequest{Name: "app", TTL: &ttl})
	if err != nil {
		t.Fatal(err)
	}
	if got := sb.ExpiresAt.Sub(sb.CreatedAt); got != time.Hour {
		t.Errorf("expires %s after its creation, want 1h", got)
	}
	before := time.Now()
	ttl = sandbox.Duration(2 * time.Hour)
	sb, err = m.Update(t.Context(), sb.ID, sandbox.Patch{TTL: &ttl})
	if err != nil {
		t.Fatal(err)
	}
	if sb.TTL != ttl || sb.ExpiresAt.Before(before.Add(2*time.Hour)) || sb.ExpiresAt.After(time.Now().Add(2*time.Hour)) {
		t.Errorf("ttl %s, expires at %s, want two hours from now", sb.TTL, sb.ExpiresAt)
	}
	sb, err = m.Update(t.Context(), sb.ID, sandbox.Patch{TTL: new(sandbox.Duration)})
	if err != nil || sb.TTL != 0 || !sb.ExpiresAt.IsZero() {
		t.Errorf("without a limit: ttl %s, expires at %s, error %v", sb.TTL, sb.ExpiresAt, err)
	}
}

// Its timer serves other purposes, too, which end with the state.
func TestTTLOutlivesChangesOfState(t *testing.T) {
	for name, enter := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID){
		"asleep":  func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustSleep(t, n.Manager, id) },
		"stopped": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) { mustStop(t, n.Manager, id) },
		"ended by itself": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			n.Engine.Kill(t, id)
			testkit.Eventually(t, "it is stopped", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped })
		},
		"vanished": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			if err := n.Engine.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "it is stopped", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped })
		},
		"ended while asleep": func(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
			mustSleep(t, n.Manager, id)
			if err := n.Engine.Remove(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "it is stopped", func() bool { return stateOf(t, n.Manager, id) == sandbox.StateStopped })
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			hour := sandbox.Duration(time.Hour)
			update(t, n.Manager, sb.ID, sandbox.Patch{TTL: &hour})
			enter(t, n, sb.ID)
			testkit.Eventually(t, "its timer is set", func() bool { return n.Manager.Armed(sb.ID) })
		})
	}
}

// The timer may fire just before a caller extends the TTL.
func TestExtendedTTLWinsOverALateTimer(t *testing.T) {
	m := sandboxtest.Open(t, nil).Manager
	sb := create(t, m, "app")
	hour := sandbox.Duration(time.Hour)
	update(t, m, sb.ID, sandbox.Patch{TTL: &hour})
	if err := m.ExpireLate(sb.ID); err != nil {
		t.Fatal(err)
	}
	if state := stateOf(t, m, sb.ID); state != sandbox.StateRunning {
		t.Errorf("it is %s although its TTL has not passed", state)
	}
}

func TestTTLThatPassedWhileTheNodeWasDownIsApplied(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	ttl := second
	update(t, n.Manager, sb.ID, sandbox.Patch{TTL: &ttl})
	n.Crash(t, func() {
		testkit.Eventually(t, "the TTL passes", func() bool { return time.Since(sb.CreatedAt) > 2*time.Second })
	})
	testkit.Eventually(t, "it is destroyed", func() bool {
		_, err := n.Manager.Get(sb.Owner, "app")
		return errors.Is(err, sandbox.ErrNotFound)
	})
}

func TestTTLOutOfRangeIsRefused(t *testing.T) {
	m := sandboxtest.Open(t, nil).Manager
	for _, ttl := range []time.Duration{-time.Second, time.Millisecond, 11 * 365 * 24 * time.Hour} {
		_, _, err := m.Create(t.Context(), sandbox.CreateRequest{Name: "app", TTL: (*sandbox.Duration)(&ttl)})
		var invalid *sandbox.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != "ttl" {
			t.Errorf("ttl %s: error %v, want one of the field ttl", ttl, err)
		}
	}
}
