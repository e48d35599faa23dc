package api

import (
	"errors"
	"fmt"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/rule/ruleset"
)

// RulesOf converts rules of the API, or of the node's configuration, which have the
// same form. The error joins a *rule.Error for each value that has no counterpart;
// all other checks are rule.Compile's.
func RulesOf(rules []types.Rule) ([]rule.Rule, error) {
	converted := make([]rule.Rule, len(rules))
	var errs []error
	for i, r := range rules {
		invalid := func(field, format string, args ...any) {
			errs = append(errs, &rule.Error{Index: i, Rule: r.Name, Field: field, Problem: fmt.Sprintf(format, args...)})
		}
		converted[i] = ruleOf(r, invalid)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return converted, nil
}

// ruleOf converts one rule, and calls invalid for each value that has no counterpart.
func ruleOf(r types.Rule, invalid func(field, format string, args ...any)) rule.Rule {
	converted := rule.Rule{
		Name:         r.Name,
		Hosts:        r.Hosts,
		Addresses:    r.Addresses,
		Private:      r.AllowPrivate,
		Scheme:       r.Scheme,
		Methods:      r.Methods,
		Paths:        r.Paths,
		Headers:      r.Headers,
		Reason:       r.Reason,
		Placeholders: r.Placeholders,
	}
	switch r.Action {
	case "": // package rule infers it
	case types.RuleActionAllow:
		converted.Action = rule.Allow
	case types.RuleActionDeny:
		converted.Action = rule.Deny
	default:
		invalid("action", "unknown action %.40q; use allow or deny, or no action in a rule with policies or respond", r.Action)
	}
	for i, text := range r.Ports {
		ports, err := rule.ParsePorts(text)
		if err != nil {
			invalid(fmt.Sprintf("ports[%d]", i), "%v", err)
		}
		converted.Ports = append(converted.Ports, ports)
	}
	if r.Respond != nil {
		converted.Response = new(rule.Response(*r.Respond))
	}
	for _, p := range r.Policies {
		converted.Policies = append(converted.Policies, rule.Use{Policy: p.Name, Config: p.Config, Secrets: p.Secrets})
	}
	return converted
}

// ruleTo is the reverse of ruleOf. The action of a rule with policies or a response is
// implied.
func ruleTo(r rule.Rule) types.Rule {
	converted := types.Rule{
		Name:         r.Name,
		Hosts:        r.Hosts,
		Addresses:    r.Addresses,
		AllowPrivate: r.Private,
		Scheme:       r.Scheme,
		Methods:      r.Methods,
		Paths:        r.Paths,
		Headers:      r.Headers,
		Reason:       r.Reason,
		Placeholders: r.Placeholders,
	}
	switch r.Action {
	case rule.Allow:
		converted.Action = types.RuleActionAllow
	case rule.Deny:
		converted.Action = types.RuleActionDeny
	}
	for _, ports := range r.Ports {
		converted.Ports = append(converted.Ports, ports.String())
	}
	if r.Response != nil {
		converted.Respond = new(types.RuleResponse(*r.Response))
	}
	for _, use := range r.Policies {
		converted.Policies = append(converted.Policies, types.RulePolicy{Name: use.Policy, Config: use.Config, Secrets: use.Secrets})
	}
	return converted
}

func ruleSetOf(set ruleset.Set, warnings []rule.Warning) types.RuleSet {
	converted := types.RuleSet{
		Revision:  set.Revision,
		UpdatedAt: set.UpdatedAt,
		Default:   types.RuleDefault(set.Default),
		Rules:     listOf(set.Rules, ruleTo),
	}
	for _, w := range warnings {
		location := fmt.Sprintf("body.rules[%d]", w.Index)
		if w.Field != "" {
			location += "." + w.Field
		}
		converted.Warnings = append(converted.Warnings, types.Warning{Location: location, Message: w.Problem, Hint: w.Remedy})
	}
	return converted
}

func presetOf(p preset.Preset) types.Preset {
	return types.Preset{Name: p.Name, Description: p.Description, Hosts: p.Hosts, Source: types.PresetSource(p.Source)}
}
