package sandbox_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func watchFiles(t *testing.T, m *sandbox.Manager, id sandbox.ID, spec guest.WatchSpec) *sandbox.FileWatch {
	t.Helper()
	w, err := m.WatchFiles(testkit.Context(t), id, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// nextName returns the name of the next entry that is created.
func nextName(t *testing.T, w *sandbox.FileWatch) string {
	t.Helper()
	events, err := w.Next(testkit.Context(t))
	if err != nil || len(events) != 1 || events[0].Type != guest.WatchCreate {
		t.Fatalf("%+v, %v", events, err)
	}
	return filepath.Base(string(events[0].Path))
}

func makeFolder(t *testing.T, path ...string) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(path...), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestWatchWakesOnceAndKeepsNothingAwake(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	dir := t.TempDir()
	if _, err := m.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	w := watchFiles(t, m, sb.ID, guest.WatchSpec{Path: dir})
	if state := stateOf(t, m, sb.ID); state != sandbox.StateRunning {
		t.Fatalf("the sandbox is %s", state)
	}
	makeFolder(t, dir, "one")
	if name := nextName(t, w); name != "one" {
		t.Error(name)
	}
	before, _ := m.ByID(sb.ID)
	makeFolder(t, dir, "two")
	nextName(t, w)
	if after, _ := m.ByID(sb.ID); !after.LastActiveAt.Equal(before.LastActiveAt) {
		t.Error("an event counts as use")
	}
	if _, err := m.Sleep(t.Context(), sb.ID); err != nil { // ErrBusy if it held a lease
		t.Fatal(err)
	}
	if _, err := m.Wake(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	makeFolder(t, dir, "three")
	if name := nextName(t, w); name != "three" {
		t.Error(name)
	}
}

func TestResumedWatchWaitsForASleepingSandbox(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	dir := t.TempDir()
	w := watchFiles(t, m, sb.ID, guest.WatchSpec{Path: dir})
	w.Close()
	spec := guest.WatchSpec{Path: dir, Since: guest.WatchCursor{Watch: w.Started().Watch}}
	if _, err := m.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	type result struct {
		w   *sandbox.FileWatch
		err error
	}
	resume := func(ctx context.Context) <-chan result {
		done := make(chan result, 1)
		go func() {
			w, err := m.WatchFiles(ctx, sb.ID, spec)
			done <- result{w, err}
		}()
		return done
	}
	canceled, waiting := resume(ctx), resume(testkit.Context(t))
	cancel()
	if r := testkit.Receive(t, "the end of the context", canceled); !errors.Is(r.err, context.Canceled) {
		t.Errorf("got %v", r.err)
	}
	if state := stateOf(t, m, sb.ID); state != sandbox.StateAsleep {
		t.Fatalf("the sandbox is %s", state)
	}
	if _, err := m.Wake(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	r := testkit.Receive(t, "the resumed watch", waiting)
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.w.Close()
	if !r.w.Started().Resumed {
		t.Error("not resumed")
	}
	if _, err := m.Sleep(t.Context(), sb.ID); err != nil {
		t.Errorf("the resumed watch keeps the sandbox awake: %v", err)
	}
}

func TestWatchReportsWhyItsSandboxEnded(t *testing.T) {
	for _, tt := range []struct {
		name string
		end  func(*sandbox.Manager, sandbox.ID) error
		want sandbox.StoppedError
	}{
		{"stopped", func(m *sandbox.Manager, id sandbox.ID) error { _, err := m.Stop(t.Context(), id); return err },
			sandbox.StoppedError{State: sandbox.StateStopped, Reason: sandbox.ReasonRequested}},
		{"stopped by force", func(m *sandbox.Manager, id sandbox.ID) error { _, err := m.ForceStop(t.Context(), id); return err },
			sandbox.StoppedError{State: sandbox.StateStopped, Reason: sandbox.ReasonForced}},
		{"destroyed", func(m *sandbox.Manager, id sandbox.ID) error { return m.Destroy(t.Context(), id) },
			sandbox.StoppedError{State: sandbox.StateDestroyed, Reason: sandbox.ReasonRequested}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := sandboxtest.New(t)
			sb := create(t, m, "app")
			dir := t.TempDir()
			w := watchFiles(t, m, sb.ID, guest.WatchSpec{Path: dir})
			if err := tt.end(m, sb.ID); err != nil {
				t.Fatal(err)
			}
			_, err := w.Next(testkit.Context(t))
			if got, ok := errors.AsType[*sandbox.StoppedError](err); !ok || *got != tt.want {
				t.Fatalf("got %v, want %v", err, &tt.want)
			}
			if tt.want.State == sandbox.StateDestroyed {
				return
			}
			_, err = m.WatchFiles(testkit.Context(t), sb.ID, guest.WatchSpec{Path: dir, Since: guest.WatchCursor{Watch: w.Started().Watch}})
			if got, ok := errors.AsType[*sandbox.StoppedError](err); !ok || *got != tt.want {
				t.Errorf("resumed: %v", err)
			}
			if state := stateOf(t, m, sb.ID); state != sandbox.StateStopped {
				t.Errorf("the sandbox is %s", state)
			}
		})
	}
}

func TestWatchesEndWithTheNode(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := n.Manager.WatchFiles(testkit.Context(t), sb.ID, guest.WatchSpec{Path: t.TempDir(), Since: guest.WatchCursor{Watch: "aaaaaaaa"}})
		done <- err
	}()
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := testkit.Receive(t, "the end of the watch", done); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
