package sandbox_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

const owner = "operator"

// Every goroutine of a Manager ends with it.
func TestMain(m *testing.M) {
	jupytertest.Main()
	testkit.Main(m)
}

func create(t *testing.T, m *sandbox.Manager, name string) sandbox.Sandbox {
	t.Helper()
	sb, created, err := m.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: name})
	if err != nil || !created {
		t.Fatalf("creating %s: created %v, error %v", name, created, err)
	}
	return sb
}

func mustSleep(t *testing.T, m *sandbox.Manager, id sandbox.ID) {
	t.Helper()
	if sb, err := m.Sleep(t.Context(), id); err != nil || sb.State != sandbox.StateAsleep {
		t.Fatalf("sleep: state %s, error %v", sb.State, err)
	}
}

func acquire(t *testing.T, m *sandbox.Manager, id sandbox.ID) *sandbox.Lease {
	t.Helper()
	lease, err := m.Acquire(t.Context(), id, sandbox.CauseExec)
	if err != nil {
		t.Fatalf("acquire: %v", err)
	}
	return lease
}

func stateOf(t *testing.T, m *sandbox.Manager, id sandbox.ID) sandbox.State {
	t.Helper()
	sb, ok := m.ByID(id)
	if !ok {
		t.Fatalf("sandbox %s is gone", id)
	}
	return sb.State
}

// nextEvent waits for an event of that type.
func nextEvent(t *testing.T, events <-chan sandbox.Event, want sandbox.EventType) sandbox.Event {
	t.Helper()
	for {
		if ev := testkit.Receive(t, "the event "+string(want), events); ev.Type == want {
			return ev
		}
	}
}

func subscribe(t *testing.T, m *sandbox.Manager, id sandbox.ID) <-chan sandbox.Event {
	t.Helper()
	events, end, err := m.Subscribe(id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(end)
	return events
}

// TestRandomOperationsEndInAConsistentState does everything concurrently and then checks
// that nothing is held, nothing hangs and the books agree.
func TestRandomOperationsEndInAConsistentState(t *testing.T) {
	n := sandboxtest.Open(t, func(c *sandbox.Config) { c.StopGrace = time.Second })
	m := n.Manager
	ids := []sandbox.ID{create(t, m, "a").ID, create(t, m, "b").ID}
	allowed := func(err error) bool {
		return err == nil || errors.Is(err, sandbox.ErrBusy)
	}
	var wg sync.WaitGroup
	for worker := range 12 {
		rng := rand.New(rand.NewPCG(1, uint64(worker)))
		wg.Go(func() {
			for range 60 {
				id := ids[rng.IntN(len(ids))]
				var err error
				switch rng.IntN(8) {
				case 0:
					_, err = m.Sleep(t.Context(), id)
				case 1:
					_, err = m.Stop(t.Context(), id)
				case 2:
					_, err = m.Wake(t.Context(), id)
				case 3:
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(3000))*time.Microsecond)
					lease, acquireErr := m.Acquire(ctx, id, sandbox.CauseExec)
					cancel()
					if acquireErr == nil {
						lease.Release()
					} else if !errors.Is(acquireErr, context.DeadlineExceeded) {
						err = acquireErr
					}
				case 4:
					_, err = m.Expose(t.Context(), id, sandbox.Port{Port: uint16(1000 + rng.IntN(5))})
				default:
					lease, acquireErr := m.Acquire(t.Context(), id, sandbox.CauseExec)
					if err = acquireErr; err == nil {
						_, err = lease.Guest().Hello(t.Context())
						lease.Release()
					}
				}
				if !allowed(err) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if info := m.Info(t.Context()); info.Leases != 0 || info.Waiters != 0 {
		t.Errorf("%d leases and %d waiters are left", info.Leases, info.Waiters)
	}
	for _, id := range ids {
		if sb, _ := m.ByID(id); sb.State == sandbox.StateStopped {
			mustBeDetached(t, n, id)
		} else {
			mustBeAttached(t, n, id)
		}
		if err := m.Destroy(t.Context(), id); err != nil {
			t.Error(err)
		}
		mustBeDetached(t, n, id)
	}
	if n.Engine.Count() != 0 {
		t.Errorf("%d containers are left", n.Engine.Count())
	}
}
