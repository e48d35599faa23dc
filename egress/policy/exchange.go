package policy

import (
	"encoding/json"
	"net/http"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/problem"
)

// Sandbox is who sends a request, as policies see it.
type Sandbox struct {
	ID     string            `json:"id"`
	Name   string            `json:"name"`
	Owner  string            `json:"owner"`
	Labels map[string]string `json:"labels"`
}

// Exchange is one request with its response, on its way through the steps. The
// caller fills in the first part; Serve the second, which is complete when it
// returns. Nobody else uses it meanwhile.
type Exchange struct {
	Sandbox Sandbox
	// Flow is the id of the connection in the audit log.
	Flow string
	// Host is the clean name of the destination.
	Host string

	// Denied is why the request, or its response, was refused; nil: it was not.
	Denied *Denial
	// Answered names the policy that answered instead of the upstream, with Status.
	Answered string
	Status   int
	// WroteBody says that the request's body is a policy's, and not the client's.
	WroteBody bool
	// Notes for the audit log, in the order in which policies left them.
	Notes []string

	sandboxJSON []byte
}

// Notes of an exchange: enough for a line of the audit log.
const (
	maxNotes = 8
	maxNote  = 256 // bytes
)

// sandbox is what policies get of the sandbox.
func (x *Exchange) sandbox() []byte {
	if x.sandboxJSON == nil {
		s := x.Sandbox
		if s.Labels == nil {
			s.Labels = map[string]string{}
		}
		x.sandboxJSON, _ = json.Marshal(s) // strings only
	}
	return x.sandboxJSON
}

// Denial is a refusal by a policy, or because of one that failed.
type Denial struct {
	Policy string
	// Reason is for whoever sent the request. It is the policy's own if that
	// denied, and is free of line breaks.
	Reason string
	// Detail is for the policy's author: the trace of a trap and what the policy
	// wrote last. Empty if the policy denied.
	Detail string
	// Code of the refusal: PolicyDenied if the policy denied; SecretNotAllowed if it
	// asked for a secret that its source refused, for Reason; otherwise why it failed.
	Code problem.Code
}

func (d *Denial) Error() string {
	if d.Code == problem.SecretNotAllowed {
		return "policy " + d.Policy + " cannot use a secret: " + d.Reason
	}
	return "denied by policy " + d.Policy + ": " + d.Reason
}

// noSecrets is what a step without secrets has.
type noSecrets struct{}

func (noSecrets) Reference(string) (string, error)              { return "", secret.ErrUnknown }
func (noSecrets) Encode(int32, string) (string, error)          { return "", secret.ErrNotAllowed }
func (noSecrets) HMAC(string, string, [][]byte) ([]byte, error) { return nil, secret.ErrUnknown }
func (noSecrets) Sign(string, int32, []byte) ([]byte, error)    { return nil, secret.ErrUnknown }

// Step is a policy to run for an exchange.
type Step struct {
	Policy  *Policy
	Secrets secret.Source // nil: none
	// Namespace keeps what policies store apart: those of one name and namespace,
	// usually the owner of the rule, share their keys.
	Namespace string
	// Sharer is who shares the policy's instances with others and may have a quarter
	// of them at once; empty: all.
	Sharer string
	// Check, if it is not nil, is asked whether what the policy made of the request
	// may go on: before is the request as the policy got it, and wrote the body that
	// it wrote, or nil. An error denies the exchange, with its text.
	Check func(before, after *http.Request, wrote []byte) error
}

// ErrCut says that the response has begun and must not look whole: the caller
// tells who has to know, and panics with it.
var ErrCut = http.ErrAbortHandler
