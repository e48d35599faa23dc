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
	block := o.NewFromNextSegment()
	block.Next() // egress
	inner := options{Dispenser: block, seen: map[string]bool{}}
	var rules []*caddyfile.Dispenser
	for nesting := block.Nesting(); block.NextBlock(nesting); {
		switch block.Val() {
		case "preset":
			if err := e.parsePreset(block.NewFromNextSegment()); err != nil {
				return err
			}
			continue
		case "rule":
			segment := block.NewFromNextSegment()
			rules = append(rules, segment)
			if err := e.parseRule(segment); err != nil {
				return err
			}
			continue
		}
		if err := e.parseOption(inner); err != nil {
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

func (e *Egress) parsePreset(d *caddyfile.Dispenser) error {
	d.Next() // preset
	if !d.NextArg() {
		return d.ArgErr()
	}
	name := d.Val()
	if err := setOnce(d, &e.Presets, "preset "+name, name, Preset{}); err != nil {
		return err
	}
	p := Preset{Hosts: d.RemainingArgs()}
	o := options{Dispenser: d, seen: map[string]bool{}}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		switch d.Val() {
		case "description":
			if err := o.text(&p.Description); err != nil {
				return err
			}
		case "hosts":
			if err := o.list(&p.Hosts); err != nil {
				return err
			}
		default:
			return d.Errf("unrecognized subdirective '%s' of preset; it has description and hosts", d.Val())
		}
	}
	e.Presets[name] = p
	if _, err := rule.NewPresets([]preset.Preset{p.preset(name)}); err != nil {
		return wrapAtStart(d, err)
	}
	return nil
}

func (e *Egress) parseOption(o options) error {
	if o.Val() == "resolve" {
		return e.parseResolve(o)
	}
	return o.field("egress", map[string]any{
		"default":                     (*string)(&e.Default),
		"resolvers":                   &e.Resolvers,
		"upstream_ca":                 &e.UpstreamCAFiles,
		"upstream_proxy":              &e.UpstreamProxy,
		"ech":                         &e.ECH,
		"max_connections":             &e.MaxConnections,
		"max_connections_per_sandbox": &e.MaxConnectionsPerSandbox,
		"policy_memory_limit":         &e.PolicyMemoryLimit,
		"policy_time_limit":           &e.PolicyTimeLimit,
	})
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
	var r types.Rule
	if !d.AllArgs(&r.Name) {
		return d.ArgErr()
	}
	p := ruleParser{options: options{Dispenser: d, seen: map[string]bool{}}, rule: &r}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		if err := p.parseOption(); err != nil {
			return err
		}
	}
	e.Rules = append(e.Rules, r)
	return nil
}

type ruleParser struct {
	options
	rule *types.Rule
}

func (p ruleParser) parseOption() error {
	r := p.rule
	switch name := p.Val(); name {
	case "hosts":
		return p.list(&r.Hosts)
	case "addresses":
		return p.list(&r.Addresses)
	case "ports":
		return p.ports()
	case "allow_private":
		r.AllowPrivate = true
		return p.nothing()
	case "scheme":
		return p.text(&r.Scheme)
	case "methods":
		return p.list(&r.Methods)
	case "paths":
		return p.list(&r.Paths)
	case "header":
		return p.pair(&r.Headers)
	case "placeholder":
		return p.pair(&r.Placeholders)
	case "allow":
		if err := p.undecided(); err != nil {
			return err
		}
		r.Action = types.RuleActionAllow
		return p.nothing()
	case "deny":
		if err := p.undecided(); err != nil {
			return err
		}
		r.Action = types.RuleActionDeny
		if p.NextArg() {
			r.Reason = p.Val()
		}
		return p.nothing()
	case "respond":
		if err := p.undecided(); err != nil {
			return err
		}
		return p.respond()
	case "policy":
		if len(r.Policies) == 0 {
			if err := p.undecided(); err != nil {
				return err
			}
		}
		return p.policy()
	default:
		return p.Errf("unrecognized subdirective '%s' of rule", name)
	}
}

// undecided returns an error if the rule has an action, a response or policies.
func (p ruleParser) undecided() error {
	if p.rule.Action != "" || p.rule.Respond != nil || len(p.rule.Policies) > 0 {
		return p.Err("the rule's action is already set; a rule has one of allow, deny and respond, or policies")
	}
	return nil
}

func (p ruleParser) nothing() error {
	if p.NextArg() {
		return p.ArgErr()
	}
	return nil
}

// pair reads a name and a value into a map.
func (p ruleParser) pair(to *map[string]string) error {
	option := p.Val()
	var name, value string
	if !p.AllArgs(&name, &value) {
		return p.ArgErr()
	}
	return setOnce(p.Dispenser, to, option+" "+name, name, value)
}

func (p ruleParser) ports() error {
	values := p.RemainingArgs()
	if len(values) == 0 {
		return p.ArgErr()
	}
	for _, v := range values {
		if _, err := rule.ParsePorts(v); err != nil {
			return p.WrapErr(err)
		}
		p.rule.Ports = append(p.rule.Ports, v)
	}
	return nil
}

func (p ruleParser) respond() error {
	args := p.RemainingArgs()
	if len(args) == 0 || len(args) > 2 {
		return p.ArgErr()
	}
	status, err := strconv.Atoi(args[0])
	if err != nil {
		return p.Errf("respond: invalid status %q; write a number such as 200", args[0])
	}
	response := &types.RuleResponse{Status: status, Body: strings.Join(args[1:], "")}
	p.rule.Respond = response
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		if p.Val() != "header" {
			return p.Errf("unrecognized subdirective '%s' of respond; it has header", p.Val())
		}
		if err := p.pair(&response.Headers); err != nil {
			return err
		}
	}
	return nil
}

func (p ruleParser) policy() error {
	var use types.RulePolicy
	if !p.AllArgs(&use.Name) {
		return p.ArgErr()
	}
	for nesting := p.Nesting(); p.NextBlock(nesting); {
		switch p.Val() {
		case "config":
			var config string
			if use.Config != nil {
				return p.Errf("config of policy %s is already set", use.Name)
			}
			if !p.AllArgs(&config) {
				return p.ArgErr()
			}
			if !json.Valid([]byte(config)) {
				return p.Errf("invalid JSON in the config of policy %s; write it in backquotes, such as `{\"user\": \"git\"}`", use.Name)
			}
			use.Config = json.RawMessage(config)
		case "secret":
			if err := p.pair(&use.Secrets); err != nil {
				return err
			}
		default:
			return p.Errf("unrecognized subdirective '%s' of policy; it has config and secret", p.Val())
		}
	}
	p.rule.Policies = append(p.rule.Policies, use)
	return nil
}
