package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/policies/builtin"
	"github.com/doze-run/doze/problem"
)

// HoldPolicies calls f. Until f returns, no policy is pushed or deleted, so that each stored
// policy has its file.
func (e *Egress) HoldPolicies(f func() error) error { return e.modules.Hold(f) }

// PutPolicy pushes a module. The owner's rules that name it use it from their next
// request on. If one of them cannot use it, the error names the rule, and nothing
// changes.
func (e *Egress) PutPolicy(ctx context.Context, owner, name string, wasm []byte) (catalog.Info, error) {
	pushed := module{owner, name, catalog.Digest(wasm), func() ([]byte, error) { return wasm, nil }}
	// The module must compile even if no rule uses it. Compiling takes a second, during
	// which no other owner waits.
	checked, err := e.pool.compile(ctx, pushed)
	var unusable *policy.CompileError
	if errors.As(err, &unusable) {
		return catalog.Info{}, &problem.InvalidError{Field: "module", Reason: unusable.Err.Error(), Want: "build it with `doze policy build`"}
	}
	if err != nil {
		return catalog.Info{}, err
	}
	defer checked.Release()
	unlock, err := e.changes.LockContext(ctx, owner)
	if err != nil {
		return catalog.Info{}, err
	}
	defer unlock()
	if err := e.changeMu.LockContext(ctx); err != nil {
		return catalog.Info{}, err
	}
	defer e.changeMu.Unlock()
	limited, cancel := context.WithTimeoutCause(ctx, readyLimit, errReadyLimit)
	defer cancel()
	layers, err := e.layersWith(limited, pushed)
	if err != nil {
		return catalog.Info{}, err
	}
	info, err := e.modules.Put(ctx, owner, name, wasm)
	if err != nil {
		releaseAll(layers)
		return catalog.Info{}, err
	}
	for scope, l := range layers {
		layers[scope], e.layers[scope] = e.layers[scope], l
	}
	if len(layers) > 0 {
		e.buildAll(func(*flow.Client) bool { return true })
	}
	releaseAll(layers) // the old ones, to which no table refers now
	info.UsedBy = e.rulesThatUse(owner, name)
	info.ReplacesBuiltIn = slices.Contains(builtin.Names(), name)
	return info, nil
}

// layersWith returns copies of the layers that use the pushed module. A policy that was not
// ready in a layer before may stay so: one broken policy must not prevent the repair of
// another. Needs changeMu.
func (e *Egress) layersWith(ctx context.Context, pushed module) (map[ruleset.Scope]*flow.Layer, error) {
	find := func(owner, name string) (module, error) {
		if owner == pushed.owner && name == pushed.name {
			return pushed, nil
		}
		return e.moduleOf(owner, name)
	}
	layers := map[ruleset.Scope]*flow.Layer{}
	for scope, old := range e.layers {
		if old.Owner != pushed.owner || !slices.ContainsFunc(old.Rules(), func(r rule.Rule) bool { return uses(r, pushed.name) }) {
			continue
		}
		l, err := e.newLayer(ctx, find, pushed.owner, old.Layer)
		if err == nil {
			layers[scope] = l
			err = problemsOf(l, func(u flow.Use) bool { return u.Policy == pushed.name || old.Unready[u] == nil })
		}
		if err != nil {
			releaseAll(layers)
			return nil, fmt.Errorf("the rules of %s cannot use it: %w", scope, err)
		}
	}
	return layers, nil
}

func releaseAll(layers map[ruleset.Scope]*flow.Layer) {
	for _, l := range layers {
		l.Release()
	}
}

// rulesThatUse returns the names of the rules that use an owner's policy, sorted:
// node/RULE, owner/RULE or sandbox/ID/RULE. Needs changeMu.
func (e *Egress) rulesThatUse(owner, name string) []string {
	var users []string
	add := func(prefix string, rules []rule.Rule) {
		for _, r := range rules {
			if uses(r, name) {
				users = append(users, prefix+r.Name)
			}
		}
	}
	if owner == e.cfg.Operator {
		add("node/", e.layers[ruleset.Scope{}].Rules())
	}
	add("owner/", e.sets.Get(ruleset.Scope{Owner: owner}).Rules)
	for scope, set := range e.sets.All() {
		if sb, _ := e.cfg.Sandboxes.ByID(scope.Sandbox); sb.ID != "" && sb.Owner == owner {
			add("sandbox/"+string(sb.ID)+"/", set.Rules)
		}
	}
	slices.Sort(users)
	return users
}

// Policies lists the policies that the owner's rules can name: those that doze ships and
// those that the owner pushed. A pushed policy replaces a shipped one of the same name.
func (e *Egress) Policies(owner string) []catalog.Info {
	e.changeMu.Lock()
	defer e.changeMu.Unlock()
	list := e.modules.List(owner)
	for _, name := range builtin.Names() {
		if slices.ContainsFunc(list, func(i catalog.Info) bool { return i.Name == name }) {
			continue
		}
		if info, err := shipped(name); err == nil {
			list = append(list, info)
		}
	}
	for i := range list {
		list[i].ReplacesBuiltIn = !list[i].BuiltIn && slices.Contains(builtin.Names(), list[i].Name)
		list[i].UsedBy = e.rulesThatUse(owner, list[i].Name)
	}
	slices.SortFunc(list, func(a, b catalog.Info) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// DeletePolicy deletes a pushed module and its stored values. Errors: catalog.ErrUnknown
// for a module that was never pushed, catalog.ErrBuiltIn (wrapped) for one that doze
// ships, catalog.ErrInUse (wrapped, with the rules) for one that rules use.
func (e *Egress) DeletePolicy(ctx context.Context, owner, name string) error {
	unlock, err := e.changes.LockContext(ctx, owner)
	if err != nil {
		return err
	}
	defer unlock()
	if err := e.changeMu.LockContext(ctx); err != nil {
		return err
	}
	defer e.changeMu.Unlock()
	if _, err := e.modules.Get(owner, name); err != nil {
		if slices.Contains(builtin.Names(), name) {
			return fmt.Errorf("policy %s: %w", name, catalog.ErrBuiltIn)
		}
		return err
	}
	if users := e.rulesThatUse(owner, name); len(users) > 0 {
		return fmt.Errorf("%w: %s", catalog.ErrInUse, strings.Join(users, ", "))
	}
	// Stored values are deleted before the module: a later policy of the same name must
	// not find them.
	if err := e.pool.host.Forget(ctx, name, owner); err != nil {
		return err
	}
	if err := e.modules.Delete(ctx, owner, name); err != nil {
		return err
	}
	e.PolicyLogs.Forget(policylog.Policy{Owner: owner, Name: name})
	return nil
}

// HasPolicy reports whether an owner's rules can name a policy.
func (e *Egress) HasPolicy(owner, name string) bool {
	_, err := e.moduleOf(owner, name)
	return err == nil
}
