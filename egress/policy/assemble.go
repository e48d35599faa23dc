package policy

import (
	"context"
	"fmt"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"

	"github.com/doze-run/doze/egress/policy/meter"
)

// compileWorkers: with more than one, wazero looks at its context between
// functions, which bounds the time.
const compileWorkers = 2

// assemble makes the runtime, the host's modules in it, and the code.
func (p *program) assemble(ctx context.Context, m *meter.Module, pages uint32, c *cache) (err error) {
	config := wazero.NewRuntimeConfig().WithMemoryLimitPages(pages).WithDebugInfoEnabled(false)
	if c != nil {
		if p.cache, err = c.open(p.digest); err != nil {
			return err
		}
		config = config.WithCompilationCache(p.cache)
	}
	p.runtime = wazero.NewRuntimeWithConfig(ctx, config)
	defer func() {
		if err != nil {
			_ = p.close()
			p.runtime, p.cache, p.compiled = nil, nil, nil
		}
	}()
	for name, functions := range hostModules {
		b := p.runtime.NewHostModuleBuilder(name)
		for _, f := range functions {
			b.NewFunctionBuilder().WithGoModuleFunction(f.bind(), f.params, f.results).WithName(f.name).Export(f.name)
		}
		if _, err = b.Instantiate(ctx); err != nil {
			return fmt.Errorf("making the host's module %s: %w", name, err)
		}
	}
	p.compiled, err = p.runtime.CompileModule(experimental.WithCompilationWorkers(ctx, compileWorkers), m.Binary)
	if err != nil {
		return err
	}
	if c != nil {
		c.used(p.digest)
	}
	return nil
}

// function of the host, as guests call it. Arguments are in the stack, where the
// result replaces the first.
type function struct {
	name    string
	params  []api.ValueType
	results []api.ValueType
	call    func(c *call, stack []uint64)
}

func (f function) bind() api.GoModuleFunc {
	return func(ctx context.Context, mod api.Module, stack []uint64) {
		c := ctx.(*call)
		c.memory = mod.Memory()
		c.enter()
		f.call(c, stack)
	}
}

const (
	i32 = api.ValueTypeI32
	i64 = api.ValueTypeI64
)

// params are so many i32.
func params(n int) []api.ValueType {
	p := make([]api.ValueType, n)
	for i := range p {
		p[i] = i32
	}
	return p
}

// Names of the host's modules.
const (
	handlerModule = "http_handler"
	egressModule  = "doze_egress_v1"
	wasiModule    = "wasi_snapshot_preview1"
)

// hostModules are all that guests can import.
var hostModules = map[string][]function{
	handlerModule: handlerFunctions,
	egressModule:  egressFunctions,
	wasiModule:    wasiFunctions,
	meter.Import:  {{meter.Tick, nil, nil, func(c *call, _ []uint64) { c.tick() }}},
}
