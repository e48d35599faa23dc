package policy

import (
	"encoding/json"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

// Sandbox describes the sender of a request to policies.
type Sandbox struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Owner  string            `json:"owner"`
	Labels map[string]string `json:"labels"`
}

// Info describes a request to policies.
type Info struct {
	Sandbox Sandbox
	// Flow is the id of the connection in the audit log.
	Flow string
	// Host is the normalized name of the destination.
	Host string
	// Bodies limits the bytes of the request's bodies and of policies' own responses that
	// are in memory until the Chain is closed. A policy that exceeds it fails. nil: no limit.
	Bodies *quota.Pool
}

// Limits on the notes of a request: enough for a line of the audit log.
const (
	maxNotes = 8
	maxNote  = 256 // bytes
)

// sandbox returns the sandbox as policies receive it.
func (c *Chain) sandbox() []byte {
	if c.sandboxJSON == nil {
		s := c.Sandbox
		if s.Labels == nil {
			s.Labels = map[string]string{}
		}
		c.sandboxJSON, _ = json.Marshal(s) // strings only
	}
	return c.sandboxJSON
}

// Denial is a refusal by a policy, or because of one that failed.
type Denial struct {
	Policy string
	// Reason is for the client. It is the policy's own if the policy denied the
	// request, and has no line breaks.
	Reason string
	// Detail is for the policy's author: the trace of a trap and the policy's last
	// output. Empty if the policy denied the request.
	Detail string
	// Code is the code of the refusal: PolicyDenied if the policy denied the request;
	// SecretNotAllowed if its source refused it a secret; otherwise the kind of failure.
	Code problem.Code
}

func (d *Denial) Error() string {
	if d.Code == problem.SecretNotAllowed {
		return "policy " + d.Policy + " cannot use a secret: " + d.Reason
	}
	return "denied by policy " + d.Policy + ": " + d.Reason
}

// Step is a policy to run over a request.
type Step struct {
	Policy  *Policy
	Secrets secret.Source
	// Namespace separates the stored values of policies: policies with the same name and
	// namespace, usually the owner of the rule, share their keys.
	Namespace string
	// Sharer is the owner on whose behalf another owner's policy runs. A sharer can use a
	// quarter of the policy's instances at a time. If empty, all instances can be used.
	Sharer string
}
