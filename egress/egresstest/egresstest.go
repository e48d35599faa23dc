// Package egresstest opens the real egress for tests of the API and of its clients, over
// documents in memory and the Manager of package sandboxtest. Sandboxes are not attached
// to it: tests record flows and lines of policies themselves.
package egresstest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/egress/internal/wat"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/policytest"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/storetest"
)

// BuiltIn is one of the policies that are part of doze.
const BuiltIn = "bearer"

// Registry is the operator's preset.
var Registry = preset.Preset{Name: "registry", Description: "The packages of this site", Hosts: []string{"registry.example.com"}, Source: preset.Node}

// Egress is an egress with its parts.
type Egress struct {
	*egress.Egress
	Documents *store.Badger

	cfg egress.Config
}

// Compiling returns how tests of a package compile policies: each module once, by a
// program that is built into dir.
func Compiling(dir string) (policy.Config, error) {
	compiler, err := policytest.BuildCompiler(dir)
	return policy.Config{CacheDir: filepath.Join(dir, "code"), Compiler: compiler}, err
}

// Open opens an egress with one rule of the node, which denies metadata.internal. It ends
// with the test.
func Open(t testing.TB, m *sandbox.Manager, compiling policy.Config) *Egress {
	t.Helper()
	e := &Egress{Documents: storetest.New(t)}
	presets, err := rule.NewPresets([]preset.Preset{Registry})
	check(t, err)
	settings := egress.DefaultSettings()
	settings.Rules, err = rule.Compile(rule.Node, []rule.Rule{{Name: "no-metadata", Hosts: []string{"metadata.internal"}, Action: rule.Deny, Reason: "no sandbox needs it"}}, presets)
	check(t, err)
	e.cfg = egress.Config{Folder: t.TempDir(), Documents: e.Documents, Operator: "node", Settings: settings, PolicyCompiler: compiling.Compiler}
	check(t, os.MkdirAll(compiling.CacheDir, 0o700))
	check(t, os.Symlink(compiling.CacheDir, filepath.Join(e.cfg.Folder, "compiled")))
	e.open(t, m)
	t.Cleanup(func() { check(t, e.Close()) })
	return e
}

func (e *Egress) open(t testing.TB, m *sandbox.Manager) {
	t.Helper()
	e.cfg.Sandboxes = egress.ManagedSandboxes(m)
	opened, err := egress.Open(t.Context(), e.cfg)
	check(t, err)
	e.Egress = opened
}

// Reopen restarts the egress after its Manager.
func (e *Egress) Reopen(t testing.TB, m *sandbox.Manager) {
	t.Helper()
	check(t, e.Close())
	e.open(t, m)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Module returns a policy that does nothing. The bytes differ by n.
func Module(n byte) []byte {
	return wat.Handler(nil, string(rune('A'+n)), wat.Code(wat.I64Const(1), wat.End), wat.End).Binary()
}

// RemovePresets removes the operator's preset.
func (e *Egress) RemovePresets(t testing.TB) {
	t.Helper()
	settings := e.cfg.Settings
	settings.Rules = settings.Rules.WithPresets(nil)
	change, err := e.Prepare(t.Context(), settings)
	check(t, err)
	change.Apply()
}

// Secret returns the stored value of a secret, for a host that it is bound to.
func (e *Egress) Secret(t testing.TB, owner, name, host string) (string, error) {
	t.Helper()
	key, err := seal.Open(filepath.Join(e.cfg.Folder, "seal.key"))
	check(t, err)
	v, err := vault.Open(t.Context(), e.Documents, key)
	check(t, err)
	value, err := v.Use(owner, name, host)
	return string(value), err
}
