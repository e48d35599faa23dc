package sandbox

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// waitGrace is how long the guest may take to respond after the timeout of a wait. Its
	// sandbox may have been put to sleep meanwhile.
	waitGrace = 2 * time.Second
	// A program that opens and closes ports in a loop does not fill the timeline: portEventBurst
	// events, and one every portEventInterval after that. The list of ports is always complete.
	portEventBurst    = 100
	portEventInterval = time.Second
)

// WaitResult is how a wait for a process ended.
type WaitResult struct {
	guest.WaitResult
	// Output has the last lines of the process if the condition was not met.
	Output string
}

// WaitProcess wakes the sandbox and waits for a condition of a background process. It
// returns early when the process has ended. The sandbox stays awake meanwhile. Errors:
// *ProcessError, and *guest.Error from the guest.
func (m *Manager) WaitProcess(ctx context.Context, id ID, idOrName string, w guest.Wait) (WaitResult, error) {
	b, err := m.live(id)
	if err != nil {
		return WaitResult{}, err
	}
	view := b.view.Load()
	known, err := view.Process(idOrName)
	if err != nil {
		return WaitResult{}, err
	}
	if !view.mayRun(known) {
		return endedBefore(known, w), nil
	}
	lease, err := m.Acquire(ctx, id, CauseProcess)
	if err != nil {
		return WaitResult{}, err
	}
	defer lease.Release()
	waitCtx, cancel := context.WithTimeout(ctx, w.Timeout+waitGrace)
	defer cancel()
	result, err := b.guest.WaitProcess(waitCtx, known.ID, w)
	switch {
	case isGuestError(err, guest.CodeNoProcess): // it belongs to an earlier run
		if known, err = b.view.Load().Process(known.ID); err != nil {
			return WaitResult{}, err
		}
		return endedBefore(known, w), nil
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		known, err = b.view.Load().Process(known.ID)
		return WaitResult{WaitResult: guest.WaitResult{Outcome: guest.WaitExpired, Process: known, Detail: "the sandbox did not respond at the end of the wait; it may have been asleep"}}, err
	case err != nil:
		return WaitResult{}, err
	}
	result.Process.ID = known.ID
	b.noteProcess(result.Process)
	r := WaitResult{WaitResult: result}
	if result.Outcome != guest.WaitMet {
		r.Output = lease.LastOutput(ctx, known.ID)
	}
	return r, nil
}

// mayRun reports whether the guest of a woken sandbox may know the process.
func (sb *Sandbox) mayRun(p guest.Process) bool {
	declared := slices.ContainsFunc(sb.Declared, func(spec guest.ProcessSpec) bool { return spec.ID == p.ID })
	return declared || (sb.State == StateRunning || sb.State == StateAsleep) && !p.StartedAt.Before(sb.StartedAt)
}

// endedBefore is the result of a wait for a process that ended before the sandbox last
// started.
func endedBefore(p guest.Process, w guest.Wait) WaitResult {
	r := WaitResult{WaitResult: guest.WaitResult{Outcome: guest.WaitExited, Process: p, Detail: "it ran before the sandbox was last started"}}
	if w.Exit {
		r.Outcome = guest.WaitMet
	}
	return r
}

// shortenListening cuts the texts of ports. The client has checked the rest.
func shortenListening(list []guest.Listening) {
	for i := range list {
		list[i].Program = cutText(list[i].Program, maxKnownID)
	}
}

// noteListening stores the ports as last known, and adds those that were opened and closed
// to the timeline.
func (b *liveSandbox) noteListening(now []guest.Listening) {
	shortenListening(now)
	var before []guest.Listening
	b.change(func(sb *Sandbox) {
		now = sb.withoutKernels(now)
		before, sb.Listening = sb.Listening, now
	})
	if reflect.DeepEqual(before, now) {
		return
	}
	b.m.journal.dirty(b)
	b.emitPorts(EventPortClosed, before, now)
	b.emitPorts(EventPortOpened, now, before)
}

// emitPorts adds an event for each port of list that the other list does not have, or not of
// the same process.
func (b *liveSandbox) emitPorts(t EventType, list, other []guest.Listening) {
	for _, l := range list {
		same := func(o guest.Listening) bool {
			return o.Port == l.Port && (o.PID == l.PID || o.PID == 0 || l.PID == 0)
		}
		if !slices.ContainsFunc(other, same) && b.portEvents.Allow() {
			b.emit(Event{Type: t, Port: l.Port, Listening: &l})
		}
	}
}
