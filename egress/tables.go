package egress

import (
	"context"
	"crypto/x509"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/runtime/sandbox"
)

// build makes a client's table from the current layers. Needs changeMu.
func (e *Egress) build(c *flow.Client) {
	t := &flow.Table{}
	t.Default = e.settings.Load().Default
	for i, scope := range scopesOf(c.Owner, c.ID) {
		if l := e.layers[scope]; l != nil {
			t.Layers[i], t.Policies[i] = l.Layer, l
		}
	}
	if c.ID != "" { // the node does not set the environment of programs outside of sandboxes
		t.Environment = map[string]string{}
		for variable, offered := range t.Placeholders() {
			id := t.SecretOf(offered)
			p := placeholder.Offer{Secret: id, Text: placeholder.Text(e.placeholderKey, c.Name()+"/"+id.Owner, id.Name)}
			t.Environment[variable] = p.Text
			if !slices.Contains(t.Offers, p) {
				t.Offers = append(t.Offers, p)
			}
		}
	}
	c.SetTable(t)
}

// buildAll makes the tables of all clients for which affected returns true. Needs changeMu.
func (e *Egress) buildAll(affected func(*flow.Client) bool) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	for c := range e.clients() {
		if affected(c) {
			e.build(c)
		}
	}
}

// clients returns all clients. Needs mu.
func (e *Egress) clients() iter.Seq[*flow.Client] {
	return func(yield func(*flow.Client) bool) {
		for _, a := range e.attachments {
			if !yield(a.Client) {
				return
			}
		}
		for _, p := range e.proxyClients {
			if !yield(p.Client) {
				return
			}
		}
	}
}

// NodeRules returns the node's rules, and the default for traffic that no rule matches.
// The caller must not modify them.
func (e *Egress) NodeRules() (rule.Default, []rule.Rule) {
	s := e.settings.Load()
	return s.Default, s.Rules.Rules()
}

// scopesOf returns the scopes whose rules apply to a sandbox, or to the owner's programs
// outside of sandboxes if id is empty.
func scopesOf(owner string, id sandbox.ID) []ruleset.Scope {
	scopes := []ruleset.Scope{{}, ruleset.Scope{Owner: owner}}
	if id != "" {
		scopes = append(scopes, ruleset.Scope{Sandbox: id})
	}
	return scopes
}

// Presets returns the lists of hosts that rules can name. The caller must not modify them.
func (e *Egress) Presets() []preset.Preset { return e.presets().All() }

// presets returns the presets that are defined now.
func (e *Egress) presets() *rule.Presets { return e.settings.Load().Rules.Presets() }

// Rules returns the rules of a sandbox, or the owner's rules if id is empty, and warnings
// about rules that no longer work as intended.
func (e *Egress) Rules(_ context.Context, owner string, id sandbox.ID) (ruleset.Set, []rule.Warning, error) {
	scopes := scopesOf(owner, id)
	set := e.sets.Get(scopes[len(scopes)-1])
	return set, set.Layer(e.presets()).PresetWarnings(), nil
}

// SetRules replaces the rules of an owner's sandbox, or the owner's rules if id is empty,
// from the next request on. Mistakes are errors with their positions, and change nothing.
// Warnings are about rules that are in force but may not work as intended.
func (e *Egress) SetRules(ctx context.Context, owner string, id sandbox.ID, u ruleset.Update) (ruleset.Set, []rule.Warning, error) {
	set, layers, err := e.setRules(ctx, owner, id, u)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	last := len(layers) - 1
	return set, rule.Warnings(layers[last], layers[:last], e.secretHosts(owner)), nil
}

// setRules returns the new rules, and the layers up to and including theirs.
func (e *Egress) setRules(ctx context.Context, owner string, id sandbox.ID, u ruleset.Update) (ruleset.Set, []*rule.Layer, error) {
	scopes := scopesOf(owner, id)
	scope := scopes[len(scopes)-1]
	unlock, err := e.changes.LockContext(ctx, owner)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	defer unlock()
	presets := e.presets()
	next, err := e.sets.Compile(scope, u, presets)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	done, err := e.changeWith(ctx, owner, u.Rules)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	defer done()
	if current := e.presets(); current != presets { // until done is called, no reload replaces them
		if next, err = e.sets.Compile(scope, u, current); err != nil {
			return ruleset.Set{}, nil, err
		}
		presets = current
	}
	compiled := next.Layer(presets)
	if id != "" && !e.exists(id) { // or its rules would never be deleted
		return ruleset.Set{}, nil, sandbox.ErrNotFound
	}
	limited, cancel := context.WithTimeoutCause(ctx, readyLimit, errReadyLimit)
	defer cancel()
	layer, err := e.newValidLayer(limited, e.moduleOf, owner, compiled)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	set, err := e.sets.Replace(ctx, scope, next, u.IfRevision)
	if err != nil {
		layer.Release()
		return ruleset.Set{}, nil, err
	}
	old := e.layers[scope]
	e.layers[scope] = layer
	e.buildAll(func(c *flow.Client) bool { return c.Owner == owner && (id == "" || c.ID == id) })
	old.Release() // no table refers to it now
	var layers []*rule.Layer
	for _, scope := range scopes {
		if l := e.layers[scope]; l != nil {
			layers = append(layers, l.Layer)
		}
	}
	return set, layers, nil
}

// secretHosts looks up the hosts of an owner's secrets, for warnings.
func (e *Egress) secretHosts(owner string) rule.Secrets {
	return func(name string) ([]string, bool) {
		s, err := e.Secrets.Get(owner, name)
		return s.Hosts, err == nil
	}
}

// changeWith compiles the modules of an owner's rules, and then locks changeMu until done
// is called.
func (e *Egress) changeWith(ctx context.Context, owner string, rules []rule.Rule) (done func(), err error) {
	compiled, err := e.compile(ctx, owner, rules)
	if err != nil {
		return nil, err
	}
	if err := e.changeMu.LockContext(ctx); err != nil {
		compiled()
		return nil, err
	}
	return func() {
		e.changeMu.Unlock()
		compiled()
	}, nil
}

// exists reports whether a sandbox exists and is not being destroyed.
func (e *Egress) exists(id sandbox.ID) bool {
	sb, ok := e.cfg.Sandboxes.ByID(id)
	return ok && sb.State != sandbox.StateDestroyed
}

// loadLayer makes the layer of the stored rules of a scope, if it has any and no layer yet.
// Needs changeMu.
func (e *Egress) loadLayer(ctx context.Context, scope ruleset.Scope, owner string) error {
	set := e.sets.Get(scope)
	if e.layers[scope] != nil || len(set.Rules) == 0 && set.Default == rule.Inherit {
		return nil
	}
	l, err := e.newLayer(ctx, e.moduleOf, owner, set.Layer(e.presets()))
	if err != nil {
		return fmt.Errorf("rules of %s: %w", scope, err)
	}
	for u, why := range l.Unready {
		e.log.Error("failed to start policy; denying the requests that need it", "rules_of", scope.String(), "policy", u.Policy, "error", why)
	}
	e.layers[scope] = l
	return nil
}

// Change is a prepared change of settings. Until Apply or Discard, no other change of
// settings, rules or policies begins, and no sandbox is attached for the first time. The
// caller must not block in between.
type Change struct {
	e        *Egress
	settings Settings
	roots    *x509.CertPool // of upstreams
	node     *flow.Layer
	done     func() // allows other changes
}

// Prepare checks settings and readies the policies that they need, so that Apply cannot
// fail.
func (e *Egress) Prepare(ctx context.Context, s Settings) (*Change, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	roots, err := rootsWith(s.UpstreamCAs)
	if err != nil {
		return nil, err
	}
	done, err := e.changeWith(ctx, e.cfg.Operator, s.Rules.Rules())
	if err != nil {
		return nil, fmt.Errorf("egress: %w", err)
	}
	node, err := e.newValidLayer(ctx, e.moduleOf, e.cfg.Operator, s.Rules)
	if err != nil {
		done()
		return nil, fmt.Errorf("egress: %w", err)
	}
	for _, w := range rule.Warnings(s.Rules, nil, e.secretHosts(e.cfg.Operator)) {
		e.log.Warn("node rule has a problem", "rule", s.Rules.Rules()[w.Index].Name, "problem", w.Problem, "remedy", w.Remedy)
	}
	return &Change{e, s, roots, node, done}, nil
}

// Apply puts the settings into force, from the next request of each sandbox on.
func (c *Change) Apply() {
	e := c.e
	defer c.done()
	s, node := c.settings, e.layers[ruleset.Scope{}]
	dialing := dial.Config{Servers: s.NameServers, Overrides: s.Resolve, Proxy: s.UpstreamProxy, ProxyRoots: c.roots}
	before := e.carrier.SetSettings(flow.Settings{
		Upstreams: flow.NewUpstreams(dialing, c.roots), AllowECH: s.AllowECH,
		MaxConnections: s.MaxConnections, MaxClientConnections: s.MaxSandboxConnections,
	})
	e.settings.Store(&s)
	e.layers[ruleset.Scope{}] = c.node
	for scope, l := range e.layers {
		e.layers[scope] = l.WithPresets(e.presets())
	}
	e.reportUndefinedPresets()
	e.buildAll(func(*flow.Client) bool { return true })
	node.Release()
	if before != nil {
		before.Close()
	}
}

// reportUndefinedPresets logs one line for each undefined preset that stored rules name,
// however many rules name it.
func (e *Egress) reportUndefinedPresets() {
	users := map[string][]string{}
	for scope, set := range e.sets.All() {
		for _, name := range set.Layer(e.presets()).UndefinedPresets() {
			users[name] = append(users[name], scope.String())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(users)) {
		slices.Sort(users[name])
		e.log.Warn("rules name a preset that is not defined: those that allow it match none of its hosts, all others deny every host",
			"preset", name, "rules_of", users[name][:min(len(users[name]), maxReported)], "count", len(users[name]))
	}
}

// maxReported bounds the users of a preset in a log line.
const maxReported = 10

// Discard releases the prepared policies.
func (c *Change) Discard() {
	defer c.done()
	c.node.Release()
}
