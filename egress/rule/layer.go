package rule

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/doze-run/doze/egress/rule/preset"
)

// Source of a layer.
type Source string

const (
	Node    Source = "node"
	Owner   Source = "owner"
	Sandbox Source = "sandbox"
)

// Layer is a checked list of rules. It does not change.
type Layer struct {
	source  Source
	rules   []*compiled
	def     Default
	presets *Presets
}

type compiled struct {
	Rule
	hosts     Hosts
	addresses []netip.Prefix
	methods   map[string]bool
	paths     []*glob
	headers   map[string]*glob
	// inspects: the rule matches requests rather than connections, or changes or
	// responds to them.
	inspects bool
}

// Error describes a mistake in a rule. Compile joins one for each.
type Error struct {
	Index   int    // of the rule, from 0
	Rule    string // its name, perhaps empty
	Field   string // such as hosts[2]
	Problem string // with what would be right
}

func (e *Error) Error() string {
	where := fmt.Sprintf("rule %d", e.Index+1)
	if e.Rule != "" {
		where += fmt.Sprintf(" (%.64s)", e.Rule)
	}
	return fmt.Sprintf("%s: %s: %s", where, e.Field, e.Problem)
}

// Compile checks rules and makes a layer of them, with the presets that there are. The
// error names every mistake.
func Compile(source Source, rules []Rule, presets *Presets) (*Layer, error) {
	return compile(source, rules, presets, false)
}

// CompileStored is Compile for rules that were accepted before: a preset that is not
// defined any more is not an error. See Layer.WithPresets for what such rules do.
func CompileStored(source Source, rules []Rule, presets *Presets) (*Layer, error) {
	return compile(source, rules, presets, true)
}

func compile(source Source, rules []Rule, presets *Presets, stored bool) (*Layer, error) {
	if err := bounded(rules); err != nil {
		return nil, err
	}
	l := &Layer{source: source, presets: presets}
	names := map[string]bool{}
	var problems []error
	for i, r := range rules {
		c := compiler{source: source, index: i, compiled: &compiled{Rule: r}, presets: presets, stored: stored}
		c.name(names)
		c.infer()
		c.destination()
		c.request()
		c.action()
		problems = append(problems, c.problems...)
		l.rules = append(l.rules, c.compiled)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return l, nil
}

// bounded checks the limits of all rules together, before any is compiled.
func bounded(rules []Rule) error {
	if len(rules) > MaxRules {
		return fmt.Errorf("%d rules; use at most %d", len(rules), MaxRules)
	}
	presets, stars, text, uses := 0, 0, 0, map[string]bool{}
	var globs []string
	for _, r := range rules {
		for _, h := range r.Hosts {
			if strings.HasPrefix(h, preset.Prefix) {
				presets++
			}
		}
		globs = slices.AppendSeq(append(globs, r.Paths...), maps.Values(r.Headers))
		for _, u := range r.Policies {
			uses[u.Policy+" "+string(u.Config)] = true
		}
	}
	for _, pattern := range globs {
		stars += countStars(pattern)
		text += len(pattern)
	}
	switch {
	case presets > MaxPresetNames:
		return fmt.Errorf("%d presets in hosts of all rules; use at most %d", presets, MaxPresetNames)
	case len(globs) > MaxGlobs:
		return fmt.Errorf("%d paths and headers in all rules; use at most %d: say more with `*`", len(globs), MaxGlobs)
	case stars > MaxGlobStars:
		return fmt.Errorf("%d stars in paths and headers of all rules; use at most %d: write names out, or end paths with `**`", stars, MaxGlobStars)
	case text > MaxGlobText:
		return fmt.Errorf("%d bytes of paths and headers in all rules; use at most %d: say more with `*`", text, MaxGlobText)
	case len(uses) > MaxUses:
		return fmt.Errorf("%d policies with configurations of their own in all rules; use at most %d", len(uses), MaxUses)
	}
	return nil
}

// countStars counts runs of stars.
func countStars(pattern string) (n int) {
	for i := range len(pattern) {
		if pattern[i] == '*' && (i == 0 || pattern[i-1] != '*') {
			n++
		}
	}
	return n
}

// WithDefault returns the layer with another default, Inherit or DenyAll. The node's
// layer has none: the Table has its default.
func (l *Layer) WithDefault(def Default) *Layer {
	with := *l
	with.def = def
	return &with
}

// WithPresets returns the layer with the presets that are defined now; nil for nil.
//
// A preset that is not defined has no hosts for a rule that allows. Every other rule may
// match any host: one that denies does, and one with policies or a response denies the
// requests that it would have matched.
func (l *Layer) WithPresets(presets *Presets) *Layer {
	if l == nil || l.presets == presets {
		return l
	}
	with := *l
	with.presets = presets
	with.rules = slices.Clone(l.rules)
	for i, r := range with.rules {
		changed := *r
		changed.hosts = r.hosts.withPresets(r.Hosts, presets)
		with.rules[i] = &changed
	}
	return &with
}

// Presets returns the presets that the layer was compiled with.
func (l *Layer) Presets() *Presets {
	if l == nil {
		return nil
	}
	return l.presets
}

// UndefinedPresets returns the names of the presets that rules name and that are not
// defined, each once.
func (l *Layer) UndefinedPresets() []string {
	var names []string
	for _, r := range l.all() {
		names = append(names, r.hosts.undefined...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// PresetWarnings warns of the rules that name presets which are not defined.
func (l *Layer) PresetWarnings() []Warning {
	var warnings []Warning
	for i, r := range l.all() {
		if len(r.hosts.undefined) == 0 || len(warnings) == MaxWarnings {
			continue
		}
		effect := "it allows none of its hosts"
		if r.Action != Allow {
			effect = "it denies every host"
		}
		warnings = append(warnings, Warning{Index: i, Field: "hosts", Problem: fmt.Sprintf("%q %s: %s", r.Name, r.undefined(), effect),
			Remedy: "name the hosts themselves, or ask the node's operator for the preset"})
	}
	return warnings
}

// undefined returns an error text that names a preset which is not defined, or "".
func (c *compiled) undefined() string {
	if len(c.hosts.undefined) == 0 {
		return ""
	}
	return fmt.Sprintf("names %s%.64s, which is not defined on this node", preset.Prefix, c.hosts.undefined[0])
}

// ParseDefault reads the default of an owner or a sandbox.
func ParseDefault(def string) (Default, error) {
	switch d := Default(def); d {
	case Inherit, DenyAll:
		return d, nil
	}
	return "", fmt.Errorf("default is %.80q; write inherit or deny", def)
}

// Rules returns the rules that the layer was compiled from; none for nil. The caller must
// not modify them.
func (l *Layer) Rules() []Rule {
	var rules []Rule
	for _, r := range l.all() {
		rules = append(rules, r.Rule)
	}
	return rules
}

// all returns the compiled rules; none for nil.
func (l *Layer) all() []*compiled {
	if l == nil {
		return nil
	}
	return l.rules
}

type compiler struct {
	*compiled
	presets  *Presets
	stored   bool // the rules were accepted before
	source   Source
	index    int
	problems []error
}

func (c *compiler) bad(field, format string, args ...any) {
	c.problems = append(c.problems, &Error{c.index, c.Name, field, fmt.Sprintf(format, args...)})
}

// entries reports a list that is too long.
func (c *compiler) entries(field string, n int) {
	if n > MaxEntries {
		c.bad(field, "%d entries; use at most %d", n, MaxEntries)
	}
}

func (c *compiler) text(field, s string) bool {
	if len(s) > MaxText {
		c.bad(field, "%d bytes; use at most %d", len(s), MaxText)
		return false
	}
	return true
}

var namePattern = regexp.MustCompile(`\A[a-z0-9_-]{1,64}\z`)

func (c *compiler) name(taken map[string]bool) {
	switch {
	case !namePattern.MatchString(c.Name):
		c.bad("name", "%.80q: a name is 1 to 64 of a-z, 0-9, - and _", c.Name)
	case taken[c.Name]:
		c.bad("name", "%q is the name of an earlier rule", c.Name)
	}
	taken[c.Name] = true
}

// infer sets the action of a rule that has policies or a response, and no action.
func (c *compiler) infer() {
	switch {
	case c.Action != "":
	case len(c.Policies) > 0:
		c.Action = Policies
	case c.Response != nil:
		c.Action = Respond
	}
}

func (c *compiler) destination() {
	c.entries("hosts", len(c.Hosts))
	c.entries("addresses", len(c.Addresses))
	c.entries("ports", len(c.Ports))
	if len(c.Hosts) > 0 && len(c.Addresses) > 0 {
		c.bad("addresses", "a rule has hosts or addresses: make two rules")
	}
	for i, h := range c.Hosts {
		err := c.compiled.hosts.add(h, c.presets)
		if name, ok := strings.CutPrefix(h, preset.Prefix); ok && c.stored && namePattern.MatchString(name) {
			continue // undefined has it
		}
		if err != nil {
			c.bad(fmt.Sprintf("hosts[%d]", i), "%v", err)
		}
	}
	if len(c.Hosts) == 0 && len(c.Addresses) == 0 {
		c.compiled.hosts.every = true
	}
	for i, a := range c.Addresses {
		prefix, err := parsePrefix(a)
		if err != nil {
			c.bad(fmt.Sprintf("addresses[%d]", i), "%v", err)
		}
		c.addresses = append(c.addresses, prefix)
	}
	if c.source != Node {
		if c.Private {
			c.bad("allow_private", "only the node's rules may allow private addresses")
		}
		if len(c.Addresses) > 0 && c.Action != Deny {
			c.bad("addresses", "only the node's rules may allow addresses: name the host")
		}
	}
	for i, p := range c.Ports {
		if p.First == 0 || p.First > p.Last {
			c.bad(fmt.Sprintf("ports[%d]", i), "invalid range of ports %s", p)
		}
	}
}

func parsePrefix(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		a, errAddr := netip.ParseAddr(s)
		if errAddr != nil || a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%.80q is neither an address nor a network: write 203.0.113.7 or 203.0.113.0/24", s)
		}
		prefix = netip.PrefixFrom(a, a.BitLen())
	}
	if prefix.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%.80q: write the IPv4 address itself", s)
	}
	if prefix != prefix.Masked() {
		return netip.Prefix{}, fmt.Errorf("%.80q has bits beyond its length: write %s", s, prefix.Masked())
	}
	return prefix, nil
}

// glob compiles a pattern, as it was given and as it is compared; nil: it has
// mistakes.
func (c *compiler) glob(field, given, pattern string, separator byte) *glob {
	if !c.text(field, given) {
		return nil
	}
	g, err := compileGlob(pattern, separator)
	if err != nil {
		c.bad(field, "%.80q has %v", given, err)
	}
	return g
}

func (c *compiler) request() {
	if s := c.Scheme; s != "" && s != "http" && s != "https" {
		c.bad("scheme", "%.20q: write http or https, or leave it out", s)
	}
	c.entries("methods", len(c.Methods))
	c.entries("paths", len(c.Paths))
	c.entries("headers", len(c.Headers))
	c.methods = make(map[string]bool, len(c.Methods))
	for i, m := range c.Methods {
		if !httpguts.ValidHeaderFieldName(m) || m != strings.ToUpper(m) { // both are tokens, RFC 9110
			c.bad(fmt.Sprintf("methods[%d]", i), "invalid method %.20q: write GET, in capitals", m)
		}
		c.methods[m] = true
	}
	for i, p := range c.Paths {
		field := fmt.Sprintf("paths[%d]", i)
		if !strings.HasPrefix(p, "/") && !strings.HasPrefix(p, "*") {
			c.bad(field, "%.80q does not begin with a slash: write /%.80s", p, p)
		}
		if strings.ContainsAny(p, "?#") {
			c.bad(field, "%.80q: a path ends before ? and #", p)
		}
		if decodeNames(p) != strings.ReplaceAll(p, "%2f", "%2F") || hasDots(p) {
			c.bad(field, "%.80q: write characters as they are, without escapes but %%2F and without . and ..", p)
		}
		if g := c.glob(field, p, decodeNames(p), '/'); g != nil {
			c.paths = append(c.paths, g)
		}
	}
	c.headers = make(map[string]*glob, len(c.Headers))
	for name, value := range c.Headers {
		field := fmt.Sprintf("headers[%.80s]", name)
		if !httpguts.ValidHeaderFieldName(name) {
			c.bad(field, "invalid header name")
		}
		key := http.CanonicalHeaderKey(name)
		if slices.Contains(unseen, key) {
			c.bad(field, "is removed before rules inspect a request; name hosts under hosts")
		}
		if c.headers[key] != nil {
			c.bad(field, "is already set in another spelling")
		}
		if g := c.glob(field, value, value, 0); g != nil {
			c.headers[key] = g
		}
	}
	c.inspects = c.Scheme != "" || len(c.Methods) > 0 || len(c.Paths) > 0 || len(c.Headers) > 0 ||
		c.Action == Respond || c.Action == Policies || len(c.Placeholders) > 0
}

// webPorts are the ports of a rule that inspects requests and names no port.
var webPorts = []Ports{{80, 80}, {443, 443}}

func (c *compiler) action() {
	switch c.Action {
	case Allow, Deny, Respond, Policies:
	case "":
		c.bad("action", "missing; use allow or deny, or give the rule policies or respond")
	default:
		c.bad("action", "unknown action %.20q; use allow or deny, or no action in a rule with policies or respond", c.Action)
	}
	if c.text("reason", c.Reason) && c.Reason != "" && c.Action != Deny {
		c.bad("reason", "only a rule that denies has one")
	}
	if c.inspects && len(c.Addresses) > 0 {
		c.bad("addresses", "requests to an address without a name cannot be inspected: name the host, or allow or deny the whole address")
	}
	c.response()
	c.chain()
	c.placeholders()
}

func (c *compiler) response() {
	if c.Action != Respond {
		if c.Response != nil {
			c.excluded("respond")
		}
		return
	}
	if c.Response == nil {
		c.bad("respond", `missing; write {"status": 200, "body": "…"}`)
		return
	}
	if s := c.Response.Status; s < 200 || s > 599 {
		c.bad("respond.status", "%d is out of range; use 200 to 599", s)
	}
	if n := len(c.Response.Body); n > MaxResponse {
		c.bad("respond.body", "%d bytes; use at most %d", n, MaxResponse)
	}
	c.entries("respond.headers", len(c.Response.Headers))
	seen := map[string]bool{}
	for name, value := range c.Response.Headers {
		field := fmt.Sprintf("respond.headers[%.80s]", name)
		if !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			c.bad(field, "invalid header")
		}
		key := http.CanonicalHeaderKey(name)
		if slices.Contains(framing, key) {
			c.bad(field, "is set by the connection itself")
		}
		if seen[key] {
			c.bad(field, "is already set in another spelling")
		}
		seen[key] = true
	}
}

// excluded reports a field that a rule with this action cannot have.
func (c *compiler) excluded(field string) {
	with := "respond"
	switch c.Action {
	case Allow, Deny:
		with = fmt.Sprintf("the action %q", c.Action)
	case Policies:
		with = "policies"
	}
	c.bad(field, "cannot be combined with %s; make two rules", with)
}

// unseen are headers of requests that no rule sees, so that one which names them
// would never match (RFC 9110, section 7.6.1; RFC 9112, section 3.2).
var unseen = []string{
	"Alt-Used", "Host", "Http2-Settings", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Trailer", "Transfer-Encoding",
}

// framing are the headers that belong to a connection (RFC 9110, section 7.6.1).
var framing = []string{"Connection", "Content-Length", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

func (c *compiler) chain() {
	if c.Action != Policies {
		if len(c.Policies) > 0 {
			c.excluded("policies")
		}
		return
	}
	if n := len(c.Policies); n == 0 || n > MaxChain {
		c.bad("policies", "%d policies; use 1 to %d", n, MaxChain)
	}
	for i, use := range c.Policies {
		field := fmt.Sprintf("policies[%d]", i)
		if !namePattern.MatchString(use.Policy) {
			c.bad(field+".name", "%.80q: a name is 1 to 64 of a-z, 0-9, - and _", use.Policy)
		}
		if len(use.Config) > MaxConfig {
			c.bad(field+".config", "%d bytes; use at most %d", len(use.Config), MaxConfig)
		}
		if len(use.Config) > 0 && !json.Valid(use.Config) {
			c.bad(field+".config", "invalid JSON")
		}
		for as, secret := range use.Secrets {
			if !namePattern.MatchString(as) || !namePattern.MatchString(secret) {
				c.bad(field+".secrets", "%.80q: %.80q: names are 1 to 64 of a-z, 0-9, - and _", as, secret)
			}
		}
	}
}

// variablePattern matches names that every shell can use (POSIX, 3.230).
var variablePattern = regexp.MustCompile(`\A[A-Za-z_][A-Za-z0-9_]{0,63}\z`)

func (c *compiler) placeholders() {
	c.entries("placeholders", len(c.Placeholders))
	if len(c.Placeholders) > 0 && c.Action != Allow && c.Action != Policies {
		c.excluded("placeholders")
	}
	for variable, secret := range c.Placeholders {
		field := fmt.Sprintf("placeholders[%.80s]", variable)
		if !variablePattern.MatchString(variable) {
			c.bad(field, "invalid name of an environment variable: write A-Z, a-z, 0-9 and _, at most 64, no digit first")
		}
		if !namePattern.MatchString(secret) {
			c.bad(field, "%.80q: names are 1 to 64 of a-z, 0-9, - and _", secret)
		}
	}
}
