// Package rule decides which traffic may leave a sandbox, and through which policies.
//
// Rules come in three layers: the node's, the owner's and the sandbox's. A rule that
// denies wins wherever it stands. Otherwise the first rule of each layer that matches
// counts: their policies run one after another, the node's first. The default applies to
// requests that match no rule.
package rule

import (
	"encoding/json"
	"net/netip"
)

// Rule decides on the requests that it matches. A list that is empty matches everything.
type Rule struct {
	// Name is unique in its layer: 1 to 64 of a-z, 0-9, - and _.
	Name string `json:"name"`
	// Hosts are names: `api.github.com`, `*.example.com` (all below, without
	// example.com itself), `**` (every name), or presets: `preset:github` (the hosts of
	// a service, see Presets).
	Hosts []string `json:"hosts,omitempty"`
	// Addresses are networks, such as 203.0.113.0/24, or single addresses. A
	// connection to an address that no name led to is refused unless a rule
	// has the address here. A rule has hosts or addresses, not both, and one
	// with addresses does not inspect requests.
	Addresses []string `json:"addresses,omitempty"`
	// Private lets the hosts be at private addresses. Only the node's rules may
	// have it: the owner of a name can point it at anything.
	Private bool `json:"private,omitempty"`
	// Ports such as 443 or 8000-8100. Without any, a rule that inspects
	// requests matches 80 and 443, every other rule all ports.
	Ports []Ports `json:"ports,omitempty"`
	// Scheme is http, https, or empty for both and for other protocols.
	Scheme string `json:"scheme,omitempty"`
	// Methods such as GET.
	Methods []string `json:"methods,omitempty"`
	// Paths are globs: `*` is anything but a slash, `**` anything. They are
	// written without escapes, but for %2F, a slash within a name: servers
	// that decode it read another path, so that a rule which allows such
	// paths lists both.
	Paths []string `json:"paths,omitempty"`
	// Headers that the request has to have; the values are globs in which `*`
	// is anything.
	Headers map[string]string `json:"headers,omitempty"`

	// Action is what the rule does. A rule with policies or a response needs none.
	Action Action `json:"action,omitempty"`
	// Reason of a denial, for readers of the refusal.
	Reason string `json:"reason,omitempty"`
	// Response is sent instead of a request to the host.
	Response *Response `json:"answer,omitempty"`
	// Policies are run in this order.
	Policies []Use `json:"policies,omitempty"`
	// Placeholders are environment variables of the sandbox, to names of secrets.
	// Each variable holds a placeholder, which the node exchanges for the secret in
	// requests that this rule permits: one that allows, or that has policies.
	Placeholders map[string]string `json:"placeholders,omitempty"`
}

// Action of a rule.
type Action string

const (
	Allow    Action = "allow"
	Deny     Action = "deny"
	Respond  Action = "answer"
	Policies Action = "policies"
)

// Response is a response that needs no upstream.
type Response struct {
	Status  int               `json:"status"` // 200 to 599
	Headers map[string]string `json:"headers,omitempty"`
	Body    string            `json:"body,omitempty"` // at most MaxResponse bytes
}

// Use is a policy with its configuration and secrets.
type Use struct {
	// Policy is the name of a module that was pushed, or that doze ships.
	Policy string `json:"policy"`
	// Config is the policy's configuration in JSON.
	Config json.RawMessage `json:"config,omitempty"`
	// Secrets are the names that the policy uses, to names of secrets.
	Secrets map[string]string `json:"secrets,omitempty"`
}

// Request is the part of a request that rules inspect. For a connection only the Port and
// the Host or Address are known.
type Request struct {
	Host    string     // lower case, ASCII, without a dot at the end; empty if no name led here
	Address netip.Addr // set if Host is empty; IPv4 may be mapped
	Port    uint16
	HTTPS   bool
	Method  string
	Path    string // as it was sent, without the query
	Header  map[string][]string
}

// Limits of a layer. More is an error when the rules are given.
const (
	MaxRules    = 1000
	MaxEntries  = 1000     // of each list of a rule
	MaxText     = 1000     // bytes of a pattern, name or reason
	MaxResponse = 64 << 10 // bytes of a body
	MaxConfig   = 64 << 10 // bytes of a policy's configuration
	MaxChain    = 16       // policies of a rule
	// MaxGlobs of paths and headers in all rules, MaxGlobStars in them (`**` is one)
	// and MaxGlobText bytes: a request is compared with each.
	MaxGlobs     = 2000
	MaxGlobStars = 4000
	MaxGlobText  = 128 << 10
	MaxStars     = 16 // of one path or header
	// MaxPresetNames in all rules: a host is compared with each preset.
	MaxPresetNames = 1000
	// MaxUses of policies with different configurations in all rules: each is an
	// instance that starts when the rules are given.
	MaxUses = 100
)
