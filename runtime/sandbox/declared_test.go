package sandbox_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// declare starts a process that prints "up" once the file exists.
func declare(t *testing.T, m *sandbox.Manager, id sandbox.ID, name, file string, ready *guest.Wait) {
	t.Helper()
	command := fmt.Sprintf("until [ -e %q ]; do sleep 0.01; done; echo up; exec sleep 100000", file)
	if _, err := m.StartProcess(t.Context(), id, guest.ProcessSpec{Name: name, Command: guest.Command{Command: command}, Restart: guest.RestartOnWake, Ready: ready}); err != nil {
		t.Fatal(err)
	}
}

func running(m *sandbox.Manager, id sandbox.ID) (names []string) {
	sb, _ := m.ByID(id)
	for _, p := range sb.Processes {
		if p.State == guest.ProcessRunning {
			names = append(names, p.Name)
		}
	}
	slices.Sort(names)
	return names
}

func failures(t *testing.T, m *sandbox.Manager, id sandbox.ID) (list []string) {
	t.Helper()
	events, err := m.Events(t.Context(), id, 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, ev := range events {
		if ev.Type == sandbox.EventWakeFailed {
			list = append(list, ev.Error)
		}
	}
	return list
}

// The wake itself ends with the start of the first process: commands do not wait for the
// others.
func TestColdWakeStartsTheNextProcessOnceThePreviousIsReady(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "ready")
	declare(t, m, sb.ID, "database", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	declare(t, m, sb.ID, "worker", file, nil)
	declare(t, m, sb.ID, "web", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	mustStop(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	if got := running(m, sb.ID); !slices.Equal(got, []string{"database"}) {
		t.Errorf("running before the database is ready: %v", got)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "all run", func() bool {
		return slices.Equal(running(m, sb.ID), []string{"database", "web", "worker"})
	})
	if got := failures(t, m, sb.ID); len(got) != 0 {
		t.Errorf("failures: %q", got)
	}
}

func TestProcessThatIsNotReadyInTimeDoesNotPreventTheNext(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	never := filepath.Join(t.TempDir(), "never")
	declare(t, m, sb.ID, "slow", never, &guest.Wait{Log: "^up$", Timeout: time.Millisecond})
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "migrate", Command: guest.Command{Command: "exit 3"}, Restart: guest.RestartOnWake, Ready: &guest.Wait{Port: 9, Timeout: time.Minute}}); err != nil {
		t.Fatal(err)
	}
	declare(t, m, sb.ID, "web", never, nil)
	mustStop(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	testkit.Eventually(t, "the last one runs", func() bool { return slices.Contains(running(m, sb.ID), "web") })
	got := failures(t, m, sb.ID)
	if len(got) != 2 || !strings.HasPrefix(got[0], "declared process slow is not ready: ") || !strings.HasPrefix(got[1], "declared process migrate is not ready: ") {
		t.Errorf("failures: %q", got)
	}
}

func TestPortIsPendingUntilItsProcessIsReady(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "ready")
	declare(t, m, sb.ID, "database", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "web", Command: guest.Command{Argv: []string{"sleep", "100000"}}, Restart: guest.RestartOnWake,
		Ready: &guest.Wait{HTTP: &guest.WaitHTTP{Port: 9, Path: "/", Status: "200"}, Timeout: time.Millisecond}}); err != nil {
		t.Fatal(err)
	}
	mustStop(t, m, sb.ID)
	lease := acquire(t, m, sb.ID)
	defer lease.Release()
	ready := lease.Pending(9)
	if ready == nil || lease.Pending(10) != nil {
		t.Fatalf("pending: port 9 %v, port 10 %v", ready != nil, lease.Pending(10) != nil)
	}
	select {
	case <-ready:
		t.Error("the port is ready before its process has started")
	default:
	}
	if m.Listens(t.Context(), sb.ID, 9) {
		t.Error("the port is said to listen")
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.Closed(t, "the wait for the port", ready)
	testkit.Eventually(t, "nothing is pending", func() bool { return lease.Pending(9) == nil })
}

func TestStopEndsTheStartOfProcesses(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	never := filepath.Join(t.TempDir(), "never")
	declare(t, m, sb.ID, "database", never, &guest.Wait{Log: "^up$", Timeout: time.Hour})
	declare(t, m, sb.ID, "web", never, &guest.Wait{Port: 9, Timeout: time.Hour})
	mustStop(t, m, sb.ID)
	lease := acquire(t, m, sb.ID)
	ready := lease.Pending(9)
	lease.Release()
	mustStop(t, m, sb.ID)
	testkit.Closed(t, "the wait for the port", ready)
	if got := failures(t, m, sb.ID); len(got) != 0 {
		t.Errorf("failures: %q", got)
	}
	acquire(t, m, sb.ID).Release()
	if got := running(m, sb.ID); !slices.Equal(got, []string{"database"}) {
		t.Errorf("running after the next wake: %v", got)
	}
}

// A sandbox that is put to sleep by request goes on where it was, and its time asleep does not
// count.
func TestSleepInterruptsTheStartOfProcesses(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "ready")
	declare(t, m, sb.ID, "database", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	declare(t, m, sb.ID, "web", file, nil)
	mustStop(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	mustSleep(t, m, sb.ID)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := running(m, sb.ID); !slices.Equal(got, []string{"database"}) {
		t.Errorf("running while it sleeps: %v", got)
	}
	acquire(t, m, sb.ID).Release()
	testkit.Eventually(t, "both run", func() bool {
		return slices.Equal(running(m, sb.ID), []string{"database", "web"})
	})
	if got := failures(t, m, sb.ID); len(got) != 0 {
		t.Errorf("failures: %q", got)
	}
}

func TestSandboxIsNotIdleWhileProcessesStart(t *testing.T) {
	t.Parallel()
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "ready")
	declare(t, m, sb.ID, "database", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	mustStop(t, m, sb.ID)
	second := sandbox.Duration(time.Second)
	update(t, m, sb.ID, sandbox.Patch{SleepAfter: &second})
	events := subscribe(t, m, sb.ID)
	acquire(t, m, sb.ID).Release()
	testkit.Eventually(t, "sleep_after passes", func() bool {
		sb, _ := m.ByID(sb.ID)
		return time.Since(sb.LastActiveAt) > 1500*time.Millisecond
	})
	if got := stateOf(t, m, sb.ID); got != sandbox.StateRunning {
		t.Errorf("it is %s while its processes start", got)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventSlept)
}

// A node that is killed while processes start goes on with those that are missing.
func TestStartOfProcessesGoesOnInTheNextNode(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	file := filepath.Join(t.TempDir(), "ready")
	declare(t, n.Manager, sb.ID, "database", file, &guest.Wait{Log: "^up$", Timeout: time.Minute})
	declare(t, n.Manager, sb.ID, "web", file, nil)
	mustStop(t, n.Manager, sb.ID)
	acquire(t, n.Manager, sb.ID).Release()
	n.Crash(t, func() {})
	testkit.Eventually(t, "both run", func() bool {
		return slices.Equal(running(n.Manager, sb.ID), []string{"database", "web"})
	})
}

func TestProcessThatDoesNotStartIsReportedOnce(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte("#!/bin/sh\nexec sleep 100000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := m.StartProcess(t.Context(), sb.ID, guest.ProcessSpec{Name: "gone", Command: guest.Command{Argv: []string{file}}, Restart: guest.RestartOnWake,
		Ready: &guest.Wait{Port: 9, Timeout: time.Hour}}); err != nil {
		t.Fatal(err)
	}
	declare(t, m, sb.ID, "web", file, nil)
	mustStop(t, m, sb.ID)
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	lease := acquire(t, m, sb.ID)
	defer lease.Release()
	if got := running(m, sb.ID); !slices.Equal(got, []string{"web"}) {
		t.Errorf("running: %v", got)
	}
	if lease.Pending(9) != nil {
		t.Error("a process that did not start is pending")
	}
	if got := failures(t, m, sb.ID); len(got) != 1 || !strings.HasPrefix(got[0], "declared process gone did not start: ") {
		t.Errorf("failures: %q", got)
	}
}
