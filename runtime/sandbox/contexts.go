package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/jupyter"
)

// Bounds of the contexts of a sandbox. They take less than 112 KiB of its record.
const (
	maxContexts     = 16       // whose kernel runs; spare kernels are not counted for other contexts
	maxKnownContext = 32       // with those that have ended
	maxContextEnv   = 32 << 10 // bytes of the variables of all contexts, as JSON
	maxContextID    = 64
	maxContextCwd   = 1 << 10 // bytes as JSON
)

// Context is an interpreter that executes code and retains its state, as last known.
type Context struct {
	ID       string            `json:"id"`
	Language Language          `json:"language"`
	Cwd      string            `json:"cwd,omitempty"` // empty: the image's
	Env      map[string]string `json:"env,omitempty"`
	// State of its kernel: running, exited or lost, with Reason if its sandbox has stopped.
	State     guest.ProcessState `json:"state"`
	ExitCode  *int               `json:"exit_code,omitempty"`
	Signal    string             `json:"signal,omitempty"`
	Reason    StateReason        `json:"reason,omitempty"`
	StartedAt time.Time          `json:"started_at"`
	ExitedAt  *time.Time         `json:"exited_at,omitempty"`
	// Process is the id of the kernel's process.
	Process string             `json:"process"`
	Kernel  jupyter.Connection `json:"kernel"`
	// Spare: the kernel waits for the first context of its language, and has no ID yet.
	Spare bool `json:"spare,omitempty"`
	// Environment is Sandbox.environmentSum when its kernel was claimed, or superseded.
	Environment string `json:"environment,omitempty"`
}

var contexts = programs[Context]{func(sb *Sandbox) *[]Context { return &sb.Contexts }, maxKnownContext, maxKnownContext}

func (c Context) key() string {
	if c.Spare {
		return ""
	}
	return c.ID
}

func (c Context) status() (guest.ProcessState, time.Time) { return c.State, c.StartedAt }
func (c Context) current() bool                           { return c.State == guest.ProcessRunning }

func (c *Context) lose(reason StateReason) {
	if c.State == guest.ProcessRunning {
		c.State, c.Reason = guest.ProcessLost, reason
	}
}

// ContextSpec describes a context to open.
type ContextSpec struct {
	ID       string // empty: generated; unique among the contexts of the sandbox
	Language Language
	Cwd      string // empty: the image's
	Env      map[string]string

	replaces string // process of the context with that id, which has ended
	spare    bool   // see Context.Spare
}

// OpenContexts returns the contexts without spare interpreters.
func (sb *Sandbox) OpenContexts() []Context {
	return withoutSpares(slices.Clone(sb.Contexts))
}

// withoutSpares removes spare kernels.
func withoutSpares(list []Context) []Context {
	return slices.DeleteFunc(list, func(c Context) bool { return c.Spare })
}

// ContextError: a sandbox does not have a context with that id, or the context has ended. It
// is ErrNotFound.
type ContextError struct {
	Context string   // as in the call
	Known   *Context // that has ended
	Closed  bool     // closed or restarted during the call
}

func (e *ContextError) Error() string {
	switch {
	case e.Closed:
		return fmt.Sprintf("the context %s was closed or restarted during the request", e.Context)
	case e.Known == nil:
		return fmt.Sprintf("the sandbox has no context %q", e.Context)
	case e.Known.State == guest.ProcessLost && e.Known.Reason == "":
		return fmt.Sprintf("the interpreter of the context %s has ended, and the sandbox no longer knows how", e.Context)
	case e.Known.State == guest.ProcessLost:
		return fmt.Sprintf("the context %s ended when its sandbox stopped (%s)", e.Context, e.Known.Reason)
	}
	return fmt.Sprintf("the interpreter of the context %s %s", e.Context, e.Known.ending())
}

// ending describes how the kernel ended.
func (c *Context) ending() string {
	return guest.Process{State: c.State, ExitCode: c.ExitCode, Signal: c.Signal}.Ending()
}

func (e *ContextError) Unwrap() error { return ErrNotFound }

var (
	// ErrContextExists: the sandbox has a context with that id.
	ErrContextExists = errors.New("the sandbox has a context with that id")
	// ErrTooManyContexts: the sandbox has as many contexts as it may have.
	ErrTooManyContexts = fmt.Errorf("the sandbox has %d contexts", maxContexts)
	// ErrContextBusy: the context still executes other code.
	ErrContextBusy = errors.New("the context executes other code")
)

// Context returns the context with that id, as last known. Errors: *ContextError.
func (sb *Sandbox) Context(id string) (Context, error) {
	if c, ok := find(sb.Contexts, id); ok {
		return c, nil
	}
	return Context{}, &ContextError{Context: cutText(id, maxEventText)}
}

// CheckContext returns *ContextError if it is certain, without waking the sandbox, that the
// context cannot execute code. The default context of a language is opened by its first code.
func (sb *Sandbox) CheckContext(id string) error {
	c, err := sb.Context(id)
	switch {
	case err == nil && c.State != guest.ProcessRunning:
		return &ContextError{Context: c.ID, Known: &c}
	case isLanguage(id):
		return nil
	}
	return err
}

// OpenContext wakes the sandbox and starts an interpreter. Errors: ErrContextExists,
// ErrTooManyContexts, *InterpreterError, *KernelError, *guest.Error.
func (m *Manager) OpenContext(ctx context.Context, id ID, spec ContextSpec) (Context, error) {
	if err := spec.validate(); err != nil {
		return Context{}, err
	}
	lease, err := m.Acquire(ctx, id, CauseContext)
	if err != nil {
		return Context{}, err
	}
	defer lease.Release()
	spec.ID = cmp.Or(spec.ID, newContextID())
	return lease.b.openContext(ctx, spec)
}

func newContextID() string { return "c-" + strings.ToLower(rand.Text()[:8]) }

func (spec *ContextSpec) validate() error {
	switch {
	case !isLanguage(string(spec.Language)):
		return &InvalidError{Field: "language", Reason: fmt.Sprintf("%q is not a language of contexts", clip(string(spec.Language))), Want: "use python, javascript or typescript"}
	case isLanguage(spec.ID) && spec.ID != string(spec.Language):
		return &InvalidError{Field: "id", Reason: spec.ID + " is the default context of another language", Want: "use another id"}
	case len(spec.ID) > maxContextID:
		return &InvalidError{Field: "id", Reason: fmt.Sprintf("has %d bytes", len(spec.ID)), Want: fmt.Sprintf("use at most %d", maxContextID)}
	case written(spec.Cwd) > maxContextCwd:
		return &InvalidError{Field: "cwd", Reason: fmt.Sprintf("has %d bytes", len(spec.Cwd)), Want: fmt.Sprintf("use at most %d", maxContextCwd)}
	}
	return nil
}

// InterruptContext interrupts the code that the context executes, as Ctrl-C does. Without code
// it does nothing. It wakes the sandbox unless the context has ended. Errors: *ContextError.
func (m *Manager) InterruptContext(ctx context.Context, id ID, name string) (Context, error) {
	var c Context
	err := m.onContext(ctx, id, name, func(b *liveSandbox, known Context) error {
		c = known
		if k := b.openKernel(known.Process); k != nil {
			return k.Interrupt(ctx)
		}
		// It may execute code of a client that was lost.
		return jupyter.Interrupt(ctx, known.Kernel, b.dialLoopback, b.kernels.limits)
	})
	return c, err
}

// RestartContext starts the interpreter of a context again, without its state; also if it has
// ended. It wakes the sandbox. Errors: *ContextError if the id is unknown, and the errors of
// OpenContext.
func (m *Manager) RestartContext(ctx context.Context, id ID, name string) (Context, error) {
	b, err := m.live(id)
	if err != nil {
		return Context{}, err
	}
	known, err := b.view.Load().Context(name)
	if err != nil {
		return Context{}, err
	}
	lease, err := m.Acquire(ctx, id, CauseContext)
	if err != nil {
		return Context{}, err
	}
	defer lease.Release()
	if err := b.endKernel(ctx, known); err != nil {
		return Context{}, err
	}
	c, err := b.openContext(ctx, ContextSpec{ID: known.ID, Language: known.Language, Cwd: known.Cwd, Env: known.Env, replaces: known.Process})
	if errors.Is(err, ErrContextExists) { // another call has restarted it
		return b.view.Load().Context(name)
	}
	return c, err
}

// CloseContext ends the interpreter of a context with everything that it started. It wakes the
// sandbox unless the context has ended. Errors: *ContextError.
func (m *Manager) CloseContext(ctx context.Context, id ID, name string) (Context, error) {
	b, err := m.live(id)
	if err != nil {
		return Context{}, err
	}
	known, err := b.view.Load().Context(name)
	if err != nil {
		return Context{}, err
	}
	if known.State == guest.ProcessRunning {
		lease, err := m.Acquire(ctx, id, CauseContext)
		if err != nil {
			return Context{}, err
		}
		defer lease.Release()
		if err := b.endKernel(ctx, known); err != nil {
			return Context{}, err
		}
		if c, err := b.view.Load().Context(name); err == nil && c.Process == known.Process {
			known = c
		}
	}
	b.forgetContext(known.Process)
	return known, nil
}

// onContext calls f with a running sandbox whose context may run.
func (m *Manager) onContext(ctx context.Context, id ID, name string, f func(*liveSandbox, Context) error) error {
	b, err := m.live(id)
	if err != nil {
		return err
	}
	known, err := b.view.Load().Context(name)
	if err != nil {
		return err
	}
	if known.State != guest.ProcessRunning {
		return &ContextError{Context: known.ID, Known: &known}
	}
	lease, err := m.Acquire(ctx, id, CauseContext)
	if err != nil {
		return err
	}
	defer lease.Release()
	return f(b, known)
}

// claimContext adds a context to the record, with ports for its kernel. If it may and the
// sandbox has a spare kernel, the context gets that one.
func (b *liveSandbox) claimContext(spec ContextSpec, maySpare bool) (c Context, spare bool, err error) {
	c = Context{
		ID: spec.ID, Language: spec.Language, Cwd: spec.Cwd, Env: spec.Env,
		State: guest.ProcessRunning, StartedAt: time.Now().UTC(), Process: guest.NewProcessID(), Spare: spec.spare,
	}
	var surplus []Context
	b.change(func(sb *Sandbox) {
		list := slices.Clone(sb.Contexts)
		c.Environment = sb.environmentSum()
		if i := slices.IndexFunc(list, func(old Context) bool { return c.key() != "" && old.key() == c.key() }); i >= 0 {
			if list[i].Process != spec.replaces {
				err = ErrContextExists
				return
			}
			list = slices.Delete(list, i, i+1)
		}
		running, env := 0, envSize(c.Env)
		for _, old := range list {
			env += envSize(old.Env)
			if old.State == guest.ProcessRunning && (!old.Spare || c.Spare) {
				running++
			}
			if old.Spare && c.Spare && old.Language == c.Language {
				err = ErrContextExists
				return
			}
		}
		if running >= maxContexts {
			err = ErrTooManyContexts
			return
		}
		if i := slices.IndexFunc(list, c.fits); i >= 0 && maySpare {
			list[i].ID, list[i].Language, list[i].Spare = c.ID, c.Language, false
			c, sb.Contexts, spare = list[i], list, true
			return
		}
		if env > maxContextEnv {
			err = &InvalidError{Field: "env", Reason: fmt.Sprintf("the variables of the sandbox's contexts have %d bytes", env),
				Want: fmt.Sprintf("use at most %d: put long values into a file", maxContextEnv)}
			return
		}
		c.Kernel = jupyter.NewConnection(freePorts(list))
		sb.Contexts, surplus = contexts.bound(append(list, c))
	})
	for _, old := range surplus {
		b.dropKernel(old.Process)
	}
	if err == nil {
		b.m.journal.dirty(b)
	}
	return c, spare, err
}

// fits reports whether a context can have a spare kernel.
func (c *Context) fits(spare Context) bool {
	return spare.Spare && spare.State == guest.ProcessRunning && interpreters[spare.Language].missing == interpreters[c.Language].missing &&
		!c.Spare && c.Cwd == "" && len(c.Env) == 0 && spare.Environment == c.Environment
}

// superseded is the Environment of a spare kernel that no context may have any more.
const superseded = "superseded"

// supersedeSpare marks the spare kernel of a language if the environment has changed since its
// start, and returns it. has: the language has a spare kernel that can be used.
func (b *liveSandbox) supersedeSpare(language Language) (old Context, has bool) {
	b.change(func(sb *Sandbox) {
		i := slices.IndexFunc(sb.Contexts, func(c Context) bool { return c.Spare && c.Language == language })
		if i < 0 {
			return
		}
		if has = sb.Contexts[i].Environment == sb.environmentSum(); !has {
			sb.Contexts = slices.Clone(sb.Contexts)
			sb.Contexts[i].Environment = superseded
			old = sb.Contexts[i]
		}
	})
	return old, has
}

func envSize(env map[string]string) (n int) {
	for name, value := range env {
		n += written(name) + written(value) + 6
	}
	return n
}

// restoreContext adds a context that has ended, unless there is one with its id.
func (b *liveSandbox) restoreContext(ended Context) {
	b.change(func(sb *Sandbox) {
		if _, err := sb.Context(ended.ID); err != nil {
			sb.Contexts, _ = contexts.bound(append(slices.Clone(sb.Contexts), ended))
		}
	})
	b.m.journal.dirty(b)
}

// forgetContext removes the context with that kernel.
func (b *liveSandbox) forgetContext(process string) {
	b.change(func(sb *Sandbox) {
		sb.Contexts = slices.DeleteFunc(slices.Clone(sb.Contexts), func(c Context) bool { return c.Process == process })
	})
	b.m.journal.dirty(b)
	b.dropKernel(process)
}

// noteKernelEnd stores that the kernel of a context has ended, if p is one.
func (b *liveSandbox) noteKernelEnd(p guest.Process) {
	if p.State != guest.ProcessExited {
		return
	}
	found := false
	b.change(func(sb *Sandbox) {
		i := slices.IndexFunc(sb.Contexts, func(c Context) bool { return c.Process == p.ID && c.State == guest.ProcessRunning })
		if i < 0 {
			return
		}
		found = true
		list := slices.Clone(sb.Contexts)
		list[i].State, list[i].ExitCode, list[i].Signal, list[i].ExitedAt = p.State, p.ExitCode, cutText(p.Signal, maxEventText), p.ExitedAt
		if list[i].Spare {
			list = slices.Delete(list, i, i+1)
		}
		sb.Contexts = list
	})
	if found {
		b.m.journal.dirty(b)
	}
}

// ignoreKernelEnds restores the contexts whose kernel ran before: it was the stop of the sandbox
// that ended them.
func (b *liveSandbox) ignoreKernelEnds(before []Context) {
	b.change(func(sb *Sandbox) {
		list := slices.Clone(sb.Contexts)
		for i, c := range list {
			j := slices.IndexFunc(before, func(old Context) bool { return old.Process == c.Process && old.State == guest.ProcessRunning })
			if j >= 0 {
				list[i] = before[j]
			}
		}
		sb.Contexts = list
	})
}

// loseKernels records that kernels have ended, and it is unknown how.
func (sb *Sandbox) loseKernels(processes []string) {
	list := slices.Clone(sb.Contexts)
	for i := range list {
		if slices.Contains(processes, list[i].Process) {
			list[i].lose("")
		}
	}
	sb.Contexts = slices.DeleteFunc(list, func(c Context) bool { return c.Spare && c.State == guest.ProcessLost })
}

// withoutKernels removes the ports of kernels, which are for the node alone. A server in the
// code of a context has a port of its own.
func (sb *Sandbox) withoutKernels(ports []guest.Listening) []guest.Listening {
	if len(sb.Contexts) == 0 {
		return ports
	}
	return slices.DeleteFunc(ports, func(l guest.Listening) bool {
		return slices.ContainsFunc(sb.Contexts, func(c Context) bool {
			return c.Process == l.Process && l.Port >= firstKernelPort
		})
	})
}
