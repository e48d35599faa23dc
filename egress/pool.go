package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/policies/builtin"
)

// module is the WebAssembly module to which a policy name in an owner's rules refers.
type module struct {
	owner, name, digest string
	read                func() ([]byte, error)
}

// moduleOf returns the module that an owner pushed under a name, or else the one that doze
// ships under it.
func (e *Egress) moduleOf(owner, name string) (module, error) {
	info, err := e.modules.Get(owner, name)
	if err == nil {
		return module{owner, name, info.Digest, func() ([]byte, error) {
			_, wasm, err := e.modules.Read(owner, name)
			return wasm, err
		}}, nil
	}
	if !errors.Is(err, catalog.ErrUnknown) {
		return module{}, err
	}
	info, err = shipped(name)
	if errors.Is(err, builtin.ErrUnknown) {
		err = fmt.Errorf("no policy has this name: push it, or use one of %s", strings.Join(builtin.Names(), ", "))
	}
	return module{owner, name, info.Digest, func() ([]byte, error) { return builtin.Module(name) }}, err
}

// described caches the descriptions of the policies that doze ships, by name. They are
// made on demand, because each policy must be decompressed for it.
var described sync.Map

// shipped describes a policy that doze ships. It returns the errors of builtin.Module.
func shipped(name string) (catalog.Info, error) {
	if info, ok := described.Load(name); ok {
		return info.(catalog.Info), nil
	}
	wasm, err := builtin.Module(name)
	if err != nil {
		return catalog.Info{}, err
	}
	info := catalog.Info{Name: name, Digest: catalog.Digest(wasm), Size: int64(len(wasm)), BuiltIn: true}
	described.Store(name, info)
	return info, nil
}

// pool holds the policies that are ready to run. An owner's rules that use the same
// policy with the same configuration share one. Policies of equal bytes under two names
// share their machine code, which the host holds, and nothing else: each has its own
// instances, stored values and log lines.
type pool struct {
	host *policy.Host
	// compiling serializes the compilation of each owner's modules, so that no owner
	// delays the others.
	compiling ownerLocks

	lines *policylog.Log // of all policies

	mu    sync.Mutex                  // also held while an instance starts
	ready map[readyKey]*policy.Policy // may include ended policies
}

type readyKey struct{ owner, name, digest, config string }

func newPool(host *policy.Host, lines *policylog.Log) *pool {
	return &pool{host: host, lines: lines, ready: map[readyKey]*policy.Policy{}}
}

// acquire returns a policy that is ready to run, and retains it for the caller.
func (p *pool) acquire(ctx context.Context, m module, config string) (*policy.Policy, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := readyKey{m.owner, m.name, m.digest, config}
	// A policy that was deleted and pushed again may still serve an exchange.
	if ready := p.ready[key]; ready != nil && !ready.Forgotten() && ready.Retain() {
		return ready, nil
	}
	c, err := p.compile(ctx, m)
	if err != nil {
		return nil, err
	}
	defer c.Release() // the policy retains the code
	c.Owner = m.owner
	c.Lines = func(l policylog.Line) { p.lines.Add(policylog.Policy{Owner: m.owner, Name: m.name}, l) }
	configured, err := c.Configure(ctx, []byte(config))
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(p.ready, func(_ readyKey, ready *policy.Policy) bool { return ready.Ended() })
	p.ready[key] = configured
	return configured, nil
}

// compile returns the compiled module. The caller must release it.
func (p *pool) compile(ctx context.Context, m module) (*policy.Module, error) {
	if c := p.host.Compiled(m.name, m.digest); c != nil {
		return c, nil
	}
	wasm, err := m.read()
	if err != nil {
		return nil, err
	}
	unlock, err := p.compiling.LockContext(ctx, m.owner)
	if err != nil {
		return nil, err
	}
	defer unlock()
	return p.host.Compile(ctx, m.name, wasm)
}
