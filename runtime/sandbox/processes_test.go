package sandbox_test

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func TestColdWakeRestartsDeclaredProcesses(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	for _, c := range []struct {
		name    string
		restart guest.Restart
	}{{"web", guest.RestartOnWake}, {"once", guest.RestartNever}} {
		if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "600"}}, Name: c.name, Restart: c.restart}); err != nil {
			t.Fatal(err)
		}
	}
	stopped, err := m.Stop(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range stopped.Processes {
		if p.State == guest.ProcessRunning {
			t.Errorf("%s runs in a stopped sandbox", p.Name)
		}
		if p.State == guest.ProcessLost && p.ExitCode != nil {
			t.Errorf("%s is lost and yet has exit code %d", p.Name, *p.ExitCode)
		}
	}
	lease := acquire(t, m, sb.ID)
	defer lease.Release()
	running := map[string]string{}
	for _, p := range lease.Sandbox().Processes {
		if p.State == guest.ProcessRunning {
			running[p.Name] = p.ID
		}
	}
	if running["web"] == "" || running["once"] != "" {
		t.Fatalf("running after a cold wake: %v, want web alone", running)
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, running["web"], ""); err != nil {
		t.Fatal(err)
	}
	if sb, _ := m.ByID(sb.ID); len(sb.Declared) != 0 {
		t.Errorf("still declared after it was ended: %v", sb.Declared)
	}
}

func TestUnknownExitCodeIsNotReported(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sh", "-c", "exit 7"}}, Name: "seven"}); err != nil {
		t.Fatal(err)
	}
	ev := nextEvent(t, events, sandbox.EventProcessExited)
	if ev.Process.ExitCode == nil || *ev.Process.ExitCode != 7 {
		t.Errorf("exited %+v", ev.Process)
	}
	sb, _ = m.ByID(sb.ID)
	if len(sb.Processes) != 1 || sb.Processes[0].State != guest.ProcessExited {
		t.Errorf("as last known: %+v", sb.Processes)
	}
}

func TestDeclaredProcessesAreBounded(t *testing.T) {
	const most = 64
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	declare := func(name string, argv ...string) error {
		_, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: argv}, Name: name, Restart: guest.RestartOnWake})
		return err
	}
	if err := declare("short", "true"); err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessExited)
	var refused atomic.Int32
	var wg sync.WaitGroup
	for i := range most + 10 {
		wg.Go(func() {
			err := declare(fmt.Sprint("p", i), "sleep", "600")
			var invalid *sandbox.InvalidError
			if errors.As(err, &invalid) {
				refused.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, _ := m.ByID(sb.ID); len(got.Declared) != most || refused.Load() != 11 {
		t.Errorf("%d are declared and %d were refused, want %d and 11", len(got.Declared), refused.Load(), most)
	}
	// It takes the place of the one that has its name.
	if err := declare("short", "true"); err != nil {
		t.Errorf("declaring one of the 64 again: %v", err)
	}
}

func TestEndingAnEarlierRunKeepsTheDeclarationOfTheNext(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	var ids []string
	for _, argv := range [][]string{{"true"}, {"sleep", "600"}} {
		p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: argv}, Name: "web", Restart: guest.RestartOnWake})
		if err != nil {
			t.Fatal(err)
		}
		if ids = append(ids, p.ID); len(ids) == 1 {
			nextEvent(t, events, sandbox.EventProcessExited)
		}
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, ids[0], ""); err != nil {
		t.Fatal(err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 1 {
		t.Errorf("declared %+v, want web", got.Declared)
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, ids[1], ""); err != nil {
		t.Fatal(err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 0 {
		t.Errorf("declared %+v after it was ended", got.Declared)
	}
}

func TestProcessThatWaitsForItsRestartCanBeEnded(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	spec := guest.ProcessSpec{Command: guest.Command{Argv: []string{"sh", "-c", "exit 7"}}, Name: "seven", Restart: guest.RestartAlways}
	p, err := m.StartProcess(t.Context(), sb.ID, spec)
	if err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessExited)
	if _, err := m.StopProcess(t.Context(), sb.ID, p.ID, ""); err != nil {
		t.Fatal(err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 0 {
		t.Errorf("declared %+v after it was ended", got.Declared)
	}
	// The guest gives the name away again only when there will be no other life.
	spec.Restart = guest.RestartNever
	if _, err := m.StartProcess(t.Context(), sb.ID, spec); err != nil {
		t.Errorf("it goes on after it was ended: %v", err)
	}
}

func TestSignalToAnEndedProcessChangesNothing(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"true"}}, Name: "web", Restart: guest.RestartOnWake})
	if err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessExited)
	if _, err := m.StopProcess(t.Context(), sb.ID, p.ID, "SIGHUP"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("SIGHUP to a process that has ended: %v", err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 1 {
		t.Errorf("declared %+v, want web", got.Declared)
	}
}

// A node that was killed in the middle of a cold wake has started the container, and
// perhaps some of the declared processes.
func TestAdoptionFinishesAColdWake(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	for _, name := range []string{"first", "second", "over"} {
		argv := []string{"sleep", "100000"}
		if name == "over" {
			argv = []string{"true"}
		}
		if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: name, Command: guest.Command{Argv: argv}, Restart: guest.RestartOnWake}); err != nil {
			t.Fatal(err)
		}
	}
	mustStop(t, m, sb.ID)
	before, _ := m.ByID(sb.ID)
	const end = "over has ended"
	n.Crash(t, func() {
		if _, err := n.Engine.Start(t.Context(), sb.ID, sandbox.Limits{}); err != nil {
			t.Fatal(err)
		}
		inside := guest.NewClient(filepath.Join(n.RunDir(sb.ID), guest.SocketName))
		defer inside.Close()
		for _, i := range []int{0, 2} {
			if _, err := inside.StartProcess(t.Context(), before.Declared[i]); err != nil {
				t.Fatal(err)
			}
		}
		testkit.Eventually(t, end, func() bool {
			list, err := inside.Processes(t.Context())
			return err == nil && len(list) == 2 && list[1].State == guest.ProcessExited
		})
	})
	m = n.Manager
	got, _ := m.ByID(sb.ID)
	if got.State != sandbox.StateRunning || !got.StartedAt.After(before.StartedAt) {
		t.Errorf("it is %s, started at %v, before that at %v", got.State, got.StartedAt, before.StartedAt)
	}
	lease := acquire(t, m, sb.ID)
	defer lease.Release()
	list, err := lease.Guest().Processes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	states := map[string][]guest.ProcessState{}
	for _, p := range list {
		states[p.Name] = append(states[p.Name], p.State)
	}
	want := map[string][]guest.ProcessState{"first": {guest.ProcessRunning}, "second": {guest.ProcessRunning}, "over": {guest.ProcessExited}}
	if !maps.EqualFunc(states, want, slices.Equal) {
		t.Errorf("processes: %v, want %v", states, want)
	}
	events, err := m.Events(t.Context(), sb.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(events, func(ev sandbox.Event) bool { return ev.Type == sandbox.EventWoke && ev.Kind == sandbox.WakeCold }) {
		t.Errorf("its wake is not in the timeline: %+v", events)
	}
}

// A process keeps its id over cold wakes, whatever pid it gets; one that is not
// started again keeps its id, too, and lends it to no other.
func TestProcessesKeepTheirIDsOverColdWakes(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	start := func(name string, restart guest.Restart) guest.Process {
		t.Helper()
		p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "600"}}, Name: name, Restart: restart})
		if err != nil {
			t.Fatal(err)
		}
		if !guest.IsProcessID(p.ID) {
			t.Fatalf("the id is %q", p.ID)
		}
		return p
	}
	once, web := start("once", guest.RestartNever), start("web", guest.RestartOnWake)
	seen := map[string]bool{once.ID: true, web.ID: true}
	for range 3 {
		if _, err := m.Stop(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		acquire(t, m, sb.ID).Release()
		other := start("", guest.RestartNever)
		if seen[other.ID] {
			t.Errorf("the id %s was used again", other.ID)
		}
		seen[other.ID] = true
		now, _ := m.ByID(sb.ID)
		for _, idOrName := range []string{web.ID, "web"} {
			if p, err := now.Process(idOrName); err != nil || p.ID != web.ID || p.State != guest.ProcessRunning {
				t.Errorf("%s is %+v, %v", idOrName, p, err)
			}
		}
		if p, err := now.Process(once.ID); err != nil || p.Name != "once" || p.State == guest.ProcessRunning {
			t.Errorf("once is %+v, %v", p, err)
		}
		if len(now.Processes) != len(seen) {
			t.Errorf("%d processes are known, want %d", len(now.Processes), len(seen))
		}
	}
	// The id of an ended process never names another one, even for a signal.
	var missing *sandbox.ProcessError
	if _, err := m.StopProcess(t.Context(), sb.ID, once.ID, "SIGHUP"); !errors.As(err, &missing) || !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("SIGHUP to a process that has ended: %v", err)
	}
	if p, err := m.StopProcess(t.Context(), sb.ID, once.ID, ""); err != nil || p.ID != once.ID || p.State == guest.ProcessRunning {
		t.Errorf("ending a process that has ended: %+v, %v", p, err)
	}
	if p, err := m.StopProcess(t.Context(), sb.ID, "web", ""); err != nil || p.ID != web.ID || p.State != guest.ProcessExited {
		t.Errorf("ending web: %+v, %v", p, err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 0 {
		t.Errorf("declared %+v after it was ended", got.Declared)
	}
}
