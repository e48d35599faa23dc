package sandbox

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// Bounds of the declared processes. They are stored in the sandbox's record, which may
// have 800 KiB.
const (
	maxDeclared      = 64
	maxDeclaredBytes = 128 << 10 // of all, as JSON
)

// mayDeclare refuses a declaration beyond the bounds.
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
			Want: fmt.Sprintf(`at most %d are stored: put long values into a file, or use "never"`, maxDeclaredBytes)}
	}
	return nil
}

// declaredSpec returns the spec to store of a process that a cold wake starts again.
func declaredSpec(spec guest.ProcessSpec, name string) guest.ProcessSpec {
	spec.Name = cutText(name, maxProcessText)
	spec.Env = maps.Clone(spec.Env)
	return spec
}

func (b *liveSandbox) declare(ctx context.Context, spec guest.ProcessSpec) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.view.Load().Declared
	if err := mayDeclare(before, spec); err != nil {
		return err
	}
	return b.setDeclared(ctx, append(undeclared(before, spec.Name), spec))
}

// setDeclared replaces the declarations. Needs b.updating.
func (b *liveSandbox) setDeclared(ctx context.Context, declared []guest.ProcessSpec) error {
	before := b.view.Load().Declared
	return b.changeSaved(ctx, func(sb *Sandbox) { sb.Declared = declared }, func(sb *Sandbox) { sb.Declared = before })
}

// undeclare removes the declaration of the process with that id. Another process may have
// its name, and a declaration of its own.
func (b *liveSandbox) undeclare(ctx context.Context, id string) error {
	b.updating.Lock()
	defer b.updating.Unlock()
	before := b.view.Load().Declared
	left := slices.DeleteFunc(slices.Clone(before), func(spec guest.ProcessSpec) bool { return spec.ID == id })
	if len(left) == len(before) {
		return nil
	}
	return b.setDeclared(ctx, left)
}

func undeclared(specs []guest.ProcessSpec, name string) []guest.ProcessSpec {
	return slices.DeleteFunc(slices.Clone(specs), func(s guest.ProcessSpec) bool { return s.Name == name })
}

// startUp is the start of declared processes that a cold wake does not wait for: of the first
// one with a readiness condition, and of those after it. A sandbox is not idle meanwhile. If it
// is put to sleep nevertheless, the start goes on with the next wake.
type startUp struct {
	// Used by the goroutine of the start alone:
	left    []guest.ProcessSpec
	started bool // the first of left
	// Guarded by liveSandbox.mu:
	busy bool // the goroutine runs
	// ports are closed, each when the process whose condition names it is ready, or the wait
	// for it has ended.
	ports map[uint16]chan struct{}
}

// port returns the port of a process's readiness condition; 0 without one.
func port(spec guest.ProcessSpec) uint16 {
	switch ready := spec.Ready; {
	case ready == nil:
		return 0
	case ready.HTTP != nil:
		return ready.HTTP.Port
	default:
		return ready.Port
	}
}

// Pending returns nil, or a channel while the declared process whose readiness condition names
// the port is being started. It is closed when that process is ready, or the wait for it has
// ended without that.
func (l *Lease) Pending(port uint16) <-chan struct{} { return l.b.pending(port) }

// pending is Lease.Pending.
func (b *liveSandbox) pending(port uint16) <-chan struct{} {
	if b.startUp.Load() == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if up := b.startUp.Load(); up != nil && up.ports[port] != nil {
		return up.ports[port]
	}
	return nil
}

// startMissing starts the declared processes that a guest started by an earlier run of the
// node has never had: that run ended before it had started them. Processes that have ended
// by themselves since then stay ended. Needs the transition lock.
func (b *liveSandbox) startMissing(ctx context.Context) error {
	declared := b.view.Load().Declared
	if len(declared) == 0 || b.startUp.Load() != nil { // an interrupted start goes on
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

// startDeclared starts declared processes in their order, up to the first one with a
// readiness condition, which must hold before the next one starts: continueStart does that.
// A failure is an event in the timeline; the other processes start nevertheless. Needs the
// transition lock.
func (b *liveSandbox) startDeclared(ctx context.Context, declared []guest.ProcessSpec) {
	for i, spec := range declared {
		if !b.startOneDeclared(ctx, spec) || spec.Ready == nil {
			continue
		}
		up := &startUp{left: declared[i:], started: true, ports: map[uint16]chan struct{}{}}
		for _, spec := range up.left {
			if n := port(spec); n != 0 {
				up.ports[n] = make(chan struct{})
			}
		}
		b.startUp.Store(up)
		return
	}
}

// startOneDeclared reports whether it started the process.
func (b *liveSandbox) startOneDeclared(ctx context.Context, spec guest.ProcessSpec) bool {
	p, err := b.startProcess(ctx, spec)
	if err != nil {
		b.failedToStart(spec, err)
		return false
	}
	b.noteProcess(p)
	return true
}

func (b *liveSandbox) failedToStart(spec guest.ProcessSpec, err error) {
	b.failedStart(spec, fmt.Sprintf("did not start: %v", err))
}

// failedStart adds to the timeline what a declared process failed to do.
func (b *liveSandbox) failedStart(spec guest.ProcessSpec, failure string) {
	b.m.log.Warn("failed to start a declared process", "sandbox", b.id, "process", spec.Name, "error", failure)
	b.emit(Event{Type: EventWakeFailed, Error: fmt.Sprintf("declared process %s %s", spec.Name, failure)})
}

// continueStart goes on with the start of declared processes unless it has ended or another
// goroutine does it.
func (b *liveSandbox) continueStart(ctx context.Context) {
	b.mu.Lock()
	up := b.startUp.Load()
	idle := up != nil && !up.busy
	if idle {
		up.busy = true
	}
	b.mu.Unlock()
	if idle {
		b.runStart(ctx, up)
	}
}

// runStart returns when all processes are ready or given up, or the start has been interrupted.
func (b *liveSandbox) runStart(ctx context.Context, up *startUp) {
	for ; len(up.left) > 0; up.left = up.left[1:] {
		spec := up.left[0]
		if b.interrupted(ctx, up) {
			return
		}
		if b.isDeclared(spec) && !b.startAndAwait(ctx, spec, up) {
			return
		}
		up.started = false
		b.mu.Lock()
		up.settle(port(spec))
		b.mu.Unlock()
	}
	b.touch()
	b.endStart(up)
}

// startAndAwait starts the first process that is left, unless it was started before, and awaits
// its readiness. It returns false when the start has been interrupted.
func (b *liveSandbox) startAndAwait(ctx context.Context, spec guest.ProcessSpec, up *startUp) bool {
	if !up.started {
		p, err := b.startProcess(ctx, spec)
		if err != nil {
			if b.interrupted(ctx, up) {
				return false
			}
			b.failedToStart(spec, err)
			return true
		}
		b.noteProcess(p)
		up.started = true
	}
	return spec.Ready == nil || b.awaitDeclared(ctx, spec, up)
}

// awaitDeclared returns true when the process is ready or given up, and false when the
// start has been interrupted.
func (b *liveSandbox) awaitDeclared(ctx context.Context, spec guest.ProcessSpec, up *startUp) bool {
	for {
		began := time.Now()
		waitCtx, cancel := context.WithTimeout(ctx, spec.Ready.Timeout+waitGrace)
		result, err := b.guest.WaitProcess(waitCtx, spec.ID, *spec.Ready)
		cancel()
		switch {
		case err == nil && result.Outcome == guest.WaitMet:
			return true
		case b.interrupted(ctx, up):
			return false
		case b.view.Load().StateSince.After(began): // it slept meanwhile
		case err != nil:
			b.failedStart(spec, fmt.Sprintf("may not be ready: %v", err))
			return true
		default:
			b.failedStart(spec, "is not ready: "+cutText(result.Detail, maxEventText))
			return true
		}
	}
}

// interrupted reports whether the goroutine of a start has to end: the container ended, or
// the sandbox is closed and its next wake goes on.
func (b *liveSandbox) interrupted(ctx context.Context, up *startUp) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	up.busy = ctx.Err() == nil && b.startUp.Load() == up && b.use.Load() >= 0
	return !up.busy
}

func (b *liveSandbox) isDeclared(spec guest.ProcessSpec) bool {
	return slices.ContainsFunc(b.view.Load().Declared, func(d guest.ProcessSpec) bool { return d.ID == spec.ID })
}

// endStart ends a start: its requests wait no longer.
func (b *liveSandbox) endStart(up *startUp) {
	if up == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.startUp.CompareAndSwap(up, nil)
	for n := range up.ports {
		up.settle(n)
	}
}

// settle closes the channel of a port. Needs liveSandbox.mu.
func (up *startUp) settle(port uint16) {
	if c := up.ports[port]; c != nil {
		close(c)
		delete(up.ports, port)
	}
}
