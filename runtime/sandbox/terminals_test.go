package sandbox_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func openTerminal(t *testing.T, m *sandbox.Manager, id sandbox.ID, terminal string, argv ...string) {
	t.Helper()
	if _, err := m.OpenTerminal(t.Context(), id, guest.TerminalSpec{ID: terminal, Command: guest.Command{Argv: argv}}); err != nil {
		t.Fatal(err)
	}
}

// terminalsOf are the states of the terminals as last known, with their reasons.
func terminalsOf(t *testing.T, m *sandbox.Manager, id sandbox.ID) string {
	t.Helper()
	sb, ok := m.ByID(id)
	if !ok {
		t.Fatal("the sandbox is gone")
	}
	var list []string
	for _, term := range sb.Terminals {
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s %s", term.ID, term.State, term.Reason)))
	}
	return strings.Join(list, ", ")
}

func TestTerminalsAreKnownWithoutAWake(t *testing.T) {
	node := sandboxtest.Open(t, nil)
	m := node.Manager
	sb := create(t, m, "app")
	openTerminal(t, m, sb.ID, "cat", "cat")
	openTerminal(t, m, sb.ID, "seven", "sh", "-c", "exit 7")
	const ended = "cat running, seven exited"
	testkit.Eventually(t, "the end of a terminal is known", func() bool { return terminalsOf(t, m, sb.ID) == ended })
	mustSleep(t, m, sb.ID)
	node.Crash(t, func() {})
	m = node.Manager
	if got := terminalsOf(t, m, sb.ID); got != ended || stateOf(t, m, sb.ID) != sandbox.StateAsleep {
		t.Errorf("after a crash of the node: %s, %s", got, stateOf(t, m, sb.ID))
	}
	// As typed input does.
	lease, err := m.Rouse(t.Context(), sb.ID, sandbox.CauseTerminal)
	if err != nil {
		t.Fatal(err)
	}
	lease.Release()
	stream, err := m.AttachTerminal(t.Context(), sb.ID, "cat", 0)
	if err != nil {
		t.Fatal(err)
	}
	stream.Close()
	if closed, err := m.CloseTerminal(t.Context(), sb.ID, "cat"); err != nil || closed.State != guest.ProcessExited {
		t.Errorf("closed %+v, %v", closed, err)
	}
	if got := terminalsOf(t, m, sb.ID); got != "seven exited" {
		t.Errorf("after a terminal was closed: %s", got)
	}
}

func TestTerminalsAreLostWithTheirContainer(t *testing.T) {
	node := sandboxtest.Open(t, nil)
	m := node.Manager
	sb := create(t, m, "app")
	openTerminal(t, m, sb.ID, "cat", "cat")
	node.Crash(t, func() { node.Engine.Kill(t, sb.ID) })
	m = node.Manager
	sb, _ = m.ByID(sb.ID)
	if sb.State != sandbox.StateStopped || len(sb.Terminals) != 1 || sb.Terminals[0].State == guest.ProcessRunning || sb.Terminals[0].Reason != sandbox.ReasonContainerExited {
		t.Fatalf("%s with %+v", sb.State, sb.Terminals)
	}
	var missing *sandbox.TerminalError
	if _, err := m.AttachTerminal(t.Context(), sb.ID, "cat", 0); !errors.As(err, &missing) || missing.Reason != sandbox.ReasonContainerExited {
		t.Errorf("attached: %v", err)
	}
	if _, err := m.AttachTerminal(t.Context(), sb.ID, "other", 0); !errors.As(err, &missing) || missing.Reason != "" {
		t.Errorf("attached: %v", err)
	}
	if got := stateOf(t, m, sb.ID); got != sandbox.StateStopped {
		t.Errorf("the sandbox is %s", got)
	}
	openTerminal(t, m, sb.ID, "cat", "cat")
	if got := terminalsOf(t, m, sb.ID); got != "cat running" {
		t.Errorf("after it was opened again: %s", got)
	}
}

// A terminal that the guest has forgotten is forgotten here, too.
func TestUnknownTerminalIsForgotten(t *testing.T) {
	m := sandboxtest.New(t)
	sb := create(t, m, "app")
	openTerminal(t, m, sb.ID, "cat", "cat")
	lease := acquire(t, m, sb.ID)
	if _, err := lease.Guest().CloseTerminal(t.Context(), "cat", time.Second); err != nil {
		t.Fatal(err)
	}
	lease.Release()
	var missing *sandbox.TerminalError
	if _, err := m.AttachTerminal(t.Context(), sb.ID, "cat", -1); !errors.As(err, &missing) {
		t.Errorf("attached: %v", err)
	}
	if got := terminalsOf(t, m, sb.ID); got != "" {
		t.Errorf("known are %s", got)
	}
}

// A reader of events that was too slow may have missed that a terminal was closed.
func TestClosedTerminalIsForgottenAlthoughItsEventWasMissed(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	events := make(chan guest.Event)
	n.Engine.HandleGuest(hostile(sends(events)))
	sb := create(t, n.Manager, "app")
	send := func(id string) {
		term := guest.Terminal{ID: id, PID: 7, Command: "sh", State: guest.ProcessRunning, StartedAt: time.Now()}
		events <- guest.Event{Type: guest.EventTerminal, Terminal: &term}
	}
	send("lost")
	testkit.Eventually(t, "the terminal is known", func() bool { return terminalsOf(t, n.Manager, sb.ID) == "lost running" })
	mustStop(t, n.Manager, sb.ID)
	events = make(chan guest.Event) // the stream of the guest that was stopped may still take events from the other one
	n.Engine.HandleGuest(hostile(sends(events)))
	acquire(t, n.Manager, sb.ID).Release()
	send("main")
	send("build")
	const lost = "lost lost requested"
	testkit.Eventually(t, "all terminals are known", func() bool {
		return terminalsOf(t, n.Manager, sb.ID) == lost+", main running, build running"
	})
	events <- guest.Event{Type: guest.EventTerminals, Terminals: []string{"build"}}
	testkit.Eventually(t, "the closed terminal is forgotten", func() bool { return terminalsOf(t, n.Manager, sb.ID) == lost+", build running" })
	events <- guest.Event{Type: guest.EventTerminals}
	testkit.Eventually(t, "no terminal runs", func() bool { return terminalsOf(t, n.Manager, sb.ID) == lost })
}
