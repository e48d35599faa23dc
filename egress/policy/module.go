package policy

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/tetratelabs/wazero"

	"github.com/doze-run/doze/egress/policy/meter"
	"github.com/doze-run/doze/egress/policy/policylog"
)

// program is the machine code of a module. It has its own runtime, so that closing it
// releases everything.
type program struct {
	host     *Host
	digest   string
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	cache    wazero.CompilationCache // owns the code
	starts   []string                // functions that start an instance
	// ignoresResponse means that handle_response does nothing and need not be called.
	ignoresResponse bool

	references int // guarded by host.mu
}

func (p *program) close() error {
	ctx := context.Background()
	return errors.Join(p.runtime.Close(ctx), p.cache.Close(ctx))
}

func (p *program) release() {
	h := p.host
	h.mu.Lock()
	p.references--
	last := p.references == 0 && !h.closed
	if last {
		delete(h.programs, p.digest)
	}
	h.mu.Unlock()
	if last {
		if err := p.close(); err != nil {
			h.config.Log.Error("failed to close a policy's code", "digest", p.digest, "error", err)
		}
		select {
		case h.unmap <- struct{}{}:
		default: // a signal is already pending
		}
	}
}

// Module is a compiled module with a name.
type Module struct {
	// Owner is the policy's owner, for the node's log. Lines receives all lines of the
	// policies that are configured after it is set. Both may be empty. Lines is called
	// concurrently and must not block.
	Owner string
	Lines func(policylog.Line)

	name     string
	program  *program
	released atomic.Bool
}

func newModule(name string, p *program) *Module { return &Module{name: name, program: p} }

// Release releases the module. It is idempotent. Policies that were configured from the
// module remain usable; its code is closed when the last of them has ended.
func (m *Module) Release() {
	if m.released.CompareAndSwap(false, true) {
		m.program.release()
	}
}

// compile makes a program. Errors: *compilerError for a mistake in the module, others for
// problems of the node.
func (h *Host) compile(ctx context.Context, digest string, wasm []byte) (*program, error) {
	m, err := meter.Instrument(wasm, h.pages())
	if err == nil {
		err = check(m)
	}
	if err != nil {
		return nil, &compilerError{err.Error()}
	}
	p := &program{host: h, digest: digest, references: 1, ignoresResponse: m.Exports[handleResponse].Empty}
	for _, name := range []string{"_initialize", "_start"} {
		if _, ok := m.Exports[name]; ok {
			p.starts = append(p.starts, name)
		}
	}
	return p, p.build(ctx, m)
}
