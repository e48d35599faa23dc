package sandbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// hostileGuest responds to hello correctly, and with anything on its event stream.
type hostileGuest struct {
	events func(w http.ResponseWriter, r *http.Request)

	streams, open atomic.Int64 // event streams, in total and at present
}

func (g *hostileGuest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case guest.RouteHello:
		fmt.Fprintf(w, `{"protocol":%d,"version":"hostile"}`, guest.ProtocolVersion)
	case guest.RouteEvents:
		g.streams.Add(1)
		g.open.Add(1)
		defer g.open.Add(-1)
		g.events(w, r)
	default:
		http.NotFound(w, r)
	}
}

func hostile(events func(w http.ResponseWriter, r *http.Request)) *hostileGuest {
	return &hostileGuest{events: events}
}

// becomeUnknown makes guests that start from now on usable until the returned flag is set, and then of a
// protocol that the node does not know.
func becomeUnknown(n *sandboxtest.Node) *atomic.Bool {
	var strange atomic.Bool
	g := hostile(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	n.Engine.HandleGuest(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strange.Load() {
			sandboxtest.UnknownGuest(w, r)
		} else {
			g.ServeHTTP(w, r)
		}
	}))
	return &strange
}

// says sends a line and keeps the stream open.
func says(line string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, line)
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func TestGuestThatBreaksItsEventStreamStaysUsableAtABoundedCost(t *testing.T) {
	for name, events := range map[string]func(http.ResponseWriter, *http.Request){
		"ends it immediately": func(http.ResponseWriter, *http.Request) {},
		"cuts the connection": func(w http.ResponseWriter, _ *http.Request) {
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
		"refuses it":            func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) },
		"garbage":               says("\x00\xff{"),
		"a line without an end": says(strings.Repeat("x", guest.MaxFrame+1)),
		"an unknown event":      says(`{"type":"reboot"}`),
		"a process of no state": says(`{"type":"process","process":{"id":"p-aaaaaaaa","pid":1,"state":"x","restart":"never"}}`),
		"an endless hold":       says(`{"type":"hold","hold":9000000000000000000}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.Open(t, nil)
			g := hostile(events)
			n.Engine.HandleGuest(g)
			start := time.Now()
			sb := create(t, n.Manager, "app")
			timeline := subscribe(t, n.Manager, sb.ID)

			// Five breaks are free and one more a second is, so the eighth stream
			// is opened after two seconds or more, however fast this machine is.
			testkit.Eventually(t, "it breaks its stream again and again", func() bool { return g.streams.Load() >= 8 })
			if took := time.Since(start); took < 2*time.Second {
				t.Errorf("8 streams were opened in %s", took)
			}
			testkit.Eventually(t, "all streams but the newest are closed", func() bool { return g.open.Load() <= 1 })
			lease := acquire(t, n.Manager, sb.ID)
			if _, err := lease.Guest().Hello(t.Context()); err != nil {
				t.Error(err)
			}
			if held := lease.Sandbox().HoldUntil; !held.IsZero() {
				t.Errorf("it is held until %v", held)
			}
			lease.Release()

			// None of it counts as use.
			if _, err := n.Manager.Update(t.Context(), sb.ID, sandbox.Patch{SleepAfter: &second}); err != nil {
				t.Fatal(err)
			}
			for ev := range timeline {
				if ev.Type == sandbox.EventStopped || ev.Type == sandbox.EventHeld {
					t.Errorf("the timeline has %+v", ev)
				}
				if ev.Type == sandbox.EventSlept {
					break
				}
			}
			lease = acquire(t, n.Manager, sb.ID)
			defer lease.Release()
			if kind := lease.Wake().Kind; kind != sandbox.WakeWarm {
				t.Errorf("woke %q, want warm", kind)
			}
		})
	}
}

// A guest may send a burst of 600 events, and then 200 in a second.
func TestGuestThatFloodsItsEventStreamIsSlowedDown(t *testing.T) {
	t.Parallel()
	const burst, every = 600, time.Second / 200
	n := sandboxtest.Open(t, nil)
	n.Engine.HandleGuest(hostile(func(w http.ResponseWriter, r *http.Request) {
		lines := json.NewEncoder(w)
		for pid := 1; r.Context().Err() == nil; pid++ {
			p := guest.Process{ID: guest.NewProcessID(), PID: pid, Name: "p", State: guest.ProcessRunning, Restart: guest.RestartNever}
			if lines.Encode(guest.Event{Type: guest.EventProcess, Process: &p}) != nil {
				return
			}
		}
	}))
	start := time.Now()
	sb := create(t, n.Manager, "app")
	const most = burst + 200
	testkit.Eventually(t, "much was said", func() bool {
		events, err := n.Manager.Events(t.Context(), sb.ID, most, 1)
		return err == nil && len(events) == 1
	})
	if took := time.Since(start); took < (most-burst)*every {
		t.Errorf("%d events were taken in %s", most, took)
	}
	mustSleep(t, n.Manager, sb.ID)
	if list := n.Store.Record(t, sb.ID).Processes; len(list) > 512 {
		t.Errorf("%d processes are kept", len(list))
	}
}

// holdAsSandbox asks for a hold as a process in the sandbox does: again, while the
// node does not listen yet.
func holdAsSandbox(t *testing.T, n *sandboxtest.Node, id sandbox.ID, d time.Duration) {
	t.Helper()
	socket := filepath.Join(n.RunDir(id), guest.SandboxSocketName)
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer client.CloseIdleConnections()
	testkit.Eventually(t, "the node listens", func() bool {
		resp, err := client.Post(fmt.Sprintf("http://guest%s?for=%s", guest.RouteHold, d), "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

func askAPI(t *testing.T, n *sandboxtest.Node, id sandbox.ID, d time.Duration) {
	t.Helper()
	if _, err := n.Manager.Hold(t.Context(), id, d); err != nil {
		t.Fatal(err)
	}
}

func TestHoldsOfTheGuestAndTheAPIAreEqual(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]func(*testing.T, *sandboxtest.Node, sandbox.ID, time.Duration){"inside": holdAsSandbox, "API": askAPI} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			other := create(t, n.Manager, "other")
			events, others := subscribe(t, n.Manager, sb.ID), subscribe(t, n.Manager, other.ID)
			hold(t, n, sb.ID, time.Hour)
			until := nextEvent(t, events, sandbox.EventHeld).Until
			if left := time.Until(until); left > time.Hour || left < time.Hour/2 {
				t.Errorf("held for %s, want an hour", left)
			}
			testkit.Eventually(t, "the hold is on disk", func() bool { return n.Store.Record(t, sb.ID).HoldUntil.Equal(until) })
			update(t, n.Manager, sb.ID, sandbox.Patch{SleepAfter: &second})
			update(t, n.Manager, other.ID, sandbox.Patch{SleepAfter: &second})
			nextEvent(t, others, sandbox.EventSlept) // by the same rule
			if s := stateOf(t, n.Manager, sb.ID); s != sandbox.StateRunning {
				t.Errorf("it is %s in spite of its hold", s)
			}

			// From here on the disk takes nothing, so that what survives was on it.
			n.Store.Fill(true)
			n.Crash(t, func() { n.Store.Fill(false) })
			got, _ := n.Manager.ByID(sb.ID)
			if got.State != sandbox.StateRunning || !got.HoldUntil.Equal(until) {
				t.Errorf("after a restart it is %s, held until %v, want %v", got.State, got.HoldUntil, until)
			}
			timeline, err := n.Manager.Events(t.Context(), sb.ID, 0, 10)
			if err != nil || len(timeline) < 2 || timeline[1].Type != sandbox.EventHeld {
				t.Errorf("timeline %+v, error %v", timeline, err)
			}
			events = subscribe(t, n.Manager, sb.ID)
			// For a moment, the guest may take the dead node's connection for a node that listens.
			testkit.Eventually(t, "the hold ends", func() bool {
				hold(t, n, sb.ID, 0)
				got, known := n.Manager.ByID(sb.ID)
				return known && got.HoldUntil.IsZero()
			})
			if ev := nextEvent(t, events, sandbox.EventHeld); !ev.Until.IsZero() {
				t.Errorf("held until %v after the hold was ended", ev.Until)
			}
			nextEvent(t, events, sandbox.EventSlept)
		})
	}
}

func TestHoldsOfTheGuestShareWrites(t *testing.T) {
	const holds = 200 // fewer than a subscription may be behind
	n := sandboxtest.Open(t, nil)
	begin := make(chan struct{})
	n.Engine.HandleGuest(hostile(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-begin
		for range holds {
			fmt.Fprintln(w, `{"type":"hold","hold":1000000000}`)
		}
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	var written atomic.Int64
	n.Store.Hook(func(op string, _ []sandbox.Event) error {
		if op == "put" {
			written.Add(1)
		}
		return nil
	})
	start := time.Now()
	close(begin)
	for range holds {
		nextEvent(t, events, sandbox.EventHeld)
	}
	// The journal writes four times a second; it may have been just about to.
	puts, most := written.Load(), 2+int64(time.Since(start)/(250*time.Millisecond))
	if puts > most {
		t.Errorf("%d holds wrote the record %d times, at most %d are right", holds, puts, most)
	}
}

// A guest that closed its stream just before it was frozen cannot be asked why.
func TestBrokenStreamOfASleepingSandboxDelaysNoRequest(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	end := make(chan struct{})
	n.Engine.HandleGuest(hostile(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		select {
		case <-end:
		case <-r.Context().Done():
		}
	}))
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	before := n.Engine.Inspected()
	close(end)
	testkit.Eventually(t, "the engine is asked after it", func() bool { return n.Engine.Inspected() > before })
	// Its container is polled for ten more seconds.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := n.Manager.Sleep(ctx, sb.ID); err != nil {
		t.Errorf("sleep: %v", err)
	}
	if got, err := n.Manager.Stop(ctx, sb.ID); err != nil || got.State != sandbox.StateStopped {
		t.Errorf("stop: state %s, error %v", got.State, err)
	}
	acquire(t, n.Manager, sb.ID).Release()
}

func TestGuestThatDiesAsleepIsFoundAndStartedAgain(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	events := subscribe(t, n.Manager, sb.ID)
	mustSleep(t, n.Manager, sb.ID)
	n.Engine.Kill(t, sb.ID)
	nextEvent(t, events, sandbox.EventStopped)
	lease := acquire(t, n.Manager, sb.ID)
	defer lease.Release()
	if kind := lease.Wake().Kind; kind != sandbox.WakeCold {
		t.Errorf("woke %q, want cold", kind)
	}
}
