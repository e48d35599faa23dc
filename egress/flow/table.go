package flow

import (
	"fmt"
	"slices"

	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
)

// Table has everything that applies to a client. It is immutable.
type Table struct {
	rule.Table
	// Policies are the layers of the node, the owner and the sandbox; nil: no rules.
	Policies [3]*Layer
	// Environment has the placeholders, keyed by the names of their variables.
	Environment map[string]string
	Offers      []placeholder.Offer
}

// LayerOf returns the layer that a step or an offer comes from.
func (t *Table) LayerOf(s rule.Source) *Layer {
	return t.Policies[slices.Index([]rule.Source{rule.Node, rule.Owner, rule.Sandbox}, s)]
}

// SecretOf returns the secret that a rule offers.
func (t *Table) SecretOf(o rule.Offer) secret.ID {
	return secret.ID{Owner: t.LayerOf(o.Source).Owner, Name: o.Secret}
}

// Layer is a set of rules, with the policies that they use. It is immutable.
type Layer struct {
	*rule.Layer
	Owner string // of the modules and secrets that the rules use
	// Ready are the policies that can run. The layer retains each until it is replaced.
	Ready map[Use]*policy.Policy
	// Unready has the reason for which a policy cannot run. Requests that need it are
	// denied.
	Unready map[Use]error
}

// WithPresets returns a copy of the layer with other presets. The copy takes over the
// policies of l, which are not retained again.
func (l *Layer) WithPresets(presets *rule.Presets) *Layer {
	with := *l
	with.Layer = l.Layer.WithPresets(presets)
	return &with
}

// Release releases the policies; nil has none. Running calls finish.
func (l *Layer) Release() {
	if l == nil {
		return
	}
	for _, p := range l.Ready {
		p.Release()
	}
}

// Use is a policy with a configuration.
type Use struct{ Policy, Config string }

// UseOf returns the use that a rule names.
func UseOf(u rule.Use) Use { return Use{u.Policy, string(u.Config)} }

// policy returns the policy of a step.
func (l *Layer) policy(u rule.Use) (*policy.Policy, error) {
	if p := l.Ready[UseOf(u)]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("policy %q cannot run: %w", u.Policy, l.Unready[UseOf(u)])
}
