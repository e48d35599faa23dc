// Package explain reports how the rules would decide on a request, and why, without
// sending anything.
package explain

import (
	"fmt"
	"maps"
	"slices"

	"github.com/doze-run/doze/egress/rule"
)

// Stage of a request at which it is decided on.
type Stage string

const (
	// DNS: the name is refused, so no connection is made.
	DNS Stage = "dns"
	// Connection: it is refused, or passed through untouched.
	Connection Stage = "connection"
	// Request: it is intercepted, and each request is decided on.
	Request Stage = "request"
)

// Explanation of one request.
type Explanation struct {
	Verdict rule.Verdict `json:"verdict"`
	Stage   Stage        `json:"stage"`
	// Rule that decides, as source/name, such as owner/github; "default" if none does.
	Rule   string `json:"rule"`
	Reason string `json:"reason"` // never empty
	// Preset by which that rule matches the host, such as npm.
	Preset string `json:"preset,omitempty"`
	// Private: the host may be at a private address.
	Private bool `json:"private,omitempty"`
	// Status of the response that a rule gives instead of the host.
	Status int `json:"status,omitempty"`
	// Policies that run, in this order, and the secrets that they use.
	Policies []Policy `json:"policies,omitempty"`
	Secrets  []Secret `json:"secrets,omitempty"`
	// Placeholders are the secrets whose placeholders are exchanged, if the request has
	// any.
	Placeholders []Secret `json:"placeholders,omitempty"`
}

// Policy that runs.
type Policy struct {
	Rule   string `json:"rule"` // as source/name
	Name   string `json:"name"`
	Digest string `json:"digest,omitempty"`
	// Problem for which the request is refused.
	Problem string `json:"problem,omitempty"`
}

// Secret that may be sent.
type Secret struct {
	Name    string `json:"name"`
	Problem string `json:"problem,omitempty"`
}

// Known is the state that the rules of a sandbox refer to. The source is the source of
// the rule that has the name: names in the node's rules are the operator's.
type Known interface {
	// Policy returns the digest of the module that runs, or the reason for which none can.
	Policy(source rule.Source, use rule.Use) (digest string, err error)
	// Secret returns the reason for which the secret cannot be sent to that host, or nil.
	Secret(source rule.Source, name, host string) error
	// ECH reports whether connections whose ClientHello has ECH pass through.
	ECH() bool
}

// Of explains a request, which Parse made.
func Of(t *rule.Table, r rule.Request, known Known) Explanation {
	e := decide(t, r, known)
	e.Preset = t.Preset(e.Rule, r.Host)
	return e
}

func decide(t *rule.Table, r rule.Request, known Known) Explanation {
	if r.Host != "" {
		if d := t.Name(r.Host); d.Verdict == rule.VerdictDeny {
			return of(DNS, d)
		}
	}
	d := t.Connect(r)
	if d.Verdict != rule.VerdictInspect {
		e := of(Connection, d)
		if e.Verdict == rule.VerdictAllow && r.HTTPS && !known.ECH() {
			e.Reason += ", or is intercepted if its ClientHello has ECH (browsers')"
		}
		return e
	}
	if r.Method == "" {
		e := of(Request, d)
		e.Reason = "each request is decided separately; traffic other than HTTP is refused"
		return e
	}
	d = t.Decide(r)
	e := of(Request, d)
	if d.Response != nil {
		e.Status = d.Response.Status
	}
	for _, step := range d.Chain {
		e.add(step, r, known)
	}
	for _, offer := range d.Offers {
		e.Placeholders = append(e.Placeholders, secretOf(offer.Source, offer.Secret, r, known))
	}
	return e
}

func of(stage Stage, d rule.Decision) Explanation {
	e := Explanation{Verdict: d.Verdict, Stage: stage, Rule: d.Rule, Reason: d.Reason, Private: d.Private}
	if e.Reason != "" {
		return e
	}
	switch {
	case d.Rule == "default":
		e.Reason = "no rule matches, and the default allows connections to public addresses by name"
	case d.Verdict == rule.VerdictRespond:
		e.Reason = "the rule responds instead of the host"
	case len(d.Chain) > 0:
		e.Reason = "the rule allows it through its policies, which may still deny it"
	default:
		e.Reason = "the rule allows it"
	}
	if stage == Connection {
		e.Reason += "; the connection passes through unmodified"
	}
	return e
}

// add adds a policy with its secrets. Its first problem denies the request.
func (e *Explanation) add(step rule.Step, r rule.Request, known Known) {
	p := Policy{Rule: step.Rule, Name: step.Policy}
	digest, err := known.Policy(step.Source, step.Use)
	if p.Digest = digest; err != nil {
		p.Problem = err.Error()
		e.deny(step.Rule, fmt.Sprintf("the policy %s cannot run: %v", step.Policy, err))
	}
	e.Policies = append(e.Policies, p)
	for _, name := range slices.Compact(slices.Sorted(maps.Values(step.Secrets))) {
		s := secretOf(step.Source, name, r, known)
		if s.Problem != "" {
			e.deny(step.Rule, fmt.Sprintf("the policy %s cannot use a secret: %s", step.Policy, s.Problem))
		}
		if !slices.Contains(e.Secrets, s) {
			e.Secrets = append(e.Secrets, s)
		}
	}
}

func secretOf(source rule.Source, name string, r rule.Request, known Known) Secret {
	s := Secret{Name: name}
	switch err := known.Secret(source, name, r.Host); {
	case err != nil:
		s.Problem = err.Error()
	case !r.HTTPS:
		s.Problem = "secrets are sent over HTTPS only"
	}
	return s
}

func (e *Explanation) deny(by, reason string) {
	if e.Verdict != rule.VerdictDeny {
		e.Verdict, e.Rule, e.Reason = rule.VerdictDeny, by, reason
	}
}
