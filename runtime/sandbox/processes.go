package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// Bounds of the processes that a cold wake starts again. They are kept in the
// sandbox's record, which has room for 800 KiB.
const (
	maxDeclared      = 64
	maxDeclaredBytes = 128 << 10 // of all, as JSON
)

// stopProcessGrace is what a process gets between SIGTERM and SIGKILL.
const stopProcessGrace = 5 * time.Second

// StartProcess wakes the sandbox and starts a background process in it. With
// a Restart other than "never" it is declared: a cold wake starts it again.
// Errors of the guest come as *guest.Error.
func (m *Manager) StartProcess(ctx context.Context, id ID, spec guest.ProcessSpec) (guest.Process, error) {
	if spec.Restart == "" {
		spec.Restart = guest.RestartNo
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
	if spec.Restart == guest.RestartNo {
		p, err := b.startProcess(ctx, spec)
		if err == nil {
			b.noteProcess(p)
		}
		return p, err
	}
	// Asked here too, so that what cannot be declared is not even started.
	if err := mayDeclare(b.view.Load().Declared, spec); err != nil {
		return guest.Process{}, err
	}
	p, err := b.startProcess(ctx, spec)
	if err != nil {
		return guest.Process{}, err
	}
	b.noteProcess(p)
	if err := b.declare(ctx, declaredSpec(spec, p.Name)); err != nil {
		// Not acknowledged, so it must not run on either.
		if _, stopErr := b.guest.StopProcess(context.WithoutCancel(ctx), p.ID, 0); stopErr != nil {
			b.m.log.Warn("ending a process that could not be declared", "sandbox", id, "error", stopErr)
		}
		return guest.Process{}, err
	}
	return p, nil
}

// startProcess starts a process under the id of its spec, whatever the guest says.
func (b *liveSandbox) startProcess(ctx context.Context, spec guest.ProcessSpec) (guest.Process, error) {
	p, err := b.guest.StartProcess(ctx, spec)
	p.ID = spec.ID
	return p, err
}

// mayDeclare refuses a declaration for which the record has no room.
func mayDeclare(declared []guest.ProcessSpec, spec guest.ProcessSpec) error {
	declared = undeclared(declared, spec.Name)
	if len(declared) >= maxDeclared {
		return &InvalidError{Field: "restart", Reason: fmt.Sprintf("the sandbox has %d declared processes", maxDeclared), Want: `end one first, or use "never"`}
	}
	b, err := json.Marshal(append(declared, spec))
	if err != nil {
		return err
	}
	if len(b) > maxDeclaredBytes {
		return &InvalidError{Field: "restart", Reason: fmt.Sprintf("the declared processes would have %d bytes in all", len(b)),
			Want: fmt.Sprintf(`at most %d are kept: put what is long into a file, or use "never"`, maxDeclaredBytes)}
	}
	return nil
}

// ProcessError says that a sandbox has no process with an id or a name, or that it
// has ended. It is ErrNotFound.
type ProcessError struct {
	Process string // as the caller wrote it
	Known   *guest.Process
}

func (e *ProcessError) Error() string {
	if e.Known == nil {
		return fmt.Sprintf("there is no process %q", e.Process)
	}
	return fmt.Sprintf("process %s (%s) has ended: it %s", e.Known.ID, e.Known.Name, e.Known.Ending())
}

func (e *ProcessError) Unwrap() error { return ErrNotFound }

// Process returns the process that an id or a name stands for, as last known. Of
// several with one name it is the one that runs, or else the last. Errors:
// *ProcessError.
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

// StopProcess wakes the sandbox and ends a process for good: SIGTERM to its
// whole tree, SIGKILL after 5 s; or, with a signal such as "SIGHUP", only
// delivers that one. A process that is ended is no longer declared.
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
	var refused *guest.Error
	if errors.As(err, &refused) && refused.Code == guest.CodeNoProcess {
		// It was of the run before, or has ended meanwhile.
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

// declares reports whether a cold wake starts the process with that id again.
func (sb *Sandbox) declares(id string) bool {
	return slices.ContainsFunc(sb.Declared, func(spec guest.ProcessSpec) bool { return spec.ID == id })
}

// comesBack says whether a process that ended in the run of the container that
// began then is started again by its guest.
func comesBack(p guest.Process, run time.Time) bool {
	return p.State == guest.ProcessExited && p.Restart == guest.RestartAlways && !p.StartedAt.Before(run)
}

// ends says whether a signal is meant to end a process.
func ends(signal string) bool {
	switch strings.TrimPrefix(strings.ToUpper(signal), "SIG") {
	case "TERM", "KILL", "INT", "QUIT":
		return true
	}
	return false
}

// restartDeclared starts the declared processes after a cold wake. One that
// does not start is told in the timeline and keeps nobody else from starting.
func (b *liveSandbox) restartDeclared(ctx context.Context) {
	b.startDeclared(ctx, b.view.Load().Declared)
}

// startMissing starts the declared processes that the guest, which an earlier run of
// the node started, has never had: that run ended in the middle of its cold wake.
// One that has ended by itself since then stays ended.
func (b *liveSandbox) startMissing(ctx context.Context) error {
	declared := b.view.Load().Declared
	if len(declared) == 0 {
		return nil
	}
	started, err := b.guest.Processes(ctx)
	if err != nil {
		return fmt.Errorf("list its processes: %w", err)
	}
	for _, p := range started {
		b.noteProcess(p)
	}
	b.startDeclared(ctx, slices.DeleteFunc(slices.Clone(declared), func(spec guest.ProcessSpec) bool {
		return slices.ContainsFunc(started, func(p guest.Process) bool { return p.Name == spec.Name })
	}))
	return nil
}

func (b *liveSandbox) startDeclared(ctx context.Context, declared []guest.ProcessSpec) {
	for _, spec := range declared {
		p, err := b.startProcess(ctx, spec)
		if err != nil {
			b.m.log.Warn("starting a declared process", "sandbox", b.id, "process", spec.Name, "error", err)
			b.emit(Event{Type: EventWakeFailed, Error: fmt.Sprintf("declared process %s did not start: %v", spec.Name, err)})
			continue
		}
		b.noteProcess(p)
	}
}

func (b *liveSandbox) declare(ctx context.Context, spec guest.ProcessSpec) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.view.Load().Declared
	if err := mayDeclare(before, spec); err != nil {
		return err
	}
	return b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Declared = append(undeclared(before, spec.Name), spec) },
		func(sb *Sandbox) { sb.Declared = before })
}

// undeclare has the process with that id not start again. Another one may have its
// name, and a declaration of its own.
func (b *liveSandbox) undeclare(ctx context.Context, id string) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	view := b.view.Load()
	before := view.Declared
	if !view.declares(id) {
		return nil
	}
	return b.changeSaved(ctx,
		func(sb *Sandbox) {
			sb.Declared = slices.DeleteFunc(slices.Clone(before), func(spec guest.ProcessSpec) bool { return spec.ID == id })
		},
		func(sb *Sandbox) { sb.Declared = before })
}

func undeclared(specs []guest.ProcessSpec, name string) []guest.ProcessSpec {
	return slices.DeleteFunc(slices.Clone(specs), func(s guest.ProcessSpec) bool { return s.Name == name })
}
