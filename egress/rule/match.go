package rule

import (
	"slices"
	"strings"
)

// match reports whether a rule matches a request.
type match int

const (
	no match = iota
	// unsure: it depends on the reader of the request, or on a preset that is not
	// defined. A rule that allows then does not match. A rule that denies does, and
	// one with policies or a response denies the request: otherwise a spelling would
	// be enough to get past them.
	unsure
	yes
)

func (c *compiled) matches(r *Request, paths []string, left *effort) match {
	destined := c.destined(r)
	if destined == no || c.Scheme != "" && (c.Scheme == "https") != r.HTTPS {
		return no
	}
	if len(c.methods) > 0 && !c.methods[c.method(r)] {
		return no
	}
	return min(destined, c.matchPath(paths, left), c.matchHeaders(r.Header, left))
}

// destined reports whether the rule matches the destination.
func (c *compiled) destined(r *Request) match {
	if ports := c.ports(); len(ports) > 0 && !slices.ContainsFunc(ports, func(p Ports) bool { return p.First <= r.Port && r.Port <= p.Last }) {
		return no
	}
	switch {
	case r.Host == "" && c.hasAddress(r), r.Host != "" && c.hosts.Match(r.Host):
		return yes
	case r.Host != "" && c.anyHost():
		return unsure
	}
	return no
}

// anyHost reports whether the rule may match every host because it names a preset that is
// not defined. A rule that allows then matches no host of that preset.
func (c *compiled) anyHost() bool { return c.Action != Allow && len(c.hosts.undefined) > 0 }

// unsureReason returns the reason for which a rule that may match denies a request.
func (c *compiled) unsureReason(host string) string {
	if host != "" && !c.hosts.Match(host) {
		return "the rule " + c.undefined() + ", so that it may be about every host"
	}
	return "its path or headers are ambiguous, and only some readings match this rule"
}

// ports returns the ports that the rule matches; none means all.
func (c *compiled) ports() []Ports {
	if len(c.Ports) == 0 && c.inspects {
		return webPorts
	}
	return c.Ports
}

// hasAddress: a rule that forbids every host forbids every address too. Requests
// to addresses are not inspected.
func (c *compiled) hasAddress(r *Request) bool {
	if c.Action == Deny && c.hosts.every && !c.inspects {
		return true
	}
	a := r.Address.Unmap() // a socket takes both for the same
	for _, p := range c.addresses {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// method returns the method that the rule compares. Methods are case-sensitive (RFC 9110),
// but not for all servers: only a rule that allows distinguishes upper and lower case.
func (c *compiled) method(r *Request) string {
	if c.Action == Allow {
		return r.Method
	}
	return strings.ToUpper(r.Method)
}

func (c *compiled) matchPath(paths []string, left *effort) match {
	if len(c.paths) == 0 {
		return yes
	}
	matched := 0
	for _, p := range paths {
		if slices.ContainsFunc(c.paths, func(g *glob) bool { return g.match(p, left) }) {
			matched++
		}
	}
	return all(matched, len(paths))
}

func (c *compiled) matchHeaders(header map[string][]string, left *effort) match {
	result := yes
	for name, glob := range c.headers {
		values := header[name]
		if len(values) == 0 {
			return no
		}
		matched := 0
		for _, v := range values {
			if glob.match(v, left) {
				matched++
			}
		}
		result = min(result, all(matched, len(values)))
	}
	return result
}

// all returns the match of a value with several readings.
func all(matched, of int) match {
	switch {
	case of == 0:
		return unsure
	case matched == 0:
		return no
	case matched < of:
		return unsure
	}
	return yes
}
