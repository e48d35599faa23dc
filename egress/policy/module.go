package policy

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/tetratelabs/wazero"

	"github.com/doze-run/doze/egress/policy/meter"
)

// program is machine code. It has a runtime of its own, so that nothing of it
// stays behind when it is closed.
type program struct {
	host     *Host
	digest   string
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
	cache    wazero.CompilationCache // which owns the code; may be nil
	starts   []string                // functions that start an instance
	// deaf: its handle_response does nothing and needs not be called.
	deaf bool

	references int // guarded by host.mu
}

func (p *program) close() error {
	ctx := context.Background()
	err := p.runtime.Close(ctx)
	if p.cache != nil {
		if e := p.cache.Close(ctx); err == nil {
			err = e
		}
	}
	return err
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
			h.config.Log.Error("closing a policy's code", "digest", p.digest, "error", err)
		}
	}
}

// Module is a compiled module of a name.
type Module struct {
	name     string
	program  *program
	released atomic.Bool
}

func newModule(name string, p *program) *Module { return &Module{name: name, program: p} }

// Name that it was compiled under.
func (m *Module) Name() string { return m.name }

// Digest of the module's bytes: SHA-256 in hexadecimal.
func (m *Module) Digest() string { return m.program.digest }

// Release gives the module up. It is idempotent. Policies that were made of it
// live on, and its code is closed when the last of them has ended.
func (m *Module) Release() {
	if m.released.CompareAndSwap(false, true) {
		m.program.release()
	}
}

// compile is for one caller at a time.
func (h *Host) compile(ctx context.Context, digest string, wasm []byte) (*program, error) {
	pages := uint32(h.config.MemoryLimit / pageSize)
	m, err := meter.Instrument(wasm, pages)
	if err != nil {
		return nil, err
	}
	if err := check(m); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, h.config.CompileLimit,
		fmt.Errorf("compiling it takes longer than %v: make it smaller", h.config.CompileLimit))
	defer cancel()
	p := &program{host: h, digest: digest, references: 1, deaf: m.Exports[handleResponse].Empty}
	for _, name := range []string{"_initialize", "_start"} {
		if _, ok := m.Exports[name]; ok {
			p.starts = append(p.starts, name)
		}
	}
	if err := p.build(ctx, m, pages, h.cache); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, err
	}
	return p, nil
}

// build compiles with the cache, and where that fails, without: the cache must
// not be what keeps a policy from running.
func (p *program) build(ctx context.Context, m *meter.Module, pages uint32, c *cache) error {
	if c != nil {
		if err := p.assemble(ctx, m, pages, c); err == nil || ctx.Err() != nil {
			return err
		}
		c.remove(p.digest)
	}
	return p.assemble(ctx, m, pages, nil)
}
