package policy

import (
	"context"
	"fmt"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// instance is a guest with its memory.
type instance struct {
	policy    *Policy
	module    api.Module
	request   api.Function
	response  api.Function
	features  uint32 // that it enabled for all exchanges
	idleSince time.Time
	share     chan struct{} // in which it has a place while it is in use; nil: none
	output    output
	call      call
	stack     [2]uint64 // of a call of the guest
}

// start makes an instance and lets it initialise itself. ctx bounds the wait for
// room.
func (p *Policy) start(ctx context.Context) (*instance, error) {
	h := p.host
	if err := h.makeRoom(ctx); err != nil {
		return nil, err
	}
	i := &instance{policy: p, output: output{logger: &p.logger}}
	i.call.begin(i, starting, h.config.StartLimit)
	module, err := p.module.runtime.InstantiateModule(&i.call, p.module.compiled,
		wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err == nil {
		i.module = module
		for _, name := range p.module.starts {
			if _, err = module.ExportedFunction(name).Call(&i.call); err != nil {
				break
			}
		}
	}
	i.output.flush()
	if err != nil {
		d := i.denial(err)
		i.close()
		return nil, &StartError{Policy: p.name, Reason: d.Reason, Detail: d.Detail}
	}
	i.request, i.response = module.ExportedFunction(handleRequest), module.ExportedFunction(handleResponse)
	i.features = i.call.features
	return i, nil
}

// StartError says why an instance of a policy does not start.
type StartError struct {
	Policy string
	Reason string // in one line
	Detail string // what the policy wrote, and the trace
}

func (e *StartError) Error() string {
	return fmt.Sprintf("policy %.80s does not start: %s", e.Policy, e.Reason)
}

func (i *instance) close() {
	if i.module != nil {
		_ = i.module.Close(context.Background()) // nothing is open in it
	}
	<-i.policy.host.instances
}

// rest lets go of everything of the last exchange.
func (i *instance) rest() {
	i.output.flush()
	i.output.tail = i.output.tail[:0]
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
