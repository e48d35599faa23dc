package sandbox_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

func TestColdWakeRestartsDeclaredProcesses(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	for _, c := range []struct {
		name    string
		restart guest.Restart
	}{{"web", guest.RestartOnWake}, {"once", guest.RestartNo}} {
		if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Argv: []string{"sleep", "600"}, Name: c.name, Restart: c.restart}); err != nil {
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
	running := map[string]int{}
	for _, p := range lease.Sandbox().Processes {
		if p.State == guest.ProcessRunning {
			running[p.Name] = p.PID
		}
	}
	if running["web"] == 0 || running["once"] != 0 {
		t.Fatalf("running after a cold wake: %v, want web alone", running)
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, running["web"], ""); err != nil {
		t.Fatal(err)
	}
	if sb, _ := m.ByID(sb.ID); len(sb.Declared) != 0 {
		t.Errorf("still declared after it was ended: %v", sb.Declared)
	}
}

func TestExitCodeOfAProcessIsNeverInvented(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Argv: []string{"sh", "-c", "exit 7"}, Name: "seven"}); err != nil {
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

func TestDeclaredProcessesAreBoundedWhoeverAsks(t *testing.T) {
	const most = 64
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	declare := func(name string, argv ...string) error {
		_, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Argv: argv, Name: name, Restart: guest.RestartOnWake})
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
	var pids []int
	for _, argv := range [][]string{{"true"}, {"sleep", "600"}} {
		p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Argv: argv, Name: "web", Restart: guest.RestartOnWake})
		if err != nil {
			t.Fatal(err)
		}
		if pids = append(pids, p.PID); len(pids) == 1 {
			nextEvent(t, events, sandbox.EventProcessExited)
		}
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, pids[0], ""); err != nil {
		t.Fatal(err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 1 {
		t.Errorf("declared %+v, want web", got.Declared)
	}
	if _, err := m.StopProcess(t.Context(), sb.ID, pids[1], ""); err != nil {
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
	spec := guest.ProcessSpec{Argv: []string{"sh", "-c", "exit 7"}, Name: "seven", Restart: guest.RestartAlways}
	p, err := m.StartProcess(t.Context(), sb.ID, spec)
	if err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessExited)
	if _, err := m.StopProcess(t.Context(), sb.ID, p.PID, ""); err != nil {
		t.Fatal(err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 0 {
		t.Errorf("declared %+v after it was ended", got.Declared)
	}
	// The guest gives the name away again only when there will be no other life.
	spec.Restart = guest.RestartNo
	if _, err := m.StartProcess(t.Context(), sb.ID, spec); err != nil {
		t.Errorf("it goes on after it was ended: %v", err)
	}
}

func TestSignalToWhatHasEndedEndsNothing(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	events := subscribe(t, m, sb.ID)
	p, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Argv: []string{"true"}, Name: "web", Restart: guest.RestartOnWake})
	if err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessExited)
	if _, err := m.StopProcess(t.Context(), sb.ID, p.PID, "SIGHUP"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("SIGHUP to a process that has ended: %v", err)
	}
	if got, _ := m.ByID(sb.ID); len(got.Declared) != 1 {
		t.Errorf("declared %+v, want web", got.Declared)
	}
}
