package api

import (
	"context"
	"errors"
	"net/http"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Egress is what the API needs of whatever carries what sandboxes send out. Owners
// are authenticated, and sandboxes are the owner's. Errors are those of the packages
// that the types come from.
type Egress interface {
	// NodeRules are those of the operator, which only the node's configuration
	// changes, and what becomes of what no rule is about.
	NodeRules() (rule.Default, []rule.Rule)
	// Presets are the lists of hosts that rules can name.
	Presets() []preset.Preset
	// Rules returns those of a sandbox, or with an empty id those of the owner. Warnings
	// are about rules that no longer do what they seem to.
	Rules(ctx context.Context, owner string, id sandbox.ID) (ruleset.Set, []rule.Warning, error)
	// SetRules replaces them, all at once, for the next request of each sandbox. Errors:
	// ruleset.ErrRevision; *rule.Error for each fault, joined. Warnings are about rules
	// that were accepted but may not work as intended.
	SetRules(ctx context.Context, owner string, id sandbox.ID, u ruleset.Update) (ruleset.Set, []rule.Warning, error)

	// PutSecret copies value. Errors: *problem.InvalidError, vault.ErrTooMany (also in a
	// *vault.HostFullError).
	PutSecret(ctx context.Context, owner, name string, value []byte, hosts []string) (vault.Secret, error)
	// Secrets are in the order of their names.
	Secrets(owner string) []vault.Secret
	// DeleteSecret returns vault.ErrUnknown where there is none.
	DeleteSecret(ctx context.Context, owner, name string) error

	// PutPolicy takes a module that was compiled and found to be a policy. Errors:
	// *problem.InvalidError, with the Field "module" for what the compiler says;
	// catalog.ErrTooMany.
	PutPolicy(ctx context.Context, owner, name string, wasm []byte) (catalog.Info, error)
	// Policies are the owner's and those that come with doze, in the order of their
	// names, each with the owner's rules that name it.
	Policies(owner string) []catalog.Info
	// DeletePolicy returns catalog.ErrUnknown, catalog.ErrBuiltIn, or catalog.ErrInUse (wrapped, with the
	// rules' names) while rules name it.
	DeletePolicy(ctx context.Context, owner, name string) error

	// HasPolicy says whether the owner's rules can name a policy.
	HasPolicy(owner, name string) bool
	// PolicyLogs are the lines that the owner's policy wrote, oldest first.
	PolicyLogs(owner, name string, f policylog.Filter) []policylog.Line
	// FollowPolicyLogs returns those and then what comes. The channel is closed when the
	// policy is deleted, the node closes, or the function is called, which must be.
	FollowPolicyLogs(owner, name string, f policylog.Filter) (<-chan policylog.Line, func())

	// Flows are what a sandbox sent, oldest first.
	Flows(id sandbox.ID, f audit.Filter) []audit.Entry
	// FollowFlows returns those and then what comes. The channel is closed when the
	// sandbox is gone, the node closes, or the function is called, which must be.
	FollowFlows(id sandbox.ID, f audit.Filter) (<-chan audit.Entry, func())
	// Explain says what would become of a request. Errors: *problem.InvalidError.
	Explain(ctx context.Context, id sandbox.ID, method, url string, header http.Header) (explain.Explanation, error)
	// OutsideFlows, FollowOutsideFlows and ExplainOutside are the same for what the
	// owner has outside of sandboxes: the clients of the proxy.
	OutsideFlows(owner string, f audit.Filter) []audit.Entry
	FollowOutsideFlows(owner string, f audit.Filter) (<-chan audit.Entry, func())
	ExplainOutside(ctx context.Context, owner, method, url string, header http.Header) (explain.Explanation, error)
	// Bundle is the certificates, in PEM, that sandboxes trust beside the public ones.
	Bundle() []byte
}

// needsEgress are the codes of every route of egress, and more.
func needsEgress(codes ...problem.Code) []problem.Code {
	return append([]problem.Code{problem.EgressDisabled}, codes...)
}

// out returns what carries what sandboxes send out, or the refusal of a node
// without.
func (a *API) out() (Egress, error) {
	if a.egress == nil {
		return nil, problem.New(problem.EgressDisabled, "this node's sandboxes have no network; its operator has to configure egress")
	}
	return a.egress, nil
}

// problemOfEgress finds the Problem for the typed errors of egress, or nil.
func problemOfEgress(err error) *problem.Problem {
	var invalid *problem.InvalidError
	if errors.As(err, &invalid) {
		code := problem.RequestInvalid
		if invalid.Field == "module" {
			code = problem.PolicyInvalid
		}
		return problemOfField(code, invalid.Field, invalid.Reason, invalid.Want)
	}
	var fault *rule.Error
	if errors.As(err, &fault) {
		return problemOfRules(err)
	}
	return nil
}

// problemOfField is the Problem of one field: the name is in the path, the module is
// the body.
func problemOfField(code problem.Code, field, reason, want string) *problem.Problem {
	location := "body." + field
	switch field {
	case "name":
		location = "path.name"
		if code == problem.RequestInvalid {
			code = problem.NameInvalid
		}
	case "module":
		location = "body"
	}
	return problem.Newf(code, "%s: %s; %s", field, reason, want).
		WithErrors(problem.FieldError{Location: location, Message: reason, Hint: want})
}
