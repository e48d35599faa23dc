package rule

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Warning is about a valid rule that may not work as intended.
type Warning struct {
	Index   int    // of the rule, from 0
	Field   string // such as policies[0].secrets[token], or empty for the whole rule
	Problem string // names the rules
	Remedy  string
}

const (
	// MaxWarnings that Warnings returns.
	MaxWarnings = 20
	// maxComparisons bounds the work of comparing rules: a layer may have a thousand,
	// with a thousand hosts each. Beyond it there are no warnings.
	maxComparisons = 1 << 18
	// maxNames that a warning lists.
	maxNames = 5
)

// Secrets looks up the hosts that a secret is bound to.
type Secrets func(name string) (hosts []string, found bool)

// Warnings finds rules of a layer that never apply, because a rule of it or of a layer
// before denies what they allow, and secrets that cannot be sent.
func Warnings(l *Layer, before []*Layer, secrets Secrets) []Warning {
	w := &warner{layer: l, comparisons: maxComparisons}
	for _, by := range append([]*Layer{l}, before...) {
		for i, deny := range by.all() {
			if deny.Action == Deny {
				w.denied(by, i, deny)
			}
		}
	}
	if secrets != nil {
		for i, r := range l.all() {
			w.secrets(i, r, secrets)
		}
	}
	return w.warnings
}

type warner struct {
	layer       *Layer
	comparisons int
	warnings    []Warning
}

func (w *warner) add(index int, field, problem, remedy string) {
	if len(w.warnings) < MaxWarnings {
		w.warnings = append(w.warnings, Warning{index, field, problem, remedy})
	}
}

// denied warns of rules of the layer that a rule denies: a rule of an earlier layer, or the
// one with this index.
func (w *warner) denied(by *Layer, index int, deny *compiled) {
	names := w.shadowed(deny)
	if len(names) == 0 {
		return
	}
	name := fmt.Sprintf("%q", deny.Name)
	remedy := fmt.Sprintf("narrow %s, or remove what it denies from the others", name)
	switch {
	case by != w.layer:
		index, name = names[0].index, by.id(deny)
		remedy = "remove it from these rules, or change " + name
		if by.source == Node {
			remedy = "remove it from these rules, or ask the node's operator about " + name
		}
	case deny.catchAll() && by.source == Node:
		remedy = fmt.Sprintf("remove %s and set default deny", name)
	case deny.catchAll():
		remedy = fmt.Sprintf(`remove %s and set "default": "deny"`, name)
	}
	w.add(index, "", fmt.Sprintf("%s denies what %s: a rule that denies wins wherever it stands", name, allowed(names)), remedy)
}

// shadow is a rule that never applies, or not to all that it names.
type shadow struct {
	index int
	name  string
	hosts []string // those that are denied; none if all are
}

// allowed returns a text such as `"a" and "b" (b.example.com) allow`.
func allowed(shadows []shadow) string {
	var names []string
	for _, s := range shadows[:min(len(shadows), maxNames)] {
		name := fmt.Sprintf("%q", s.name)
		if len(s.hosts) > 0 {
			name += fmt.Sprintf(" (%s)", strings.Join(s.hosts[:min(len(s.hosts), maxNames)], ", "))
		}
		names = append(names, name)
	}
	if more := len(shadows) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	last := len(names) - 1
	if last == 0 {
		return names[0] + " allows"
	}
	return strings.Join(names[:last], ", ") + " and " + names[last] + " allow"
}

// shadowed returns the rules that never apply to some of their hosts, because deny matches
// all requests to these hosts that the rule matches.
func (w *warner) shadowed(deny *compiled) []shadow {
	var list []shadow
	for i, r := range w.layer.all() {
		if r.Action == Deny {
			continue
		}
		if w.comparisons -= deny.comparisons(r); w.comparisons < 0 {
			return list
		}
		if !deny.coversRequests(r) {
			continue
		}
		if hosts, all := deny.coversHosts(r, w.layer.presets); all {
			list = append(list, shadow{index: i, name: r.Name})
		} else if len(hosts) > 0 {
			list = append(list, shadow{i, r.Name, hosts})
		}
	}
	return list
}

// comparisons is about how many it takes to compare two rules.
func (c *compiled) comparisons(other *compiled) int {
	return 1 + len(c.Methods)*len(other.Methods) + len(c.Paths)*len(other.Paths) + len(c.Headers) + len(c.Ports)*len(other.Ports) +
		other.hosts.size()*(1+len(c.hosts.presets)) + len(c.addresses)*len(other.addresses)
}

// coversHosts returns the patterns of another rule whose hosts are all among the rule's,
// and reports whether these are all its patterns.
func (c *compiled) coversHosts(other *compiled, defined *Presets) (hosts []string, all bool) {
	if len(other.addresses) > 0 {
		return nil, c.catchAll() || !slices.ContainsFunc(other.addresses, func(o netip.Prefix) bool {
			return !slices.ContainsFunc(c.addresses, func(p netip.Prefix) bool { return p.Bits() <= o.Bits() && p.Contains(o.Addr()) })
		})
	}
	if c.hosts.every || len(other.Hosts) == 0 {
		return nil, c.hosts.every
	}
	for _, h := range other.Hosts {
		if compiled, err := compileHosts(defined, h); err == nil && c.hosts.covers(compiled) {
			hosts = append(hosts, h)
		}
	}
	return hosts, len(hosts) == len(other.Hosts)
}

// catchAll reports whether the rule matches everything.
func (c *compiled) catchAll() bool { return c.hosts.every && !c.inspects && len(c.Ports) == 0 }

// coversRequests reports whether the rule matches all requests that other matches, whatever
// their hosts. It may return false although it does: globs are compared as texts.
func (c *compiled) coversRequests(other *compiled) bool {
	if c.Scheme != "" && c.Scheme != other.Scheme {
		return false
	}
	if len(c.methods) > 0 && !subset(other.Methods, c.Methods) {
		return false
	}
	everyPath := len(c.Paths) == 0 || slices.Contains(c.Paths, "/**") || slices.Contains(c.Paths, "**")
	if !everyPath && !subset(other.Paths, c.Paths) {
		return false
	}
	for name, value := range c.Headers {
		if have, ok := other.Headers[name]; !ok || have != value {
			return false
		}
	}
	ports, others := c.ports(), other.ports()
	if len(ports) == 0 {
		return true
	}
	return len(others) > 0 && !slices.ContainsFunc(others, func(o Ports) bool {
		return !slices.ContainsFunc(ports, func(p Ports) bool { return p.First <= o.First && o.Last <= p.Last })
	})
}

// subset reports whether there are values, and every one is in of.
func subset(values, of []string) bool {
	return len(values) > 0 && !slices.ContainsFunc(values, func(v string) bool { return !slices.Contains(of, v) })
}

// secrets warns of secrets that do not exist, or that are bound to none of the hosts
// of their rule.
func (w *warner) secrets(index int, r *compiled, lookup Secrets) {
	check := func(field, name string) {
		bound, found := lookup(name)
		if !found {
			w.add(index, field, fmt.Sprintf("%q uses secret %q, which does not exist", r.Name, name), "set it with `doze secret set "+name+" --host HOST`")
			return
		}
		w.comparisons -= r.hosts.size() + len(bound)*(1+len(r.hosts.presets))
		if hosts, err := compileHosts(nil, bound...); err == nil && w.comparisons >= 0 && len(r.addresses) == 0 && !r.hosts.overlaps(hosts) {
			w.add(index, field, fmt.Sprintf("%q uses secret %q, which is bound to none of its hosts (it is bound to %s)", r.Name, name, strings.Join(bound[:min(len(bound), maxNames)], ", ")),
				"bind the secret to them, or name its hosts in the rule")
		}
	}
	for i, use := range r.Policies {
		for _, as := range slices.Sorted(maps.Keys(use.Secrets)) {
			check(fmt.Sprintf("policies[%d].secrets[%s]", i, as), use.Secrets[as])
		}
	}
	for _, variable := range slices.Sorted(maps.Keys(r.Placeholders)) {
		check(fmt.Sprintf("placeholders[%s]", variable), r.Placeholders[variable])
	}
}
