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

// layer is a flow.Layer that retains its policies until release.
type layer struct{ flow.Layer }

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
	if err := l.problems(func(flow.Use) bool { return true }); err != nil {
		l.release()
		return nil, err
	}
	return l, nil
}

// problems are why policies cannot run, with the positions of the rules that need
// them.
func (l *layer) problems(about func(flow.Use) bool) error {
	var problems []error
	for i, r := range l.Rules() {
		for j, u := range r.Policies {
			if err := l.Unready[flow.UseOf(u)]; err != nil && about(flow.UseOf(u)) {
				problems = append(problems, &rule.Error{Index: i, Rule: r.Name, Field: fmt.Sprintf("policies[%d]", j), Problem: fmt.Sprintf("%q: %v", u.Policy, err)})
			}
		}
	}
	return errors.Join(problems...)
}

// worse says what of a policy that was pushed cannot run, and of others what could
// before: one that could not must not keep others from being mended.
func (l *layer) worse(before *layer, pushed string) error {
	return l.problems(func(u flow.Use) bool { return u.Policy == pushed || before.Unready[u] == nil })
}

// armAnyway is arm for rules that were accepted before: a policy that is not
// ready is no error, but denies its requests. That ctx has ended is one.
func (e *Egress) armAnyway(ctx context.Context, find finder, owner string, compiled *rule.Layer) (*layer, error) {
	l := &layer{flow.Layer{Layer: compiled, Owner: owner, Ready: map[flow.Use]*policy.Policy{}, Unready: map[flow.Use]error{}}}
	for i, r := range compiled.Rules() {
		for j, u := range r.Policies {
			key := flow.UseOf(u)
			if l.Ready[key] != nil || l.Unready[key] != nil {
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
				l.Unready[key] = err
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

func (l *layer) take(ctx context.Context, p *pool, find finder, u flow.Use) error {
	m, err := find(l.Owner, u.Policy)
	if err != nil {
		return err
	}
	r, err := p.take(ctx, m, u.Config)
	if err == nil {
		l.Ready[u] = r
	}
	return err
}

// withPresets returns the layer with other presets, which takes the place of this one: what
// it holds is not acquired again. nil for nil.
func (l *layer) withPresets(presets *rule.Presets) *layer {
	if l == nil {
		return nil
	}
	with := *l
	with.Layer.Layer = l.WithPresets(presets)
	return &with
}

// release gives back the policies. What runs of them goes on to its end.
func (l *layer) release() {
	if l == nil {
		return
	}
	for _, p := range l.Ready {
		p.Release()
	}
}

// ruleLayer is nil for a layer that is nil.
func (l *layer) ruleLayer() *rule.Layer {
	if l == nil {
		return nil
	}
	return l.Layer.Layer
}

// flowLayer returns nil for a nil layer.
func (l *layer) flowLayer() *flow.Layer {
	if l == nil {
		return nil
	}
	return &l.Layer
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
