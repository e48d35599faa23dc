package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
)

// layer is rules whose policies are ready to run. It does not change; what it
// holds is given back by release.
type layer struct {
	*rule.Layer
	owner string // whose modules and secrets its rules use
	ready map[use]*ready
	// unready says why a policy cannot run. Requests that need it are denied.
	unready map[use]error
}

// use is a policy with a configuration.
type use struct{ policy, config string }

func useOf(u rule.Use) use { return use{u.Policy, string(u.Config)} }

// finder finds the module that an owner's rules mean by a name.
type finder func(owner, name string) (module, error)

// readyLimit bounds how long an owner's change may make policies ready, while all
// other changes wait: an instance of each configuration is started, which takes some
// milliseconds, and 2 s at most.
const readyLimit = 5 * time.Second

var errReadyLimit = fmt.Errorf("the policies take longer than %v to start: use fewer, or fewer configurations", readyLimit)

// arm makes the policies of rules ready. An error names every
// mistake with its position.
func (e *Egress) arm(ctx context.Context, find finder, owner string, compiled *rule.Layer) (*layer, error) {
	l, err := e.armAnyway(ctx, find, owner, compiled)
	if err != nil {
		return nil, err
	}
	if err := l.problems(func(use) bool { return true }); err != nil {
		l.release()
		return nil, err
	}
	return l, nil
}

// problems are why policies cannot run, with the positions of the rules that need
// them.
func (l *layer) problems(about func(use) bool) error {
	var problems []error
	for i, r := range l.Rules() {
		for j, u := range r.Policies {
			if err := l.unready[useOf(u)]; err != nil && about(useOf(u)) {
				problems = append(problems, &rule.Error{Index: i, Rule: r.Name, Field: fmt.Sprintf("policies[%d]", j), Problem: fmt.Sprintf("%q: %v", u.Policy, err)})
			}
		}
	}
	return errors.Join(problems...)
}

// worse says what of a policy that was pushed cannot run, and of others what could
// before: one that could not must not keep others from being mended.
func (l *layer) worse(before *layer, pushed string) error {
	return l.problems(func(u use) bool { return u.policy == pushed || before.unready[u] == nil })
}

// armAnyway is arm for rules that were accepted before: a policy that is not
// ready is no error, but denies its requests. That ctx has ended is one.
func (e *Egress) armAnyway(ctx context.Context, find finder, owner string, compiled *rule.Layer) (*layer, error) {
	l := &layer{Layer: compiled, owner: owner, ready: map[use]*ready{}, unready: map[use]error{}}
	for i, r := range compiled.Rules() {
		for j, u := range r.Policies {
			key := useOf(u)
			if l.ready[key] != nil || l.unready[key] != nil {
				continue
			}
			err := l.take(ctx, e.pool, find, key)
			if cause := context.Cause(ctx); cause != nil {
				l.release()
				if errors.Is(cause, errReadyLimit) {
					return nil, &rule.Error{Index: i, Rule: r.Name, Field: fmt.Sprintf("policies[%d]", j), Problem: fmt.Sprintf("%q: %v", u.Policy, cause)}
				}
				return nil, cause
			}
			if err != nil {
				l.unready[key] = err
			}
		}
	}
	return l, nil
}

// compile compiles the modules that an owner's rules use, and holds them until
// release is called: one module of an owner is compiled at a time, and it may take
// seconds. What
// cannot be compiled arm finds, and says where.
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
			if ctx.Err() != nil {
				err = context.Cause(ctx)
				if c != nil {
					c.Release()
				}
				release()
				return nil, err
			}
			if err == nil {
				held = append(held, c)
			}
		}
	}
	return release, nil
}

func (l *layer) take(ctx context.Context, p *pool, find finder, u use) error {
	m, err := find(l.owner, u.policy)
	if err != nil {
		return err
	}
	r, err := p.take(ctx, m, u.config)
	if err == nil {
		l.ready[u] = r
	}
	return err
}

// policy returns what a step runs, or why it cannot.
func (l *layer) policy(u rule.Use) (*ready, error) {
	key := useOf(u)
	if r := l.ready[key]; r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("policy %q cannot run: %w", u.Policy, l.unready[key])
}

// withPresets returns the layer with other presets, which takes the place of this one: what
// it holds is not acquired again. nil for nil.
func (l *layer) withPresets(presets *rule.Presets) *layer {
	if l == nil {
		return nil
	}
	with := *l
	with.Layer = l.Layer.WithPresets(presets)
	return &with
}

// release gives back the policies. What runs of them goes on to its end.
func (l *layer) release() {
	if l == nil {
		return
	}
	for _, r := range l.ready {
		r.release()
	}
}

// ruleLayer is nil for a layer that is nil.
func (l *layer) ruleLayer() *rule.Layer {
	if l == nil {
		return nil
	}
	return l.Layer
}

// usersOf returns the names of the rules that use a policy.
func usersOf(policy string, rules []rule.Rule) []string {
	var names []string
	for _, r := range rules {
		if slices.ContainsFunc(r.Policies, func(u rule.Use) bool { return u.Policy == policy }) {
			names = append(names, r.Name)
		}
	}
	return names
}
