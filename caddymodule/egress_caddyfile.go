package caddymodule

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/preset"
)

// parseEgress reads what sandboxes may send out. Syntax:
//
//	egress {
//		default allow_public|deny
//		rule <name> {
//			hosts       <pattern...>
//			addresses   <network...>
//			ports       <port|first-last...>
//			allow_private
//			scheme      http|https
//			methods     <method...>
//			paths       <glob...>
//			header      <name> <glob>
//			placeholder <variable> <secret>
//			allow
//			deny        [<reason>]
//			respond     <status> [<body>] {
//				header <name> <value>
//			}
//			policy <name> {
//				config <json>
//				secret <name in the policy> <secret>
//			}
//		}
//		preset <name> [<pattern...>] {
//			description <text>
//			hosts       <pattern...>
//		}
//		resolve                     <host> <address...>
//		resolvers                   <address...>
//		upstream_ca                 <file...>
//		upstream_proxy              <url>
//		ech                         intercept|allow
//		max_connections             <count>
//		max_connections_per_sandbox <count>
//		policy_memory_limit         <size>
//		policy_time_limit           <duration>
//	}
//
// A rule has one of allow, deny and respond, or one policy or more. Presets may follow the
// rules that name them.
func (a *App) parseEgress(o options) error {
	if a.Egress != nil {
		return o.Err("egress is already set; put all of it into one block")
	}
	if o.NextArg() {
		return o.ArgErr()
	}
	e := new(Egress)
	a.Egress = e
	var rules []*caddyfile.Dispenser
	fields := map[string]any{
		"default": (*string)(&e.Default),
		"rule": func(o options) error {
			rules = append(rules, o.NewFromNextSegment())
			return e.parseRule(rules[len(rules)-1])
		},
		"preset":                      e.parsePreset,
		"resolve":                     e.parseResolve,
		"resolvers":                   &e.Resolvers,
		"upstream_ca":                 &e.UpstreamCAFiles,
		"upstream_proxy":              &e.UpstreamProxy,
		"ech":                         &e.ECH,
		"max_connections":             &e.MaxConnections,
		"max_connections_per_sandbox": &e.MaxConnectionsPerSandbox,
		"policy_memory_limit":         &e.PolicyMemoryLimit,
		"policy_time_limit":           &e.PolicyTimeLimit,
	}
	block := o.NewFromNextSegment()
	block.Next() // egress
	inner := options{Dispenser: block, seen: map[string]bool{}}
	for nesting := block.Nesting(); block.NextBlock(nesting); {
		if err := inner.read("egress", fields); err != nil {
			return err
		}
		// All options before were valid: a mistake is in this line.
		if _, err := e.options(); err != nil {
			return block.WrapErr(err)
		}
	}
	presets, err := e.presets()
	if err != nil {
		return wrapAtStart(block, err)
	}
	if _, err := e.compileRules(presets); err != nil {
		at := block
		if first, ok := errors.AsType[*rule.Error](err); ok {
			at = rules[first.Index]
			e.Rules = e.Rules[:first.Index+1]
			_, err = e.compileRules(presets) // without the mistakes in later rules
		}
		return wrapAtStart(at, err)
	}
	return nil
}

// wrapAtStart gives an error the position of the first token.
func wrapAtStart(d *caddyfile.Dispenser, err error) error {
	d.Reset()
	d.Next()
	return d.WrapErr(err)
}

func (e *Egress) parsePreset(in options) error {
	d := in.NewFromNextSegment()
	d.Next() // preset
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	if err := setOnce(d, &e.Presets, "preset "+name, name, Preset{}); err != nil {
		return err
	}
	p := Preset{Hosts: d.RemainingArgs()}
	if err := readBlock(d, "preset", map[string]any{"description": &p.Description, "hosts": &p.Hosts}); err != nil {
		return err
	}
	e.Presets[name] = p
	if _, err := rule.NewPresets([]preset.Preset{p.preset(name)}); err != nil {
		return wrapAtStart(d, err)
	}
	return nil
}

func (e *Egress) parseResolve(o options) error {
	args := o.RemainingArgs()
	if len(args) < 2 {
		return o.ArgErr()
	}
	return setOnce(o.Dispenser, &e.Resolve, "resolve "+args[0], args[0], args[1:])
}

func (e *Egress) parseRule(d *caddyfile.Dispenser) error {
	d.Next() // rule
	var r ruleParser
	if !d.AllArgs(&r.Name) {
		return d.ArgErr()
	}
	err := readBlock(d, "rule", map[string]any{
		"hosts":         &r.Hosts,
		"addresses":     &r.Addresses,
		"ports":         r.ports,
		"allow_private": &r.AllowPrivate,
		"scheme":        &r.Scheme,
		"methods":       &r.Methods,
		"paths":         &r.Paths,
		"header":        &r.Headers,
		"placeholder":   &r.Placeholders,
		"allow":         r.action,
		"deny":          r.action,
		"respond":       r.action,
		"policy":        r.action,
	})
	e.Rules = append(e.Rules, r.Rule)
	return err
}

type ruleParser struct{ types.Rule }

// action reads what decides on requests: a rule has one of allow, deny and respond, or
// policies.
func (r *ruleParser) action(o options) error {
	name := o.Val()
	if r.Action != "" || r.Respond != nil || len(r.Policies) > 0 && name != "policy" {
		return o.Err("the rule's action is already set; a rule has one of allow, deny and respond, or policies")
	}
	switch name {
	case "respond":
		return r.respond(o)
	case "policy":
		return r.policy(o)
	case "deny":
		if o.NextArg() {
			r.Reason = o.Val()
		}
	}
	r.Action = types.RuleAction(name)
	return o.nothing()
}

func (r *ruleParser) ports(o options) error {
	if err := o.list(&r.Ports); err != nil {
		return err
	}
	for _, ports := range r.Ports {
		if _, err := rule.ParsePorts(ports); err != nil {
			return o.WrapErr(err)
		}
	}
	return nil
}

func (r *ruleParser) respond(o options) error {
	args := o.RemainingArgs()
	if len(args) == 0 || len(args) > 2 {
		return o.ArgErr()
	}
	status, err := strconv.Atoi(args[0])
	if err != nil {
		return o.Errf("respond: invalid status %q; write a number such as 200", args[0])
	}
	r.Respond = &types.RuleResponse{Status: status, Body: strings.Join(args[1:], "")}
	return readBlock(o.Dispenser, "respond", map[string]any{"header": &r.Respond.Headers})
}

func (r *ruleParser) policy(o options) error {
	var use types.RulePolicy
	if !o.AllArgs(&use.Name) {
		return o.ArgErr()
	}
	config := func(o options) error {
		var config string
		if use.Config != nil {
			return o.Errf("config of policy %s is already set", use.Name)
		}
		if !o.AllArgs(&config) {
			return o.ArgErr()
		}
		if !json.Valid([]byte(config)) {
			return o.Errf("invalid JSON in the config of policy %s; write it in backquotes, such as `{\"user\": \"git\"}`", use.Name)
		}
		use.Config = json.RawMessage(config)
		return nil
	}
	err := readBlock(o.Dispenser, "policy", map[string]any{"config": config, "secret": &use.Secrets})
	r.Policies = append(r.Policies, use)
	return err
}
