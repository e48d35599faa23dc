package types

import (
	"encoding/json"
	"time"
)

// Rule decides on outgoing requests. An empty list matches everything.
type Rule struct {
	Name         string            `json:"name" doc:"1 to 64 of a-z, 0-9, - and _; unique in its list" example:"github"`
	Hosts        []string          `json:"hosts,omitempty" nullable:"false" doc:"Hosts: a name, *.example.com (all names below it, without itself), ** (every name), or a preset such as preset:github. A rule has hosts or addresses, not both" example:"[\"api.github.com\"]"`
	Addresses    []string          `json:"addresses,omitempty" nullable:"false" doc:"Networks such as 203.0.113.0/24, or single addresses, for connections to addresses that no name resolved to. Except in the node's rules, only with the action deny"`
	AllowPrivate bool              `json:"allow_private,omitempty" doc:"Whether the hosts may have private addresses; only in the node's rules"`
	Ports        []string          `json:"ports,omitempty" nullable:"false" doc:"Ports such as 443 or 8000-8100. Default: 80 and 443 for a rule that inspects requests, all for other rules"`
	Scheme       string            `json:"scheme,omitempty" doc:"http or https. Default: both, and protocols other than HTTP"`
	Methods      []string          `json:"methods,omitempty" nullable:"false" doc:"Methods such as GET"`
	Paths        []string          `json:"paths,omitempty" nullable:"false" doc:"Globs: * matches all characters except a slash, ** all. Written without escapes except %2F"`
	Headers      map[string]string `json:"headers,omitempty" doc:"Headers that a request must have, with globs of their values"`
	Action       RuleAction        `json:"action,omitempty" doc:"allow or deny; missing in a rule with policies or respond"`
	Reason       string            `json:"reason,omitempty" doc:"Reason of a denial, for the reader of the response"`
	Respond      *RuleResponse     `json:"respond,omitempty" doc:"Response to send instead of the host's"`
	Policies     []RulePolicy      `json:"policies,omitempty" nullable:"false" doc:"Policies to run, in this order; at most 16"`
	Placeholders map[string]string `json:"placeholders,omitempty" doc:"Environment variables of sandboxes, with names of secrets: the value of the variable is a placeholder, which is exchanged for the secret in requests that the rule permits"`
}

// RuleAction is what a rule does with a request.
type RuleAction string

const (
	RuleActionAllow RuleAction = "allow"
	RuleActionDeny  RuleAction = "deny"
)

// Values returns all actions.
func (RuleAction) Values() []RuleAction { return []RuleAction{RuleActionAllow, RuleActionDeny} }

// RuleResponse is a response without a request to the host.
type RuleResponse struct {
	Status  int               `json:"status" doc:"HTTP status, 200 to 599" example:"404"`
	Headers map[string]string `json:"headers,omitempty" doc:"Headers of the response"`
	Body    string            `json:"body,omitempty" doc:"Body of the response, at most 64 KiB"`
}

// RulePolicy is a policy with its configuration and secrets.
type RulePolicy struct {
	Name    string            `json:"name" doc:"Name of a pushed or built-in policy" example:"bearer"`
	Config  json.RawMessage   `json:"config,omitempty" doc:"Configuration of the policy, any JSON"`
	Secrets map[string]string `json:"secrets,omitempty" doc:"Names that the policy uses for its secrets, with names of secrets"`
}

// RuleDefault is what happens to requests that match no rule.
type RuleDefault string

const (
	RuleDefaultAllowPublic RuleDefault = "allow_public" // of a node: allows names that resolve to public addresses
	RuleDefaultDeny        RuleDefault = "deny"         // denies what matches neither these rules nor later ones
	RuleDefaultInherit     RuleDefault = "inherit"      // of an owner or a sandbox: earlier rules decide
)

// Values returns all defaults.
func (RuleDefault) Values() []RuleDefault {
	return []RuleDefault{RuleDefaultAllowPublic, RuleDefaultDeny, RuleDefaultInherit}
}

// RuleSet is the rules of an owner or a sandbox.
type RuleSet struct {
	Revision  int64       `json:"revision" doc:"Number of changes; 0 for rules that were never set"`
	UpdatedAt time.Time   `json:"updated_at,omitzero" doc:"When the rules were last changed; missing if never"`
	Default   RuleDefault `json:"default" enum:"inherit,deny" doc:"What happens to requests that match no rule. inherit: earlier rules decide; deny: they are denied unless later rules allow them"`
	Rules     []Rule      `json:"rules" nullable:"false" doc:"Rules in their order"`
	Warnings  []Warning   `json:"warnings,omitempty" nullable:"false" doc:"Accepted rules that may not work as intended, at most 20. GET reports only those with a preset that no longer exists"`
}

// SetRulesRequest replaces the rules of an owner or a sandbox.
type SetRulesRequest struct {
	Default RuleDefault `json:"default,omitempty" enum:"inherit,deny" doc:"What happens to requests that match no rule. inherit: earlier rules decide; deny: they are denied unless later rules allow them. Unchanged if missing"`
	Rules   []Rule      `json:"rules" nullable:"false" maxItems:"1000" doc:"Rules in their order. A rule that denies wins; otherwise the first rule that matches applies"`
}

// NodeRules is the rules of the operator.
type NodeRules struct {
	Default RuleDefault `json:"default" enum:"allow_public,deny" doc:"What happens to requests that match no rule of any list. allow_public: names that resolve to public addresses are allowed; deny: all are denied"`
	Rules   []Rule      `json:"rules" nullable:"false" doc:"Rules in their order"`
}

// Warning is about an accepted value that may not work as intended.
type Warning struct {
	Location string `json:"location" doc:"What it is about, such as body.rules[1]"`
	Message  string `json:"message" doc:"Description for people"`
	Hint     string `json:"hint,omitempty" doc:"How to fix it"`
}

// Preset is a named list of hosts for rules.
type Preset struct {
	Name        string       `json:"name" doc:"Name of the preset; preset:NAME in the hosts of a rule" example:"github"`
	Description string       `json:"description" doc:"What the hosts are"`
	Hosts       []string     `json:"hosts" nullable:"false" doc:"Host names, or *.example.com for all below one"`
	Source      PresetSource `json:"source" doc:"Where the preset is defined. built_in: in doze; node: in the node's configuration"`
}

// PresetSource is where a preset is defined.
type PresetSource string

const (
	PresetSourceBuiltIn PresetSource = "built_in" // in doze
	PresetSourceNode    PresetSource = "node"     // in the node's configuration
)

// Values returns all sources.
func (PresetSource) Values() []PresetSource {
	return []PresetSource{PresetSourceBuiltIn, PresetSourceNode}
}

// PresetList is the presets of a node.
type PresetList struct {
	Presets []Preset `json:"presets" nullable:"false" doc:"Presets in the order of their names"`
}
