package rule

import (
	"slices"
	"strings"

	"github.com/doze-run/doze/egress/rule/preset"
)

// Default is the decision on traffic that no rule matches. The node's is AllowPublic or
// DenyAll; an owner's or a sandbox's is Inherit or DenyAll.
type Default string

const (
	// AllowPublic permits traffic to public addresses by their names.
	AllowPublic Default = "allow_public"
	// DenyAll refuses traffic that matches no rule of the same layer or a later one.
	DenyAll Default = "deny"
	// Inherit leaves the decision to the layers before.
	Inherit Default = "inherit"
)

// Table has all rules that apply to a sandbox. Layers may be nil; they are in the
// order node, owner, sandbox.
type Table struct {
	Default Default // the node's
	Layers  [3]*Layer
}

// Verdict of a table.
type Verdict string

const (
	VerdictAllow   Verdict = "allow"
	VerdictDeny    Verdict = "deny"
	VerdictRespond Verdict = "respond"
	// VerdictInspect is for connections only: it depends on the requests.
	VerdictInspect Verdict = "inspect"
)

// Step is a policy to run.
type Step struct {
	Rule   string // source/name
	Source Source
	Use
}

// Decision is a verdict with its reasons.
type Decision struct {
	Verdict Verdict
	// Rule is the deciding rule, as source/name, such as node/github, or "default".
	Rule     string
	Reason   string    // of a denial
	Response *Response // of VerdictRespond
	Chain    []Step    // of VerdictAllow: the policies to run, in this order
	Offers   []Offer   // of VerdictAllow: the placeholders that are exchanged
	Private  bool      // the host may be at a private address
}

// Offer of a secret by its placeholder.
type Offer struct {
	Rule   string // source/name
	Source Source
	Secret string
}

// defaultRule is the Rule of decisions that no rule made.
const defaultRule = "default"

func (l *Layer) id(r *compiled) string { return string(l.source) + "/" + r.Name }

// deny is the decision of a rule that denies, on a host unless empty.
func (l *Layer) deny(r *compiled, host string) Decision {
	reason := r.Reason
	switch {
	case host != "" && !r.hosts.Match(host):
		reason = "the rule " + r.undefined() + ", so that it denies every host"
	case reason == "":
		reason = "denied by a rule"
	}
	return Decision{Verdict: VerdictDeny, Rule: l.id(r), Reason: reason}
}

// noLayer is the index of no layer of a Table.
const noLayer = -1

// denying returns the last layer whose default is DenyAll, or noLayer. Requests that match
// no rule of that layer or a later one are denied.
func (t *Table) denying() int {
	for i, l := range slices.Backward(t.Layers[:]) {
		if l != nil && l.def == DenyAll {
			return i
		}
	}
	if t.Default != AllowPublic {
		return 0
	}
	return noLayer
}

// orDefault returns the decision d of rules up to the layer last, or the default's decision:
// a layer that denies by default applies to traffic that no rule of it or a later layer
// matches.
func (t *Table) orDefault(d Decision, last int, named bool) Decision {
	denying := t.denying()
	if last != noLayer && last >= denying {
		return d
	}
	d = Decision{Verdict: VerdictDeny, Rule: defaultRule}
	switch {
	case denying != noLayer:
		d.Reason = [...]string{
			"no rule allows it",
			"no rule of the owner or the sandbox allows it, and the owner's default is deny",
			"no rule of the sandbox allows it, and the sandbox's default is deny",
		}[denying]
	case !named:
		d.Reason = "the address was not looked up by a name, and no rule allows it"
	default:
		d.Verdict = VerdictAllow
		return d
	}
	if undefined := t.undefined(); undefined != "" {
		d.Reason += "; " + undefined
	}
	return d
}

// undefined returns an error text that names the rule with a preset that is not defined, or "".
func (t *Table) undefined() string {
	for _, l := range t.Layers {
		for _, r := range l.all() {
			if len(r.hosts.undefined) > 0 {
				return l.id(r) + " " + r.undefined()
			}
		}
	}
	return ""
}

// Name decides whether DNS resolves a name: yes, unless the rules deny all of its traffic.
func (t *Table) Name(host string) Decision {
	allowed, last := Decision{}, noLayer
	for layer, l := range t.Layers {
		for _, r := range l.all() {
			switch {
			case !r.hosts.Match(host) && !r.anyHost():
			case r.Action != Deny:
				if last = layer; allowed.Verdict == "" {
					allowed = Decision{Verdict: VerdictAllow, Rule: l.id(r)}
				}
			case !r.inspects && len(r.Ports) == 0:
				return l.deny(r, host)
			}
		}
	}
	return t.orDefault(allowed, last, true)
}

// Connect decides on a connection. Only its Port and its Host or Address are known.
// VerdictInspect means that each of its requests has to be decided on.
func (t *Table) Connect(r Request) Decision {
	d, last := Decision{}, noLayer
	for layer, l := range t.Layers {
		settled := false // by a rule that matches every request
		for _, c := range l.all() {
			if c.destined(&r) == no || settled && c.Action != Deny {
				continue
			}
			d.Private = d.Private || c.Private && c.Action != Deny
			switch {
			case c.inspects:
				if d.Verdict != VerdictInspect {
					d.Verdict, d.Rule = VerdictInspect, l.id(c)
				}
			case c.Action == Deny:
				return l.deny(c, r.Host)
			default:
				settled, last = true, layer
				if d.Verdict == "" {
					d.Verdict, d.Rule = VerdictAllow, l.id(c)
				}
			}
		}
	}
	if d.Verdict == VerdictInspect {
		return d
	}
	return t.orDefault(d, last, r.Host != "")
}

// Decide decides on a request.
func (t *Table) Decide(r Request) Decision {
	paths, left := readings(r.Path), effort(maxSteps)
	d, last := Decision{}, noLayer
	for layer, l := range t.Layers {
		settled := false
		for _, c := range l.all() {
			if settled && c.Action != Deny {
				continue
			}
			matched := c.matches(&r, paths, &left)
			if left.exhausted() {
				return Decision{Verdict: VerdictDeny, Rule: l.id(c),
					Reason: "its path and headers are too long to be compared with so many patterns: shorten them, or use fewer stars in the rules"}
			}
			switch {
			case matched == no, matched == unsure && c.Action == Allow:
				continue
			case c.Action == Deny:
				return l.deny(c, r.Host)
			case matched == unsure:
				return Decision{Verdict: VerdictDeny, Rule: l.id(c), Reason: c.unsureReason(r.Host)}
			}
			settled, last = true, layer
			d.add(l, c)
		}
	}
	if d.Verdict == VerdictRespond {
		d.Chain, d.Offers = nil, nil
	}
	return t.orDefault(d, last, r.Host != "")
}

// Preset returns the preset by which a rule, as source/name, matches a host. It is
// empty if the rule names the host itself, or does not match it.
func (t *Table) Preset(id, host string) string {
	for _, l := range t.Layers {
		for _, r := range l.all() {
			if l.id(r) != id || r.hosts.matchesByName(host) {
				continue
			}
			for _, pattern := range r.Hosts {
				name, ok := strings.CutPrefix(pattern, preset.Prefix)
				if hosts, err := l.presets.lookup(name); ok && err == nil && hosts.Match(host) {
					return name
				}
			}
		}
	}
	return ""
}

// Placeholders returns the environment variables that the rules give a sandbox. The first
// of the rules that set a variable wins.
func (t *Table) Placeholders() map[string]Offer {
	offers := map[string]Offer{}
	for _, l := range t.Layers {
		for _, r := range l.all() {
			for variable, secret := range r.Placeholders {
				if _, taken := offers[variable]; !taken {
					offers[variable] = Offer{l.id(r), l.source, secret}
				}
			}
		}
	}
	return offers
}

// add takes a rule into the decision that permits.
func (d *Decision) add(l *Layer, c *compiled) {
	id := l.id(c)
	if d.Verdict == "" {
		d.Verdict, d.Rule = VerdictAllow, id
	}
	d.Private = d.Private || c.Private
	switch c.Action {
	case Respond:
		if d.Response == nil {
			d.Verdict, d.Rule, d.Response = VerdictRespond, id, c.Response
		}
	case Policies:
		if len(d.Chain) == 0 && d.Response == nil {
			d.Rule = id
		}
		for _, use := range c.Policies {
			d.Chain = append(d.Chain, Step{id, l.source, use})
		}
	}
	for _, secret := range c.Placeholders {
		d.Offers = append(d.Offers, Offer{id, l.source, secret})
	}
}
