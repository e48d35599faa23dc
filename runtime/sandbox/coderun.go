package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/doze-run/doze/runtime/jupyter"
)

// CodeSpec is code to execute in a context.
type CodeSpec struct {
	Code string
	// Timeout interrupts the code; 0: none. It includes the time for which the code waits for
	// other code of the context.
	Timeout time.Duration
	// Limit of the bytes of output that wait to be read. More is dropped.
	Limit int
}

// CodeRun is code that a context executes.
type CodeRun struct {
	lease   *Lease
	context Context
	kernel  *jupyter.Kernel
	code    *jupyter.Execution

	client   context.Context // of RunCode
	limited  context.Context // client with the timeout
	cancel   context.CancelFunc
	timedOut bool
	ended    bool
}

// awakeCheck is how often a timeout that expired in a sleeping sandbox is tried again.
const awakeCheck = time.Second

// RunCode wakes the sandbox and executes code in a context. The default context of a language,
// which has its name, is opened if there is none. The caller reads the output with Next, and
// calls Close. If ctx ends before the code, Close interrupts it.
//
// Errors: *ContextError, ErrContextBusy when the timeout ended while the context executed other
// code, and the errors of OpenContext.
func (m *Manager) RunCode(ctx context.Context, id ID, name string, spec CodeSpec) (*CodeRun, error) {
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	if err := b.view.Load().CheckContext(name); err != nil {
		return nil, err
	}
	lease, err := m.Acquire(ctx, id, CauseContext)
	if err != nil {
		return nil, err
	}
	r := &CodeRun{lease: lease, client: ctx, limited: ctx, cancel: func() {}}
	if r.context, err = b.contextFor(ctx, name); err == nil {
		if spec.Timeout > 0 { // not for the start of an interpreter
			r.limited, r.cancel = context.WithTimeout(ctx, spec.Timeout)
		}
		r.kernel, err = b.connectKernel(r.limited, r.context)
	}
	if err == nil {
		r.code, err = r.kernel.Execute(r.limited, spec.Code, jupyter.Options{Limit: spec.Limit, Flush: interpreters[r.context.Language].flush})
	}
	if err == nil {
		return r, nil
	}
	switch {
	case errors.Is(err, jupyter.ErrLost):
		err = b.afterLoss(ctx, r.context, err)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && r.limited.Err() != nil:
		err = ErrContextBusy
	}
	r.cancel()
	lease.Release()
	return nil, err
}

// contextFor returns the context with that id, and opens the default context of a language.
func (b *liveSandbox) contextFor(ctx context.Context, name string) (Context, error) {
	c, err := b.view.Load().Context(name)
	if err != nil && isLanguage(name) {
		c, err = b.openContext(ctx, ContextSpec{ID: name, Language: Language(name)})
		if errors.Is(err, ErrContextExists) { // opened by another call meanwhile
			c, err = b.view.Load().Context(name)
		}
	}
	return c, err
}

// TimedOut reports whether the timeout has interrupted the code.
func (r *CodeRun) TimedOut() bool { return r.timedOut }

// Next returns the next event. The last is jupyter.Complete. Errors: *ContextError when the
// interpreter has ended, jupyter.ErrLost, and ctx's.
func (r *CodeRun) Next() (jupyter.Event, error) {
	for {
		ev, err := r.code.Next(r.limited)
		switch {
		case err == nil:
			r.ended = ev.Kind == jupyter.Complete
			return ev, nil
		case errors.Is(err, jupyter.ErrLost):
			r.ended = true
			return ev, r.lease.b.afterLoss(r.client, r.context, err)
		case r.client.Err() != nil:
			return ev, r.client.Err()
		case r.timedOut: // it has ignored the interrupt; Close tries again
			return jupyter.Event{Kind: jupyter.Complete}, nil
		}
		r.cancel()
		if r.lease.b.state() != StateRunning { // forced to sleep meanwhile
			r.limited, r.cancel = context.WithTimeout(r.client, awakeCheck)
			continue
		}
		r.timedOut = true
		r.limited, r.cancel = context.WithTimeout(r.client, interruptTimeout)
		_ = r.code.Interrupt(r.limited) // if it fails, the code goes on until the second timeout
	}
}

// Close interrupts the code if it has not ended, and releases the sandbox when it has. The
// interpreter goes on.
func (r *CodeRun) Close() {
	r.cancel()
	if r.ended {
		r.lease.Release()
		return
	}
	r.code.Discard()
	if !r.lease.b.m.spawn(func(ctx context.Context) {
		defer r.lease.Release()
		ctx, cancel := context.WithTimeout(ctx, interruptTimeout)
		defer cancel()
		_ = r.code.Interrupt(ctx)
		select {
		case <-r.code.Done():
		case <-r.kernel.Done():
		case <-ctx.Done(): // the next run finds the context busy
		}
	}) {
		r.lease.Release()
	}
}
