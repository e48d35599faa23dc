package egress

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/doze-run/doze/egress/modules"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/policies/builtin"
)

// module is WebAssembly that an owner's rules mean by a name.
type module struct {
	owner, name, digest string
	read                func() ([]byte, error)
}

// moduleOf finds what an owner pushed under a name, or what doze ships under it.
func (e *Egress) moduleOf(owner, name string) (module, error) {
	info, err := e.modules.Get(owner, name)
	if err == nil {
		return module{owner, name, info.Digest, func() ([]byte, error) {
			_, wasm, err := e.modules.Read(owner, name)
			return wasm, err
		}}, nil
	}
	if !errors.Is(err, modules.ErrUnknown) {
		return module{}, err
	}
	info, err = shipped(name)
	switch {
	case errors.Is(err, builtin.ErrUnknown):
		return module{}, fmt.Errorf("no policy has this name: push it, or use one of %s", strings.Join(builtin.Names(), ", "))
	case err != nil:
		return module{}, err
	}
	return module{owner, name, info.Digest, func() ([]byte, error) { return builtin.Module(name) }}, nil
}

// described are the policies that doze ships, by name, as far as they were asked
// for: each has to be decompressed to be described.
var described sync.Map

// shipped describes a policy that doze ships. Errors are those of builtin.Module.
func shipped(name string) (modules.Info, error) {
	if info, ok := described.Load(name); ok {
		return info.(modules.Info), nil
	}
	wasm, err := builtin.Module(name)
	if err != nil {
		return modules.Info{}, err
	}
	info := modules.Info{Name: name, Digest: modules.Digest(wasm), Size: int64(len(wasm)), BuiltIn: true}
	described.Store(name, info)
	return info, nil
}

// pool holds the policies that are ready to run. Rules of an owner that use the
// same module with the same configuration share one.
type pool struct {
	host *policy.Host

	mu       sync.Mutex // held while a module is compiled, too: one at a time
	compiled map[string]*compiled
	ready    map[readyKey]*ready
}

// compiled is a module with the number of those that use it.
type compiled struct {
	module *policy.Module
	uses   int
}

type readyKey struct{ owner, name, digest, config string }

// ready is a policy with its configuration.
type ready struct {
	pool   *pool
	key    readyKey
	policy *policy.Policy
	uses   int // guarded by pool.mu
}

func newPool(host *policy.Host) *pool {
	return &pool{host: host, compiled: map[string]*compiled{}, ready: map[readyKey]*ready{}}
}

// take makes a policy ready, or shares one that is. The caller releases it.
func (p *pool) take(ctx context.Context, m module, config string) (*ready, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := readyKey{m.owner, m.name, m.digest, config}
	if r := p.ready[key]; r != nil {
		r.uses++
		return r, nil
	}
	c, err := p.compile(ctx, m)
	if err != nil {
		return nil, err
	}
	configured, err := c.Configure(ctx, []byte(config))
	if err != nil {
		p.unuse(m.digest)
		return nil, err
	}
	r := &ready{pool: p, key: key, policy: configured, uses: 1}
	p.ready[key] = r
	return r, nil
}

// holds says whether a module is there that need not be compiled.
func (p *pool) holds(digest string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.compiled[digest] != nil
}

// compile returns a module, counted as used. Needs mu.
func (p *pool) compile(ctx context.Context, m module) (*policy.Module, error) {
	if c := p.compiled[m.digest]; c != nil {
		c.uses++
		return c.module, nil
	}
	wasm, err := m.read()
	if err != nil {
		return nil, err
	}
	c, err := p.host.Compile(ctx, m.name, wasm)
	if err != nil {
		return nil, err
	}
	p.compiled[m.digest] = &compiled{c, 1}
	return c, nil
}

// unuse takes back a use of a module. Needs mu.
func (p *pool) unuse(digest string) {
	c := p.compiled[digest]
	if c.uses--; c.uses == 0 {
		delete(p.compiled, digest)
		c.module.Release()
	}
}

// release gives the policy back. Exchanges that run go on to their end.
func (r *ready) release() {
	p := r.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.uses--; r.uses > 0 {
		return
	}
	delete(p.ready, r.key)
	r.policy.Release()
	p.unuse(r.key.digest)
}
