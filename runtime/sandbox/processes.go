package sandbox

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// stopProcessGrace is what a process gets between SIGTERM and SIGKILL.
const stopProcessGrace = 5 * time.Second

// StartProcess wakes the sandbox and starts a background process in it. With
// a Restart other than "never" it is declared: a cold wake starts it again, and awaits its
// Ready before it starts the next one. StartProcess does not await it.
// Errors of the guest come as *guest.Error.
func (m *Manager) StartProcess(ctx context.Context, id ID, spec guest.ProcessSpec) (guest.Process, error) {
	if spec.Restart == "" {
		spec.Restart = guest.RestartNever
	}
	if guest.IsProcessID(spec.Name) {
		return guest.Process{}, &InvalidError{Field: "name", Reason: fmt.Sprintf("%q has the form of a process id", spec.Name), Want: "use another name"}
	}
	spec.ID = guest.NewProcessID()
	lease, err := m.Acquire(ctx, id, CauseProcess)
	if err != nil {
		return guest.Process{}, err
	}
	defer lease.Release()
	b := lease.b
	declared := spec.Restart != guest.RestartNever
	if declared { // checked here too, so that a process that cannot be declared is not started
		if err := mayDeclare(b.view.Load().Declared, spec); err != nil {
			return guest.Process{}, err
		}
	}
	p, err := b.startProcess(ctx, spec)
	if err != nil {
		return guest.Process{}, err
	}
	b.noteProcess(p)
	if !declared {
		return p, nil
	}
	if err := b.declare(ctx, declaredSpec(spec, p.Name)); err != nil {
		// Not acknowledged, so it must not run on either.
		if _, stopErr := b.guest.StopProcess(context.WithoutCancel(ctx), p.ID, 0); stopErr != nil {
			b.m.log.Warn("failed to end a process that could not be declared", "sandbox", id, "error", stopErr)
		}
		return guest.Process{}, err
	}
	return p, nil
}

// startProcess starts a process under the id of its spec, even if the guest reports another.
func (b *liveSandbox) startProcess(ctx context.Context, spec guest.ProcessSpec) (guest.Process, error) {
	p, err := b.guest.StartProcess(ctx, spec)
	p.ID = spec.ID
	return p, err
}

// ProcessError: a sandbox has no process with an id or a name, or the process has ended.
// It is ErrNotFound.
type ProcessError struct {
	Process string // as in the call
	Known   *guest.Process
}

func (e *ProcessError) Error() string {
	if e.Known == nil {
		return fmt.Sprintf("there is no process %q", e.Process)
	}
	return fmt.Sprintf("process %s (%s) has ended: it %s", e.Known.ID, e.Known.Name, e.Known.Ending())
}

func (e *ProcessError) Unwrap() error { return ErrNotFound }

// Process returns the process with an id or a name, as last known. Of several with the same
// name it is the running one, or else the last. Errors: *ProcessError.
func (sb *Sandbox) Process(idOrName string) (guest.Process, error) {
	found := -1
	for i, p := range sb.Processes {
		switch {
		case p.ID == idOrName:
			return p, nil
		case p.Name == idOrName && (found < 0 || p.State == guest.ProcessRunning || sb.Processes[found].State != guest.ProcessRunning):
			found = i
		}
	}
	if found < 0 {
		return guest.Process{}, &ProcessError{Process: cutText(idOrName, maxEventText)}
	}
	return sb.Processes[found], nil
}

// StopProcess wakes the sandbox and ends a process: SIGTERM to its whole tree, SIGKILL
// after 5 s. With a signal such as "SIGHUP" it only delivers that one. A process that is
// ended is no longer declared, and not restarted.
func (m *Manager) StopProcess(ctx context.Context, id ID, idOrName, signal string) (guest.Process, error) {
	b, err := m.live(id)
	if err != nil {
		return guest.Process{}, err
	}
	view := b.view.Load()
	known, err := view.Process(idOrName)
	if err != nil {
		return guest.Process{}, err
	}
	switch ending := signal == "" || ends(signal); {
	case known.State == guest.ProcessRunning, comesBack(known, view.StartedAt):
	case !ending:
		return guest.Process{}, &ProcessError{Process: idOrName, Known: &known}
	default:
		return known, b.undeclare(ctx, known.ID)
	}
	lease, err := m.Acquire(ctx, id, CauseProcess)
	if err != nil {
		return guest.Process{}, err
	}
	defer lease.Release()
	var p guest.Process
	if signal == "" {
		p, err = b.guest.StopProcess(ctx, known.ID, stopProcessGrace)
	} else {
		p, err = b.guest.SignalProcess(ctx, known.ID, signal)
	}
	if isGuestError(err, guest.CodeNoProcess) {
		// It belongs to an earlier run, or has ended meanwhile.
		if known, err = b.view.Load().Process(known.ID); err == nil {
			err = &ProcessError{Process: idOrName, Known: &known}
		}
	}
	if err != nil {
		return guest.Process{}, err
	}
	p.ID = known.ID
	b.noteProcess(p)
	if signal == "" || ends(signal) {
		return p, b.undeclare(ctx, p.ID)
	}
	return p, nil
}

// comesBack reports whether the guest restarts a process that ended in the run of the
// container that began then.
func comesBack(p guest.Process, run time.Time) bool {
	return p.State == guest.ProcessExited && p.Restart == guest.RestartAlways && !p.StartedAt.Before(run)
}

// ends reports whether a signal ends a process by convention.
func ends(signal string) bool {
	switch strings.TrimPrefix(strings.ToUpper(signal), "SIG") {
	case "TERM", "KILL", "INT", "QUIT":
		return true
	}
	return false
}
