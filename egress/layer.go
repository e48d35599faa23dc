package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
)

// finder returns the module to which a policy name in an owner's rules refers.
type finder func(owner, name string) (module, error)

// readyLimit bounds the time in which an owner's change readies policies, because all
// other changes wait for it. One instance of each configuration is started, which takes
// some milliseconds, and 2 s at most.
const readyLimit = 5 * time.Second

var errReadyLimit = fmt.Errorf("the policies take longer than %v to start: use fewer, or fewer configurations", readyLimit)

// newValidLayer is newLayer, but fails if a policy cannot run. The error names every
// mistake with its position.
func (e *Egress) newValidLayer(ctx context.Context, find finder, owner string, compiled *rule.Layer) (*flow.Layer, error) {
	l, err := e.newLayer(ctx, find, owner, compiled)
	if err != nil {
		return nil, err
	}
	if err := problemsOf(l, func(flow.Use) bool { return true }); err != nil {
		l.Release()
		return nil, err
	}
	return l, nil
}

// problemsOf returns the reasons why the selected policies cannot run, with the positions
// of the rules that need them.
func problemsOf(l *flow.Layer, about func(flow.Use) bool) error {
	var problems []error
	for i, r := range l.Rules() {
		for j, u := range r.Policies {
			if err := l.Unready[flow.UseOf(u)]; err != nil && about(flow.UseOf(u)) {
				problems = append(problems, policyError(i, r, j, err))
			}
		}
	}
	return errors.Join(problems...)
}

func policyError(index int, r rule.Rule, use int, err error) error {
	return &rule.Error{Index: index, Rule: r.Name, Field: fmt.Sprintf("policies[%d]", use), Problem: fmt.Sprintf("%q: %v", r.Policies[use].Policy, err)}
}

// newLayer returns a layer whose policies are ready to run. A policy that cannot run does
// not fail the call; the requests that need it are denied. newLayer returns an error if ctx
// ends.
func (e *Egress) newLayer(ctx context.Context, find finder, owner string, compiled *rule.Layer) (*flow.Layer, error) {
	l := &flow.Layer{Layer: compiled, Owner: owner, Ready: map[flow.Use]*policy.Policy{}, Unready: map[flow.Use]error{}}
	for i, r := range compiled.Rules() {
		for j, u := range r.Policies {
			key := flow.UseOf(u)
			if l.Ready[key] != nil || l.Unready[key] != nil {
				continue
			}
			p, err := e.start(ctx, find, owner, key)
			if p != nil {
				l.Ready[key] = p
			}
			if cause := context.Cause(ctx); cause != nil {
				l.Release()
				if errors.Is(cause, errReadyLimit) {
					return nil, policyError(i, r, j, cause)
				}
				return nil, cause
			}
			if err != nil {
				l.Unready[key] = err
			}
		}
	}
	return l, nil
}

// start returns a policy that is ready to run, and retained.
func (e *Egress) start(ctx context.Context, find finder, owner string, u flow.Use) (*policy.Policy, error) {
	m, err := find(owner, u.Policy)
	if err != nil {
		return nil, err
	}
	return e.pool.acquire(ctx, m, u.Config)
}

// compile compiles the modules that an owner's rules use, and retains them until release
// is called. An owner's modules are compiled one at a time, and each may take seconds.
// compile skips modules that fail to compile: newLayer reports them.
func (e *Egress) compile(ctx context.Context, owner string, rules []rule.Rule) (release func(), err error) {
	var held []*policy.Module
	release = func() {
		for _, c := range held {
			c.Release()
		}
	}
	seen := map[string]bool{}
	for _, r := range rules {
		for _, u := range r.Policies {
			if seen[u.Policy] {
				continue
			}
			seen[u.Policy] = true
			m, err := e.moduleOf(owner, u.Policy)
			if err != nil {
				continue
			}
			c, err := e.pool.compile(ctx, m)
			if err == nil {
				held = append(held, c)
			}
			if ctx.Err() != nil {
				release()
				return nil, context.Cause(ctx)
			}
		}
	}
	return release, nil
}

// uses reports whether a rule uses a policy.
func uses(r rule.Rule, policy string) bool {
	return slices.ContainsFunc(r.Policies, func(u rule.Use) bool { return u.Policy == policy })
}
