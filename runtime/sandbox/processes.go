package sandbox

import (
	"context"
	"encoding/json"
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
// a Restart other than "no" it is declared: a cold wake starts it again.
// Errors of the guest come as *guest.Error.
func (m *Manager) StartProcess(ctx context.Context, id ID, spec guest.ProcessSpec) (guest.Process, error) {
	if spec.Restart == "" {
		spec.Restart = guest.RestartNo
	}
	lease, err := m.Acquire(ctx, id, CauseProcess)
	if err != nil {
		return guest.Process{}, err
	}
	defer lease.Release()
	b := lease.b
	if spec.Restart == guest.RestartNo {
		p, err := b.guest.StartProcess(ctx, spec)
		if err == nil {
			b.noteProcess(p)
		}
		return p, err
	}
	// Asked here too, so that what cannot be declared is not even started.
	if err := mayDeclare(b.view.Load().Declared, spec); err != nil {
		return guest.Process{}, err
	}
	p, err := b.guest.StartProcess(ctx, spec)
	if err != nil {
		return guest.Process{}, err
	}
	b.noteProcess(p)
	if err := b.declare(ctx, declaredSpec(spec, p.Name)); err != nil {
		// Not acknowledged, so it must not run on either.
		if _, stopErr := b.guest.StopProcess(context.WithoutCancel(ctx), p.PID, 0); stopErr != nil {
			b.m.log.Warn("ending a process that could not be declared", "sandbox", id, "error", stopErr)
		}
		return guest.Process{}, err
	}
	return p, nil
}

// mayDeclare refuses a declaration for which the record has no room.
func mayDeclare(declared []guest.ProcessSpec, spec guest.ProcessSpec) error {
	declared = undeclared(declared, spec.Name)
	if len(declared) >= maxDeclared {
		return &InvalidError{Field: "restart", Reason: fmt.Sprintf("the sandbox has %d declared processes", maxDeclared), Want: `end one first, or use "no"`}
	}
	b, err := json.Marshal(append(declared, spec))
	if err != nil {
		return err
	}
	if len(b) > maxDeclaredBytes {
		return &InvalidError{Field: "restart", Reason: fmt.Sprintf("the declared processes would have %d bytes in all", len(b)),
			Want: fmt.Sprintf(`at most %d are kept: put what is long into a file, or use "no"`, maxDeclaredBytes)}
	}
	return nil
}

// StopProcess wakes the sandbox and ends a process for good: SIGTERM to its
// whole tree, SIGKILL after 5 s; or, with a signal such as "SIGHUP", only
// delivers that one. A process that is ended is no longer declared.
func (m *Manager) StopProcess(ctx context.Context, id ID, pid int, signal string) (guest.Process, error) {
	b, err := m.box(id)
	if err != nil {
		return guest.Process{}, err
	}
	started := b.view.Load().StartedAt
	known, ok := b.process(pid)
	if !ok {
		return guest.Process{}, fmt.Errorf("process %d of sandbox %s: %w", pid, b, ErrNotFound)
	}
	switch ending := signal == "" || ends(signal); {
	case known.State == guest.ProcessRunning, !b.succeeded(known) && comesBack(known, started):
	case !ending:
		return guest.Process{}, fmt.Errorf("process %d of sandbox %s has ended: %w", pid, b, ErrNotFound)
	case b.succeeded(known):
		return known, nil
	default:
		return known, b.undeclare(ctx, known.Name)
	}
	lease, err := m.Acquire(ctx, id, CauseProcess)
	if err != nil {
		return guest.Process{}, err
	}
	defer lease.Release()
	if !lease.Sandbox().StartedAt.Equal(started) {
		// The pid was of the run before and may now be another's.
		if known, ok = b.processNamed(known.Name); !ok {
			return guest.Process{}, fmt.Errorf("process %d of sandbox %s ended when it stopped: %w", pid, b, ErrNotFound)
		}
	}
	var p guest.Process
	if signal == "" {
		p, err = b.guest.StopProcess(ctx, known.PID, stopProcessGrace)
	} else {
		p, err = b.guest.SignalProcess(ctx, known.PID, signal)
	}
	if err != nil {
		return guest.Process{}, err
	}
	b.noteProcess(p)
	if signal == "" || ends(signal) {
		return p, b.undeclare(ctx, p.Name)
	}
	return p, nil
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
func (b *box) restartDeclared(ctx context.Context) { b.startDeclared(ctx, b.view.Load().Declared) }

// startMissing starts the declared processes that the guest, which an earlier run of
// the node started, has never had: that run ended in the middle of its cold wake.
// One that has ended by itself since then stays ended.
func (b *box) startMissing(ctx context.Context) error {
	declared := b.view.Load().Declared
	if len(declared) == 0 {
		return nil
	}
	started, err := b.guest.Processes(ctx)
	if err != nil {
		return fmt.Errorf("list its processes: %w", err)
	}
	b.startDeclared(ctx, slices.DeleteFunc(slices.Clone(declared), func(spec guest.ProcessSpec) bool {
		return slices.ContainsFunc(started, func(p guest.Process) bool { return p.Name == spec.Name })
	}))
	return nil
}

func (b *box) startDeclared(ctx context.Context, declared []guest.ProcessSpec) {
	for _, spec := range declared {
		p, err := b.guest.StartProcess(ctx, spec)
		if err != nil {
			b.m.log.Warn("starting a declared process", "sandbox", b.id, "process", spec.Name, "error", err)
			b.emit(Event{Type: EventWakeFailed, Reason: fmt.Sprintf("declared process %s did not start: %v", spec.Name, err)})
			continue
		}
		b.noteProcess(p)
	}
}

// process returns a process by pid, as last known; a running one wins over
// one of an earlier run with the same pid.
func (b *box) process(pid int) (guest.Process, bool) {
	list := b.view.Load().Processes
	for _, p := range slices.Backward(list) {
		if p.PID == pid {
			return p, true
		}
	}
	return guest.Process{}, false
}

func (b *box) processNamed(name string) (guest.Process, bool) {
	for _, p := range slices.Backward(b.view.Load().Processes) {
		if p.Name == name && p.State == guest.ProcessRunning {
			return p, true
		}
	}
	return guest.Process{}, false
}

// succeeded says whether a later process has the name of one that has ended. The
// declaration is then that one's.
func (b *box) succeeded(p guest.Process) bool {
	for _, other := range b.view.Load().Processes {
		if other.Name == p.Name && other.PID != p.PID && other.StartedAt.After(p.StartedAt) {
			return true
		}
	}
	return false
}

func (b *box) declare(ctx context.Context, spec guest.ProcessSpec) error {
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

func (b *box) undeclare(ctx context.Context, name string) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.view.Load().Declared
	if len(undeclared(before, name)) == len(before) {
		return nil
	}
	return b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Declared = undeclared(before, name) },
		func(sb *Sandbox) { sb.Declared = before })
}

func undeclared(specs []guest.ProcessSpec, name string) []guest.ProcessSpec {
	return slices.DeleteFunc(slices.Clone(specs), func(s guest.ProcessSpec) bool { return s.Name == name })
}
