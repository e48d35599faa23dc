package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestTimelineIsPaged(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	for range 3 {
		s.sleep(id)
		must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/wake", nil)
	}
	all := must[types.EventList](s, http.StatusOK, "GET", "/sandbox/box/events", nil)
	if len(all.Events) < 7 || all.Events[0].Type != types.EventTypeCreated || all.NextCursor != "" {
		t.Fatalf("got %+v", all)
	}
	var paged []types.Event
	for cursor := ""; ; {
		page := must[types.EventList](s, http.StatusOK, "GET", fmt.Sprintf("/sandbox/box/events?limit=2&cursor=%s", cursor), nil)
		paged = append(paged, page.Events...)
		if page.NextCursor == "" {
			break
		}
		if len(page.Events) != 2 {
			t.Fatalf("a page has %d events", len(page.Events))
		}
		cursor = page.NextCursor
	}
	if fmt.Sprint(paged) != fmt.Sprint(all.Events) {
		t.Errorf("pages have %v, not %v", paged, all.Events)
	}
	if none := must[types.EventList](s, http.StatusOK, "GET", "/sandbox/box/events?cursor=1000000", nil); none.Events == nil || len(none.Events) != 0 {
		t.Errorf("got %+v", none)
	}
	for _, query := range []string{"limit=0", "limit=1001", "limit=x", "cursor=-1", "cursor=x", "since=1"} {
		s.refused(problem.RequestInvalid, "GET", "/sandbox/box/events?"+query, nil)
	}
	for _, last := range []string{"x", "-1", "1.5", "999999999999999999999"} {
		s.refused(problem.RequestInvalid, "GET", "/sandbox/box/events", nil, "Accept", eventStreamType, "Last-Event-ID", last)
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/events", nil)
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/absent/events", nil, "Accept", eventStreamType)
}

func TestEventStreamGoesOnAfterABreak(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	s.sleep(id)
	stream := s.open("GET", "/sandbox/box/events", nil, "Accept", "text/html, text/event-stream;q=0.9")
	stream.expect("created")
	last := stream.expect("slept")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/wake", nil)
	woke := parse[types.Event](t, stream.expect("woke"))
	if woke.Kind != types.WakeKindWarm || woke.Cause != types.CauseRequested || woke.Time.IsZero() {
		t.Errorf("got %+v", woke)
	}
	stream.close()

	again := s.open("GET", "/sandbox/box/events?cursor=0", nil, "Accept", eventStreamType, "Last-Event-ID", last.id)
	if ev := again.expect("woke"); ev.id != strconv.FormatUint(woke.Seq, 10) {
		t.Errorf("got %+v", ev)
	}
	s.sleep(id)
	again.expect("slept")
}

// Events are made while streams begin, go on and resume: each stream has every
// event once, in order.
func TestEventStreamHasNoGapAndNothingTwice(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	const changes = 300
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range changes {
			labels := map[string]string{"i": strconv.Itoa(i)}
			if _, err := s.node.Manager.Update(context.Background(), sandboxID(id), sandbox.Patch{Labels: &labels}); err != nil {
				t.Error(err)
			}
		}
	}()
	var wg sync.WaitGroup
	for reader := range 4 {
		wg.Go(func() {
			var seqs []uint64
			last := ""
			for len(seqs) < changes+1 {
				stream := s.open("GET", "/sandbox/box/events", nil, "Accept", eventStreamType, "Last-Event-ID", last)
				for range (reader + 1) * 37 {
					ev, ok := stream.next()
					if !ok {
						t.Error("the stream ended")
						return
					}
					last = ev.id
					seqs = append(seqs, parse[types.Event](t, ev).Seq)
					if len(seqs) == changes+1 {
						break
					}
				}
				stream.close()
			}
			if !slices.IsSorted(seqs) || len(slices.Compact(slices.Clone(seqs))) != len(seqs) || seqs[len(seqs)-1]-seqs[0] != changes {
				t.Errorf("reader %d got %v", reader, seqs)
			}
		})
	}
	wg.Wait()
	<-done
}

// The node was killed before it had written what the reader has.
func TestEventStreamGoesOnAfterAnEventThatWasLost(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("box")
	stream := s.open("GET", "/sandbox/box/events", nil, "Accept", eventStreamType, "Last-Event-ID", "100")
	defer stream.close()
	if _, err := s.node.Manager.Update(t.Context(), sandboxID(id), sandbox.Patch{}); err != nil {
		t.Fatal(err)
	}
	if ev, ok := stream.next(); !ok || parse[types.Event](t, ev).Type != types.EventTypeUpdated {
		t.Errorf("got %+v, %v", ev, ok)
	}
}

// scripted is an eventSource whose events and their order a test chooses.
type scripted struct {
	stored []sandbox.Event
	// subscriptions are handed out one after the other; then it is gone.
	subscriptions []chan sandbox.Event
	onRead        func(*scripted)
}

// ByID is not reached: no read fails.
func (s *scripted) ByID(sandbox.ID) (sandbox.Sandbox, bool) { panic("unexpected call") }

func (s *scripted) Events(_ context.Context, _ sandbox.ID, after uint64, limit int) ([]sandbox.Event, error) {
	if s.onRead != nil {
		s.onRead(s)
	}
	var page []sandbox.Event
	for _, ev := range s.stored {
		if ev.Seq > after && len(page) < limit {
			page = append(page, ev)
		}
	}
	return page, nil
}

func (s *scripted) Subscribe(sandbox.ID) (<-chan sandbox.Event, func(), error) {
	if len(s.subscriptions) == 0 {
		return nil, nil, sandbox.ErrNotFound
	}
	ch := s.subscriptions[0]
	s.subscriptions = s.subscriptions[1:]
	return ch, func() {}, nil
}

func timelineOf(s *scripted) (*timeline, *[]uint64) {
	var got []uint64
	return &timeline{sandboxes: s, send: func(ev sandbox.Event) error {
		got = append(got, ev.Seq)
		return nil
	}}, &got
}

func channelOf(seqs ...uint64) chan sandbox.Event {
	ch := make(chan sandbox.Event, len(seqs))
	for _, seq := range seqs {
		ch <- sandbox.Event{Seq: seq}
	}
	close(ch)
	return ch
}

func TestSlowReaderReadsWhatItMissed(t *testing.T) {
	s := &scripted{stored: []sandbox.Event{{Seq: 1}, {Seq: 2}}}
	// The first channel was closed because its reader was slow: 4 and 5 are
	// in the store only.
	s.subscriptions = []chan sandbox.Event{channelOf(2, 3), channelOf(6)}
	reads := 0
	s.onRead = func(s *scripted) {
		if reads++; reads == 2 {
			s.stored = []sandbox.Event{{Seq: 1}, {Seq: 2}, {Seq: 3}, {Seq: 4}, {Seq: 5}}
		}
	}
	tl, got := timelineOf(s)
	if err := tl.follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(*got, []uint64{1, 2, 3, 4, 5, 6}) {
		t.Errorf("got %v", *got)
	}
}

func TestLongTimelineIsReadInPages(t *testing.T) {
	s := &scripted{subscriptions: []chan sandbox.Event{channelOf()}}
	for seq := range uint64(3*eventPage + 7) {
		s.stored = append(s.stored, sandbox.Event{Seq: seq + 1})
	}
	tl, got := timelineOf(s)
	if err := tl.follow(t.Context()); err != nil || len(*got) != len(s.stored) {
		t.Errorf("got %d events, %v", len(*got), err)
	}
}

func TestGoneSandboxEndsItsStream(t *testing.T) {
	// A channel that is closed from the beginning must not be asked for again
	// and again.
	s := &scripted{subscriptions: slices.Repeat([]chan sandbox.Event{channelOf()}, 3)}
	tl, _ := timelineOf(s)
	if err := tl.follow(t.Context()); err != nil || len(s.subscriptions) != 2 {
		t.Errorf("%d subscriptions are left, %v", len(s.subscriptions), err)
	}
}

func TestFailedWriteEndsTheTimeline(t *testing.T) {
	broken := errors.New("broken pipe")
	s := &scripted{stored: []sandbox.Event{{Seq: 1}}, subscriptions: []chan sandbox.Event{make(chan sandbox.Event)}}
	tl := &timeline{sandboxes: s, send: func(sandbox.Event) error { return broken }}
	if err := tl.follow(t.Context()); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}
