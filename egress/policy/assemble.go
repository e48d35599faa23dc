package policy

import (
	"context"

	"github.com/tetratelabs/wazero/api"

	"github.com/doze-run/doze/egress/policy/meter"
)

// function is a host function that guests can call. Its arguments are on the stack,
// where the result replaces the first.
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

// params returns the types of n i32 parameters.
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

// hostModules holds all modules that guests can import.
var hostModules = map[string][]function{
	handlerModule: handlerFunctions,
	egressModule:  egressFunctions,
	wasiModule:    wasiFunctions,
	meter.Import:  {{meter.Tick, nil, nil, func(c *call, _ []uint64) { c.tick() }}},
}
