// Package egresstest is an egress for tests of the API and of its clients: the real
// rules, secrets, policies and audit log over a store in memory, without anything
// that is sent.
package egresstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
)

// BuiltIn is the policy that comes with this egress.
const BuiltIn = "bearer"

// PEM stands for certificates.
const PEM = "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"

// wasm is how a module begins.
var wasm = []byte("\x00asm\x01\x00\x00\x00")

// Egress implements api.Egress. All sandboxes are those of Owner to Explain.
type Egress struct {
	Owner   string
	Store   *store.Memory
	Log     *audit.Log
	Lines   *policylog.Log
	sets    *ruleset.Sets
	vault   *vault.Vault
	modules *catalog.Modules
	node    *rule.Layer
	presets *rule.Presets
}

// nodeRules are those of every Egress, with the default allow_public.
var nodeRules = []rule.Rule{{Name: "no-metadata", Hosts: []string{"metadata.internal"}, Action: rule.Deny, Reason: "no sandbox needs it"}}

// Registry is the operator's preset of every Egress.
var Registry = preset.Preset{Name: "registry", Description: "The packages of this site", Hosts: []string{"registry.example.com"}, Source: preset.Node}

// New returns an egress whose sandboxes are owner's. It ends with the test.
func New(t testing.TB, owner string) *Egress {
	t.Helper()
	e := &Egress{Owner: owner, Store: store.NewMemory(), Log: audit.New(audit.Config{}), Lines: new(policylog.Log)}
	key, err := seal.Open(filepath.Join(t.TempDir(), "seal.key"))
	check(t, err)
	e.sets, err = ruleset.Open(context.Background(), e.Store)
	check(t, err)
	e.vault, err = vault.Open(context.Background(), e.Store, key)
	check(t, err)
	e.modules, err = catalog.Open(context.Background(), e.Store, t.TempDir())
	check(t, err)
	e.presets, err = rule.NewPresets([]preset.Preset{Registry})
	check(t, err)
	e.node, err = rule.Compile(rule.Node, nodeRules, e.presets)
	check(t, err)
	t.Cleanup(e.Log.Close)
	return e
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Module returns bytes that PutPolicy takes for a policy; they differ by n.
func Module(n byte) []byte { return append(bytes.Clone(wasm), n) }

// NodeRules implements api.Egress.
func (e *Egress) NodeRules() (rule.Default, []rule.Rule) { return rule.AllowPublic, e.node.Rules() }

func scope(owner string, id sandbox.ID) ruleset.Scope {
	if id != "" {
		return ruleset.OfSandbox(id)
	}
	return ruleset.OfOwner(owner)
}

// Presets implements api.Egress.
func (e *Egress) Presets() []preset.Preset { return e.presets.All() }

// RemovePresets removes the operator's preset.
func (e *Egress) RemovePresets() { e.presets = nil }

// Rules implements api.Egress.
func (e *Egress) Rules(_ context.Context, owner string, id sandbox.ID) (ruleset.Set, []rule.Warning, error) {
	scope := scope(owner, id)
	return e.sets.Get(scope), e.layer(scope).PresetWarnings(), nil
}

// SetRules implements api.Egress.
func (e *Egress) SetRules(ctx context.Context, owner string, id sandbox.ID, u ruleset.Update) (ruleset.Set, []rule.Warning, error) {
	scope := scope(owner, id)
	set, err := e.sets.Replace(ctx, scope, u, e.presets)
	if err != nil {
		return ruleset.Set{}, nil, err
	}
	before := []*rule.Layer{e.node}
	if id != "" {
		before = append(before, e.layer(ruleset.OfOwner(owner)))
	}
	warnings := rule.Warnings(e.layer(scope), before, func(name string) ([]string, bool) {
		s, err := e.vault.Get(owner, name)
		return s.Hosts, err == nil
	})
	return set, warnings, nil
}

// PutSecret implements api.Egress.
func (e *Egress) PutSecret(ctx context.Context, owner, name string, value []byte, hosts []string) (vault.Secret, error) {
	return e.vault.Put(ctx, owner, name, value, hosts)
}

// Use returns a secret's value, for a host that it is bound to.
func (e *Egress) Use(owner, name, host string) ([]byte, error) { return e.vault.Use(owner, name, host) }

// Secrets implements api.Egress.
func (e *Egress) Secrets(owner string) []vault.Secret { return e.vault.List(owner) }

// DeleteSecret implements api.Egress.
func (e *Egress) DeleteSecret(ctx context.Context, owner, name string) error {
	return e.vault.Delete(ctx, owner, name)
}

// PutPolicy implements api.Egress. It takes what begins as a module does.
func (e *Egress) PutPolicy(ctx context.Context, owner, name string, module []byte) (catalog.Info, error) {
	if !bytes.HasPrefix(module, wasm) {
		return catalog.Info{}, &problem.InvalidError{Field: "module", Reason: "not a WebAssembly module", Want: "build it with doze policy build"}
	}
	info, err := e.modules.Put(ctx, owner, name, module)
	info.ReplacesBuiltIn = name == BuiltIn
	return info, err
}

// Policies implements api.Egress.
func (e *Egress) Policies(owner string) []catalog.Info {
	list := append(e.modules.List(owner), catalog.Info{Name: BuiltIn, Digest: catalog.Digest(wasm), Size: int64(len(wasm)), BuiltIn: true})
	slices.SortFunc(list, func(a, b catalog.Info) int { return strings.Compare(a.Name, b.Name) })
	for i := range list {
		list[i].UsedBy = e.users(owner, list[i].Name)
	}
	return list
}

// users are the owner's rules that name a policy.
func (e *Egress) users(owner, policy string) []string {
	var users []string
	for _, r := range e.sets.Get(ruleset.OfOwner(owner)).Rules {
		if slices.ContainsFunc(r.Policies, func(u rule.Use) bool { return u.Policy == policy }) {
			users = append(users, "owner/"+r.Name)
		}
	}
	return users
}

// DeletePolicy implements api.Egress.
func (e *Egress) DeletePolicy(ctx context.Context, owner, name string) error {
	if users := e.users(owner, name); users != nil {
		return fmt.Errorf("%w: %s", catalog.ErrInUse, strings.Join(users, ", "))
	}
	err := e.modules.Delete(ctx, owner, name)
	if errors.Is(err, catalog.ErrUnknown) && name == BuiltIn {
		return fmt.Errorf("policy %s: %w", name, catalog.ErrBuiltIn)
	}
	if err != nil {
		return err
	}
	e.Lines.Forget(policylog.Policy{Owner: owner, Name: name})
	return nil
}

// HasPolicy implements api.Egress.
func (e *Egress) HasPolicy(owner, name string) bool {
	return slices.ContainsFunc(e.Policies(owner), func(i catalog.Info) bool { return i.Name == name })
}

// PolicyLogs implements api.Egress.
func (e *Egress) PolicyLogs(owner, name string, f policylog.Filter) []policylog.Line {
	return e.Lines.Lines(policylog.Policy{Owner: owner, Name: name}, f)
}

// FollowPolicyLogs implements api.Egress.
func (e *Egress) FollowPolicyLogs(owner, name string, f policylog.Filter) (<-chan policylog.Line, func()) {
	return e.Lines.Follow(policylog.Policy{Owner: owner, Name: name}, f)
}

// Flows implements api.Egress.
func (e *Egress) Flows(id sandbox.ID, f audit.Filter) []audit.Entry {
	return e.Log.Entries(string(id), f)
}

// FollowFlows implements api.Egress.
func (e *Egress) FollowFlows(id sandbox.ID, f audit.Filter) (<-chan audit.Entry, func()) {
	return e.Log.Follow(string(id), f)
}

// Explain implements api.Egress.
func (e *Egress) Explain(_ context.Context, id sandbox.ID, method, url string, header http.Header) (explain.Explanation, error) {
	r, err := explain.Parse(method, url, header)
	if err != nil {
		return explain.Explanation{}, err
	}
	table := &rule.Table{Default: rule.AllowPublic, Layers: [3]*rule.Layer{
		e.node, e.layer(ruleset.OfOwner(e.Owner)), e.layer(ruleset.OfSandbox(id))}}
	return explain.Of(table, r, known{e}), nil
}

// layer is the rules of a scope, which were compiled before they were kept.
func (e *Egress) layer(scope ruleset.Scope) *rule.Layer {
	l, err := e.sets.Get(scope).StoredLayer(scope, e.presets)
	if err != nil {
		panic(err)
	}
	return l
}

// outside is what an owner's programs outside of sandboxes are called in the Log.
func outside(owner string) string { return "proxy/" + owner }

// OutsideFlows implements api.Egress.
func (e *Egress) OutsideFlows(owner string, f audit.Filter) []audit.Entry {
	return e.Log.Entries(outside(owner), f)
}

// FollowOutsideFlows implements api.Egress.
func (e *Egress) FollowOutsideFlows(owner string, f audit.Filter) (<-chan audit.Entry, func()) {
	return e.Log.Follow(outside(owner), f)
}

// ExplainOutside implements api.Egress.
func (e *Egress) ExplainOutside(_ context.Context, owner, method, url string, header http.Header) (explain.Explanation, error) {
	r, err := explain.Parse(method, url, header)
	if err != nil {
		return explain.Explanation{}, err
	}
	table := &rule.Table{Default: rule.AllowPublic, Layers: [3]*rule.Layer{e.node, e.layer(ruleset.OfOwner(owner))}}
	return explain.Of(table, r, known{e}), nil
}

// known is what Explain asks for.
type known struct{ *Egress }

func (k known) ECH() bool { return false }

func (k known) Policy(_ rule.Source, u rule.Use) (string, error) {
	for _, p := range k.Policies(k.Owner) {
		if p.Name == u.Policy {
			return p.Digest, nil
		}
	}
	return "", catalog.ErrUnknown
}

func (k known) Secret(_ rule.Source, name, host string) error {
	_, err := k.vault.Use(k.Owner, name, host)
	return err
}

// Bundle implements api.Egress.
func (e *Egress) Bundle() []byte { return []byte(PEM) }
