package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// stores opens an empty store of each kind.
var stores = map[string]func(t *testing.T) *Badger{
	"on a disk":                      func(t *testing.T) *Badger { return openAt(t, t.TempDir(), defaultTuning) },
	"on a disk, with changing files": func(t *testing.T) *Badger { return openAt(t, t.TempDir(), small) },
	"in memory": func(t *testing.T) *Badger {
		s, err := OpenInMemory()
		must(t, err)
		t.Cleanup(func() { s.Close() })
		return s
	},
}

// contract is one test of what a store must do.
type contract struct {
	name string
	test func(t *testing.T, s *Badger)
}

// conform runs the tests, each on an empty store of each kind.
func conform(t *testing.T, tests []contract) {
	for kind, open := range stores {
		for _, c := range tests {
			t.Run(kind+"/"+c.name, func(t *testing.T) { c.test(t, open(t)) })
		}
	}
}

// The contract of sandbox.Store.
func TestStoreConforms(t *testing.T) {
	conform(t, []contract{
		{"a record is read as it was written", recordIsUnchanged},
		{"a record replaces the older one", recordReplaces},
		{"a deleted record is gone and deleting is idempotent", recordDeleted},
		{"a record is copied before the caller changes it", recordIsCopied},
		{"yield's error ends the iteration", yieldError},
		{"yield may write", yieldWrites},
		{"a record that is too large is refused and changes nothing", recordTooLarge},
		{"an invalid id is refused", badID},
		{"a store has a size only on a disk", sizeOnDisk},
		{"events come back in order", eventsInOrder},
		{"events are read from a cursor with a limit", eventsCursor},
		{"each sandbox has its own timeline", timelinesSeparate},
		{"only the newest events are stored", eventsBounded},
		{"only the newest events are stored when seqs have gaps", eventsBoundedWithGaps},
		{"old events expire", eventsExpire},
		{"events outlive their sandbox", eventsOutlive},
		{"an ended context changes nothing", endedContext},
		{"all methods are safe for concurrent use", concurrent},
		{"the node's id has 12 characters", nodeID},
		{"a closed store refuses", closedRefuses},
	})
}

// testRecord returns a sandbox with every field set, distinct by n.
func testRecord(n int) sandbox.Sandbox {
	at := time.Date(2026, 11, 20, 12, 0, n%60, 123456789, time.UTC)
	code := 3
	return sandbox.Sandbox{
		ID: testID(n), Name: fmt.Sprintf("demo-%d", n), Owner: "owner", Image: "base", ImageRef: "localhost/doze/base:latest",
		Size: "basic", State: sandbox.StateAsleep,
		Env:        map[string]string{"NODE_ENV": "development", "PORT": "3000"},
		Labels:     map[string]string{"team": "web", "n": fmt.Sprint(n)},
		SleepAfter: sandbox.Duration(time.Minute), StopAfter: sandbox.Duration(24 * time.Hour),
		CreatedAt: at, LastActiveAt: at.Add(time.Hour), StateSince: at.Add(2 * time.Hour), StateReason: sandbox.ReasonIdle,
		HoldUntil: at.Add(3 * time.Hour),
		Ports: []sandbox.Port{{Port: 3000, Access: sandbox.AccessToken, Token: "8d1f0c5e7a9b4d62", Wake: sandbox.WakeNavigation,
			Host: sandbox.HostRewrite, WebSocket: sandbox.WebSocketSleep, CreatedAt: at}},
		Processes: []guest.Process{{PID: 12, Name: "web", Argv: []string{"npm", "run", "dev"}, Cwd: "/workspace", Restart: guest.RestartOnWake,
			State: guest.ProcessExited, ExitCode: &code, RestartCount: 1, StartedAt: at, ExitedAt: &at, LogFile: "/var/log/doze/12.log"}},
		Declared: []guest.ProcessSpec{{Command: guest.Command{Argv: []string{"npm", "run", "dev"}, Cwd: "/workspace", Env: map[string]string{"A": "b"}}, Name: "web", Restart: guest.RestartOnWake}},
	}
}

// ID returns the id of testRecord(n).
func testID(n int) sandbox.ID { return sandbox.ID(fmt.Sprintf("sb%010d", n)) }

// Event returns an event of the sandbox testID(n).
func testEvent(n int, seq uint64) sandbox.Event {
	return sandbox.Event{Seq: seq, Type: sandbox.EventWoke, Time: time.Now().UTC(), Sandbox: testID(n), Kind: sandbox.WakeWarm, DurationMS: 0.25, Cause: sandbox.CausePreview}
}

// Events returns events of the sandbox testID(n) with these seqs, both included.
func testEvents(n int, from, to uint64) []sandbox.Event {
	var events []sandbox.Event
	for seq := from; seq <= to; seq++ {
		events = append(events, testEvent(n, seq))
	}
	return events
}

// allRecords returns every record of s by id.
func allRecords(t *testing.T, s *Badger) map[sandbox.ID]sandbox.Sandbox {
	t.Helper()
	all := make(map[sandbox.ID]sandbox.Sandbox)
	err := s.Sandboxes(t.Context(), func(sb sandbox.Sandbox) error {
		if _, twice := all[sb.ID]; twice {
			return fmt.Errorf("%s was yielded twice", sb.ID)
		}
		all[sb.ID] = sb
		return nil
	})
	must(t, err)
	return all
}

func recordIsUnchanged(t *testing.T, s *Badger) {
	want := make(map[sandbox.ID]sandbox.Sandbox)
	for n := range 300 {
		sb := testRecord(n)
		want[sb.ID] = sb
		must(t, s.PutSandbox(t.Context(), sb))
	}
	testkit.Diff(t, "the records", allRecords(t, s), want)
}

func recordReplaces(t *testing.T, s *Badger) {
	sb := testRecord(1)
	must(t, s.PutSandbox(t.Context(), sb))
	sb.State, sb.Ports, sb.Env = sandbox.StateStopped, nil, nil
	must(t, s.PutSandbox(t.Context(), sb))
	testkit.Diff(t, "the records", allRecords(t, s), map[sandbox.ID]sandbox.Sandbox{sb.ID: sb})
}

func recordDeleted(t *testing.T, s *Badger) {
	must(t, s.PutSandbox(t.Context(), testRecord(1)))
	must(t, s.PutSandbox(t.Context(), testRecord(2)))
	for range 2 {
		must(t, s.DeleteSandbox(t.Context(), testID(1)))
	}
	if got := allRecords(t, s); len(got) != 1 || got[testID(2)].Name != "demo-2" {
		t.Fatalf("got %+v, want the second record only", got)
	}
}

func recordIsCopied(t *testing.T, s *Badger) {
	sb := testRecord(1)
	must(t, s.PutSandbox(t.Context(), sb))
	env := maps.Clone(sb.Env)
	sb.Env["PORT"] = "changed"
	if got := allRecords(t, s)[sb.ID].Env; !maps.Equal(got, env) {
		t.Fatalf("got env %v, want %v", got, env)
	}
}

func yieldError(t *testing.T, s *Badger) {
	for n := range 3 {
		must(t, s.PutSandbox(t.Context(), testRecord(n)))
	}
	enough := errors.New("enough")
	calls := 0
	err := s.Sandboxes(t.Context(), func(sandbox.Sandbox) error { calls++; return enough })
	if err != enough || calls != 1 {
		t.Fatalf("got %v after %d calls, want %v after 1", err, calls, enough)
	}
}

func yieldWrites(t *testing.T, s *Badger) {
	for n := range 3 {
		must(t, s.PutSandbox(t.Context(), testRecord(n)))
	}
	must(t, s.Sandboxes(t.Context(), func(sb sandbox.Sandbox) error {
		sb.State = sandbox.StateStopped
		return s.PutSandbox(t.Context(), sb)
	}))
	for id, sb := range allRecords(t, s) {
		if sb.State != sandbox.StateStopped {
			t.Errorf("%s is %s, want stopped", id, sb.State)
		}
	}
}

func recordTooLarge(t *testing.T, s *Badger) {
	sb := testRecord(1)
	must(t, s.PutSandbox(t.Context(), sb))
	large := sb
	large.Labels = map[string]string{"text": strings.Repeat("x", 1<<20)}
	var invalid *sandbox.InvalidError
	if err := s.PutSandbox(t.Context(), large); !errors.As(err, &invalid) {
		t.Fatalf("got %v, want an InvalidError", err)
	}
	testkit.Diff(t, "the records", allRecords(t, s), map[sandbox.ID]sandbox.Sandbox{sb.ID: sb})
}

func badID(t *testing.T, s *Badger) {
	for _, id := range []sandbox.ID{"", "a/b", "A", "a-b", sandbox.ID(strings.Repeat("a", 1<<20)), "é"} {
		var invalid *sandbox.InvalidError
		sb := testRecord(1)
		sb.ID = id
		event := testEvent(1, 1)
		event.Sandbox = id
		for what, err := range map[string]error{
			"put":    s.PutSandbox(t.Context(), sb),
			"delete": s.DeleteSandbox(t.Context(), id),
			"append": s.AppendEvents(t.Context(), []sandbox.Event{testEvent(1, 1), event}),
		} {
			if !errors.As(err, &invalid) {
				t.Errorf("%s of id %.10q: got %v, want an InvalidError", what, id, err)
			}
		}
	}
	if got := allRecords(t, s); len(got) != 0 {
		t.Errorf("got records %v, want none", got)
	}
	if seq, err := s.LastSeq(t.Context(), testID(1)); err != nil || seq != 0 {
		t.Errorf("got last seq %d, %v; an append that was refused must add nothing", seq, err)
	}
}

func eventsInOrder(t *testing.T, s *Badger) {
	want := testEvents(1, 1, 300) // crosses every byte boundary below 2^9
	want[7].Process = &guest.Process{PID: 3, Name: "web", State: guest.ProcessLost, Restart: guest.RestartNever, StartedAt: want[7].Time}
	must(t, s.AppendEvents(t.Context(), want[:100]))
	must(t, s.AppendEvents(t.Context(), nil))
	must(t, s.AppendEvents(t.Context(), want[100:]))
	got, err := s.Events(t.Context(), testID(1), 0, 1000)
	must(t, err)
	testkit.Diff(t, "the events", got, want)
	wantLast(t, s, 1, 300)
}

func eventsCursor(t *testing.T, s *Badger) {
	must(t, s.AppendEvents(t.Context(), testEvents(1, 1, 10)))
	tests := []struct {
		after uint64
		limit int
		want  []uint64
	}{
		{0, 3, []uint64{1, 2, 3}},
		{3, 3, []uint64{4, 5, 6}},
		{8, 100, []uint64{9, 10}},
		{10, 100, nil},
		{1 << 63, 100, nil},
		{1<<64 - 1, 100, nil},
		{0, 0, nil},
		{0, -1, nil},
	}
	for _, tt := range tests {
		got, err := s.Events(t.Context(), testID(1), tt.after, tt.limit)
		must(t, err)
		testkit.Diff(t, fmt.Sprintf("after %d, limit %d", tt.after, tt.limit), seqs(got), tt.want)
	}
}

func timelinesSeparate(t *testing.T, s *Badger) {
	must(t, s.AppendEvents(t.Context(), append(testEvents(1, 1, 2), testEvents(2, 1, 3)...)))
	wantLast(t, s, 1, 2)
	wantLast(t, s, 2, 3)
	wantLast(t, s, 3, 0)
	got, err := s.Events(t.Context(), testID(3), 0, 10)
	if must(t, err); len(got) != 0 {
		t.Errorf("got %v for a sandbox without events", got)
	}
}

func eventsBounded(t *testing.T, s *Badger) {
	must(t, s.AppendEvents(t.Context(), testEvents(2, 1, 5)))
	must(t, s.AppendEvents(t.Context(), testEvents(1, 1, 1500)))
	for seq := uint64(1501); seq <= 2345; seq++ {
		must(t, s.AppendEvents(t.Context(), testEvents(1, seq, seq)))
	}
	got, err := s.Events(t.Context(), testID(1), 0, 5000)
	must(t, err)
	if len(got) != sandbox.MaxEvents || got[0].Seq != 1346 || got[len(got)-1].Seq != 2345 {
		t.Fatalf("got %d events from %d, want %d from 1346", len(got), got[0].Seq, sandbox.MaxEvents)
	}
	if got, err := s.Events(t.Context(), testID(2), 0, 5000); err != nil || len(got) != 5 {
		t.Fatalf("another sandbox has %d events, %v; want its 5", len(got), err)
	}
}

func eventsBoundedWithGaps(t *testing.T, s *Badger) {
	for seq := uint64(1); seq < 3000; seq += 7 {
		must(t, s.AppendEvents(t.Context(), testEvents(1, seq, seq)))
	}
	got, err := s.Events(t.Context(), testID(1), 0, 5000)
	must(t, err)
	newest := got[len(got)-1].Seq
	if newest != 2997 || got[0].Seq != 2003 {
		t.Fatalf("got events %d to %d, want 2003 to 2997", got[0].Seq, newest)
	}
}

func eventsExpire(t *testing.T, s *Badger) {
	events := testEvents(1, 1, 3)
	events[0].Time = time.Now().Add(-sandbox.EventRetention - time.Hour)
	events[1].Time = time.Now().Add(-sandbox.EventRetention + time.Hour)
	must(t, s.AppendEvents(t.Context(), events))
	got, err := s.Events(t.Context(), testID(1), 0, 10)
	must(t, err)
	testkit.Diff(t, "the events", seqs(got), []uint64{2, 3})
}

func eventsOutlive(t *testing.T, s *Badger) {
	must(t, s.PutSandbox(t.Context(), testRecord(1)))
	must(t, s.AppendEvents(t.Context(), testEvents(1, 1, 2)))
	must(t, s.DeleteSandbox(t.Context(), testID(1)))
	wantLast(t, s, 1, 2)
}

func endedContext(t *testing.T, s *Badger) {
	must(t, s.PutSandbox(t.Context(), testRecord(1)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, eventsErr := s.Events(ctx, testID(1), 0, 1)
	_, lastErr := s.LastSeq(ctx, testID(1))
	for what, err := range map[string]error{
		"put":       s.PutSandbox(ctx, testRecord(2)),
		"delete":    s.DeleteSandbox(ctx, testID(1)),
		"sandboxes": s.Sandboxes(ctx, func(sandbox.Sandbox) error { return nil }),
		"append":    s.AppendEvents(ctx, testEvents(1, 1, 1)),
		"events":    eventsErr,
		"last seq":  lastErr,
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want context.Canceled", what, err)
		}
	}
	if got := allRecords(t, s); len(got) != 1 || got[testID(1)].ID != testID(1) {
		t.Errorf("got %v, want the first record only", got)
	}
	wantLast(t, s, 1, 0)
}

func concurrent(t *testing.T, s *Badger) {
	const workers, rounds = 16, 20
	var wg sync.WaitGroup
	for n := range workers {
		wg.Go(func() {
			for round := uint64(1); round <= rounds; round++ {
				sb := testRecord(n)
				sb.StateReason = sandbox.StateReason(fmt.Sprint(round))
				if err := errors.Join(
					s.PutSandbox(t.Context(), sb),
					s.AppendEvents(t.Context(), testEvents(n, round, round)),
					s.PutSandbox(t.Context(), testRecord(workers+n)),
					s.DeleteSandbox(t.Context(), testID(workers+n)),
					s.Sandboxes(t.Context(), func(sandbox.Sandbox) error { return nil }),
				); err != nil {
					t.Error(err)
					return
				}
				if seq, err := s.LastSeq(t.Context(), testID(n)); err != nil || seq != round {
					t.Errorf("got last seq %d, %v right after %d was appended", seq, err, round)
				}
			}
		})
	}
	wg.Wait()
	all := allRecords(t, s)
	if len(all) != workers {
		t.Fatalf("got %d records, want %d", len(all), workers)
	}
	for id, sb := range all {
		if sb.StateReason != sandbox.StateReason(fmt.Sprint(rounds)) {
			t.Errorf("%s has round %s, want the last one", id, sb.StateReason)
		}
	}
}

func nodeID(t *testing.T, s *Badger) {
	if id := s.NodeID(); !regexp.MustCompile(`^[a-z0-9]{12}$`).MatchString(id) {
		t.Fatalf("got node id %q, want 12 characters of [a-z0-9]", id)
	}
}

func closedRefuses(t *testing.T, s *Badger) {
	must(t, s.PutSandbox(t.Context(), testRecord(1)))
	for range 2 {
		must(t, s.Close())
	}
	_, eventsErr := s.Events(t.Context(), testID(1), 0, 1)
	_, lastErr := s.LastSeq(t.Context(), testID(1))
	for what, err := range map[string]error{
		"put":       s.PutSandbox(t.Context(), testRecord(2)),
		"delete":    s.DeleteSandbox(t.Context(), testID(1)),
		"sandboxes": s.Sandboxes(t.Context(), func(sandbox.Sandbox) error { return nil }),
		"append":    s.AppendEvents(t.Context(), testEvents(1, 1, 1)),
		"events":    eventsErr,
		"last seq":  lastErr,
	} {
		if err == nil {
			t.Errorf("%s: got no error after Close", what)
		}
	}
}

func sizeOnDisk(t *testing.T, s *Badger) {
	must(t, s.PutSandbox(t.Context(), sandbox.Sandbox{ID: testID(1), Name: "a"}))
	bytes, err := s.DiskBytes()
	must(t, err)
	if onDisk := s.db.Opts().Dir != ""; onDisk != (bytes > 0) || bytes > 256<<20 {
		t.Errorf("%d bytes, on a disk: %v", bytes, onDisk)
	}
}

func wantLast(t *testing.T, s sandbox.Store, n int, want uint64) {
	t.Helper()
	if got, err := s.LastSeq(t.Context(), testID(n)); err != nil || got != want {
		t.Errorf("got last seq %d, %v; want %d", got, err, want)
	}
}

func seqs(events []sandbox.Event) []uint64 {
	var list []uint64
	for _, e := range events {
		list = append(list, e.Seq)
	}
	return list
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
