package policy

import (
	"context"
	"fmt"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// instance is a guest with its memory.
type instance struct {
	policy    *Policy
	module    api.Module
	memory    memory
	request   api.Function
	response  api.Function
	features  uint32 // enabled at the start, for all exchanges
	idleSince time.Time
	share     chan struct{} // semaphore in which it holds a slot while it is in use; nil: none
	output    output
	call      call
	stack     [2]uint64 // for calls of the guest's functions
}

// start makes an instance and runs its initialization. ctx bounds the wait for a slot.
func (p *Policy) start(ctx context.Context) (*instance, error) {
	h := p.host
	if err := h.reserveInstance(ctx); err != nil {
		return nil, err
	}
	i := &instance{policy: p, output: output{logger: &p.logger}}
	i.call.begin(i, h.config.StartLimit)
	i.call.Context = experimental.WithMemoryAllocator(context.Background(), &i.memory)
	i.call.run(starting)
	err := i.instantiate()
	i.output.flush(nil)
	if err != nil {
		d := i.denial(err)
		i.close()
		return nil, &StartError{Policy: p.name, Reason: d.Reason, Detail: d.Detail}
	}
	i.request, i.response = i.module.ExportedFunction(handleRequest), i.module.ExportedFunction(handleResponse)
	i.features = i.call.features
	return i, nil
}

// instantiate makes the guest and runs its start functions.
func (i *instance) instantiate() (err error) {
	defer func() { // wazero recovers panics of host functions, but not of the memory allocator
		switch f := recover().(type) {
		case nil:
		case *failure:
			err = f
		default:
			panic(f)
		}
	}()
	program := i.policy.module
	i.module, err = program.runtime.InstantiateModule(&i.call, program.compiled,
		wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		i.module = nil
		return err
	}
	for _, name := range program.starts {
		if _, err := i.module.ExportedFunction(name).Call(&i.call); err != nil {
			return err
		}
	}
	return nil
}

// StartError reports why an instance of a policy does not start.
type StartError struct {
	Policy string
	Reason string // one line
	Detail string // output of the policy, and the trace
}

func (e *StartError) Error() string {
	return fmt.Sprintf("policy %.80s does not start: %s", e.Policy, e.Reason)
}

func (i *instance) close() {
	if i.module != nil {
		_ = i.module.Close(context.Background()) // nothing is open in it
	}
	i.memory.Free() // wazero does not free the memory of a partly made module
	<-i.policy.host.instances
}

// reset clears the state of the last exchange.
func (i *instance) reset() {
	i.output.flush(i.call.chain)
	i.output.tail, i.output.failed = i.output.tail[:0], ""
	i.call = call{}
}

// handleRequest runs the guest's function of that name.
func (i *instance) handleRequest() (next bool, context uint32, err error) {
	i.call.run(beforeNext)
	if err := i.request.CallWithStack(&i.call, i.stack[:]); err != nil {
		return false, 0, err
	}
	return uint32(i.stack[0]) == 1, uint32(i.stack[0] >> 32), nil
}

// handleResponse runs the guest's function of that name.
func (i *instance) handleResponse(context uint32, failed bool) error {
	i.call.run(afterNext)
	i.stack[0], i.stack[1] = uint64(context), 0
	if failed {
		i.stack[1] = 1
	}
	return i.response.CallWithStack(&i.call, i.stack[:])
}
