package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/policies/builtin"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

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
	leave, err := e.changes.LockContext(ctx, owner)
	if err != nil {
		return catalog.Info{}, err
	}
	defer leave()
	if err := e.changeMu.LockContext(ctx); err != nil {
		return catalog.Info{}, err
	}
	defer e.changeMu.Unlock()
	limited, cancel := context.WithTimeoutCause(ctx, readyLimit, errReadyLimit)
	defer cancel()
	anew, err := e.armAnew(limited, pushed)
	if err != nil {
		return catalog.Info{}, err
	}
	info, err := e.modules.Put(ctx, owner, name, wasm)
	if err != nil {
		for _, a := range anew {
			a.layer.release()
		}
		return catalog.Info{}, err
	}
	for _, a := range anew {
		a.place(a.layer)
	}
	if len(anew) > 0 {
		e.buildAll(everyClient)
	}
	for _, a := range anew { // no table refers to the old layers now
		a.before.release()
	}
	info.UsedBy = e.rulesThatUse(owner, name)
	info.ReplacesBuiltIn = slices.Contains(builtin.Names(), name)
	return info, nil
}

// placed is a layer with its place: the node, the owner or a sandbox.
type placed struct {
	layer  *layer
	source rule.Source
	whose  string
	place  func(*layer) // replaces the layer
	before *layer       // the replaced layer
}

// armAnew readies copies of the layers that use the pushed module. Needs changeMu.
func (e *Egress) armAnew(ctx context.Context, pushed module) ([]placed, error) {
	find := func(owner, name string) (module, error) {
		if owner == pushed.owner && name == pushed.name {
			return pushed, nil
		}
		return e.moduleOf(owner, name)
	}
	var anew []placed
	for _, p := range e.layersOf(pushed.owner) {
		if len(usersOf(pushed.name, p.layer.Rules())) == 0 {
			continue
		}
		l, err := e.armAnyway(ctx, find, pushed.owner, p.layer.Layer.Layer)
		if err == nil {
			err = l.worse(p.layer, pushed.name)
		}
		if err != nil {
			l.release()
			for _, a := range anew {
				a.layer.release()
			}
			return nil, fmt.Errorf("%s cannot use it: %w", p.whose, err)
		}
		p.before, p.layer = p.layer, l
		anew = append(anew, p)
	}
	return anew, nil
}

// layersOf returns the layers that use an owner's modules. Needs changeMu.
func (e *Egress) layersOf(owner string) []placed {
	var list []placed
	if owner == e.cfg.Operator && e.node != nil {
		list = append(list, placed{layer: e.node, source: rule.Node, whose: "the node's rules", place: func(l *layer) { e.node = l }})
	}
	if own := e.owners[owner]; own != nil {
		list = append(list, placed{layer: own, source: rule.Owner, whose: "the owner's rules", place: func(l *layer) { e.owners[owner] = l }})
	}
	for id, own := range e.own {
		if own.Owner == owner {
			list = append(list, placed{layer: own, source: rule.Sandbox, whose: "the rules of sandbox " + string(id), place: func(l *layer) { e.own[id] = l }})
		}
	}
	return list
}

// rulesThatUse returns the names of the rules that use an owner's policy, sorted:
// node/RULE, owner/RULE or sandbox/ID/RULE. Needs changeMu.
func (e *Egress) rulesThatUse(owner, name string) []string {
	var users []string
	if owner == e.cfg.Operator {
		users = prefixed("node/", usersOf(name, e.node.Rules()))
	}
	users = append(users, prefixed("owner/", usersOf(name, e.sets.Get(ruleset.OfOwner(owner)).Rules))...)
	for scope, set := range e.sets.All() {
		id := scope.Sandbox()
		if id == "" || e.ownerOf(id) != owner {
			continue
		}
		users = append(users, prefixed("sandbox/"+string(id)+"/", usersOf(name, set.Rules))...)
	}
	slices.Sort(users)
	return users
}

func (e *Egress) ownerOf(id sandbox.ID) string {
	sb, _ := e.cfg.Sandboxes.ByID(id)
	return sb.Owner
}

func prefixed(prefix string, names []string) []string {
	list := make([]string, len(names))
	for i, n := range names {
		list[i] = prefix + n
	}
	return list
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
	leave, err := e.changes.LockContext(ctx, owner)
	if err != nil {
		return err
	}
	defer leave()
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
	e.pool.lines.Forget(policylog.Policy{Owner: owner, Name: name})
	return nil
}
