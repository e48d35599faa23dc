package egress

import (
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
)

// handler serves the requests of a connection.
func (m *sender) handler(to destination, tls bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, to, tls, "") })
}

// serve serves a request. The reason is written of it unless there is one for what
// became of it.
func (m *sender) serve(w http.ResponseWriter, r *http.Request, to destination, tls bool, reason string) {
	x := &exchange{m: m, to: to, tls: tls, began: time.Now(), requestID: r.Header.Get(requestid.Header), secrets: session.New(m.e.vault, to.host, tls)}
	x.entry = audit.Entry{
		Kind: audit.Request, Flow: to.flow, Host: to.host, Port: to.port,
		Method: r.Method, Path: r.URL.EscapedPath(), Reason: reason,
	}
	x.serve(w, r)
}

// exchange is a request with its response.
type exchange struct {
	m     *sender
	to    destination
	tls   bool
	began time.Time
	// requestID is the client's X-Request-Id, or empty. The request's may become a
	// secret later.
	requestID string
	secrets   *session.Session
	policy    policy.Exchange
	table     *table // that decided
	decided   rule.Decision
	entry     audit.Entry

	exchanged *placeholder.Exchanged // nil: none was in it
	held      int64                  // bytes of its body in memory
}

func (x *exchange) serve(w http.ResponseWriter, r *http.Request) {
	defer x.record()
	if err := x.m.load.requests.TryAcquire(1); err != nil {
		x.full(w, r, err)
		return
	}
	defer x.m.load.requests.Release(1)
	defer func() { x.m.load.bodies.Release(x.held) }()
	steps, err := x.decide(r)
	defer release(steps)
	x.entry.Rule = x.decided.Rule
	switch {
	case err != nil:
		x.refuse(w, r, problem.PolicyFailed, err.Error())
	case x.decided.Verdict == rule.VerdictAllow:
		x.permit(w, r, steps)
	case x.decided.Verdict == rule.VerdictAnswer:
		x.answer(w, x.decided.Answer)
	default:
		x.refuse(w, r, problem.EgressDenied, x.decided.Reason)
	}
}

// decide decides on the request and retains the policies that it has to pass.
func (x *exchange) decide(r *http.Request) ([]policy.Step, error) {
	request := x.ruleRequest(r)
	for {
		x.table = x.m.table.Load()
		x.decided = x.table.Decide(request)
		steps, err := x.steps()
		if !errors.Is(err, errReplaced) {
			return steps, err
		}
		// The table was, too, before its policies were released: the next one has
		// others.
	}
}

// ruleRequest is a request as rules see it.
func (x *exchange) ruleRequest(r *http.Request) rule.Request {
	return rule.Request{
		Host: x.to.host, Port: x.to.port, HTTPS: x.tls,
		Method: r.Method, Path: r.URL.EscapedPath(), Header: r.Header,
	}
}

// recheck decides again, on a request that policies have changed, and says why it
// must not be sent: the rules hold for what is sent, too. An owner's policy must not
// make a request of one that the node's rules permit which they deny, which has to
// pass others of their policies, or for which they offer no secret.
func (x *exchange) recheck(r *http.Request) (reason string) {
	before := x.decided
	x.decided = x.table.Decide(x.ruleRequest(r))
	x.entry.Rule = x.decided.Rule
	switch {
	case x.decided.Verdict == rule.VerdictDeny:
		return "as its policies changed it, " + x.decided.Reason
	case x.decided.Verdict != before.Verdict, !slices.Equal(policySteps(x.decided), policySteps(before)):
		return "its policies changed it into one to which other rules apply"
	}
	return ""
}

// policyStep is what makes two steps of chains the same.
type policyStep struct{ rule, policy, config string }

func policySteps(d rule.Decision) []policyStep {
	steps := make([]policyStep, len(d.Chain))
	for i, s := range d.Chain {
		steps[i] = policyStep{s.Rule, s.Policy, string(s.Config)}
	}
	return steps
}

// record writes what came of it.
func (x *exchange) record() {
	x.entry.Duration = audit.Took(time.Since(x.began))
	x.entry.Notes = x.policy.Notes
	x.used(x.secrets.Used())
	x.m.record(x.entry)
}

// used records the names of secrets.
func (x *exchange) used(ids []secret.ID) {
	for _, id := range ids {
		if !slices.Contains(x.entry.Secrets, id.Name) {
			x.entry.Secrets = append(x.entry.Secrets, id.Name)
		}
	}
}

// refuse sends a refusal of the request and records it.
func (x *exchange) refuse(w http.ResponseWriter, r *http.Request, code problem.Code, reason string) {
	why := problem.New(code, reason).WithFlow(x.to.host, x.decided.Rule, x.to.flow).For(requestid.Or(x.requestID))
	x.denied(why.Status, reason)
	intercept.Refuse(w, r, why)
}

// denied notes that the request was refused.
func (x *exchange) denied(status int, reason string) {
	x.entry.Verdict, x.entry.Reason, x.entry.Status = audit.Deny, reason, status
}

// answer gives a rule's own response.
func (x *exchange) answer(w http.ResponseWriter, a *rule.Answer) {
	x.entry.Verdict, x.entry.Status = audit.Respond, a.Status
	for name, value := range a.Headers {
		w.Header().Set(name, value)
	}
	w.WriteHeader(a.Status)
	n, _ := w.Write([]byte(a.Body)) // who left does not hear it
	x.entry.BytesIn = int64(n)
}

// permit runs the policies and sends the request on.
func (x *exchange) permit(w http.ResponseWriter, r *http.Request, steps []policy.Step) {
	x.entry.Verdict = audit.Allow
	if len(steps) == 0 {
		x.forward(w, r)
		return
	}
	x.policy.Sandbox = x.m.identity()
	x.policy.Host, x.policy.Flow = x.to.host, x.to.flow
	denial, err := policy.Serve(w, r, &x.policy, steps, http.HandlerFunc(x.forwardChanged))
	if denial != nil && denial.Detail != "" { // for the policy's author; a sandbox can cause any number
		x.m.e.log.Debug("a policy failed", "sandbox", x.m.id, "policy", denial.Policy, "detail", denial.Detail)
	}
	switch {
	case denial != nil && err != nil:
		x.denied(0, denial.Error())
		panic(err) // cuts the response
	case denial != nil:
		x.refuse(w, r, denial.Code, denial.Error())
	case x.policy.Answered != "":
		x.entry.Verdict, x.entry.Status = audit.Respond, x.policy.Status
		x.entry.Reason = "answered by policy " + x.policy.Answered
	}
}

// errReplaced: rules were replaced while a request was decided on.
var errReplaced = errors.New("the policy was replaced")

// steps are the policies of the decision, retained, each with the secrets that its
// rule names for it.
func (x *exchange) steps() (steps []policy.Step, err error) {
	x.entry.Policies = nil
	defer func() {
		if err != nil {
			release(steps)
			steps = nil
		}
	}()
	for _, s := range x.decided.Chain {
		l := x.table.layerOf(s.Source)
		p, err := l.policy(s.Use)
		if err != nil {
			return steps, err
		}
		if !p.policy.Retain() {
			return steps, errReplaced
		}
		x.entry.Policies = append(x.entry.Policies, audit.Policy{Name: s.Policy, Digest: p.key.digest})
		step := policy.Step{Policy: p.policy, Namespace: l.owner, Secrets: x.secrets.For(l.owner, s.Secrets)}
		if l.owner != x.m.owner { // those who send slowly must not have all of the node's
			step.Sharer = x.m.owner
		}
		if slices.ContainsFunc(steps, func(earlier policy.Step) bool { return earlier.Namespace != l.owner }) {
			step.Check = x.leavesOthers(l.owner)
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// leavesOthers checks that a policy of one owner leaves references to another's
// secrets where they are. It sees those that policies before it have placed, and
// could have the host publish one of the operator's.
func (x *exchange) leavesOthers(owner string) func(before, after *http.Request, wrote []byte) error {
	return func(before, after *http.Request, wrote []byte) error {
		if x.secrets.Moved(before, after, wrote, owner) {
			return errors.New("it puts a secret of another owner where that did not put it")
		}
		return nil
	}
}

func release(steps []policy.Step) {
	for _, s := range steps {
		s.Policy.Release()
	}
}

// forwardChanged is forward for a request that policies may have changed.
func (x *exchange) forwardChanged(w http.ResponseWriter, r *http.Request) {
	if reason := x.recheck(r); reason != "" {
		x.refuse(w, r, problem.EgressDenied, reason)
		return
	}
	x.forward(w, r)
}

// forward sends the request as the policies made it, with the secrets in their
// places, and the response back without them.
func (x *exchange) forward(w http.ResponseWriter, r *http.Request) {
	var refused *placeholder.RefusedError
	switch err := x.exchangePlaceholders(r); {
	case errors.As(err, &refused):
		x.refuse(w, r, problem.PlaceholderNotAllowed, err.Error())
		return
	case err != nil: // its body did not come to its end
		x.entry.Verdict, x.entry.Reason = audit.Error, "the client ended the request"
		panic(http.ErrAbortHandler)
	}
	if err := x.secrets.Render(r, x.policy.WroteBody); err != nil {
		x.refuse(w, r, problem.SecretNotAllowed, err.Error())
		return
	}
	filter := x.m.filter(x.to.host, x.secrets)
	r = way{x.m, x.decided.Private}.along(r)
	result := x.m.e.upstream.Load().forwarder.Forward(w, r, x.to.flow, x.requestID, filter)
	x.entry.Status, x.entry.BytesIn, x.entry.BytesOut = result.Status, result.BytesIn, result.BytesOut
	x.entry.Address = result.Address.Addr()
	x.used(x.exchanged.Used())
	if refused := x.exchanged.Refused(); refused != nil {
		x.entry.Verdict, x.entry.Reason = audit.Deny, refused.Error()
	} else if result.Err != nil {
		x.entry.Verdict, x.entry.Reason = verdictOf(result.Err), result.Err.Error()
		x.entry.Address = refusedAddress(result.Err, x.entry.Address)
	}
	if result.Cut {
		panic(http.ErrAbortHandler) // policies hear of it, too
	}
}

// verdictOf is what is written of a request or connection that failed.
func verdictOf(err error) audit.Verdict {
	var refused *dial.RefusedError
	var limited *intercept.RefusedError
	if errors.As(err, &refused) || errors.As(err, &limited) {
		return audit.Deny
	}
	return audit.Error
}

// refusedAddress is the one for which an error is a refusal, or else known.
func refusedAddress(err error, known netip.Addr) netip.Addr {
	var refused *dial.RefusedError
	if errors.As(err, &refused) {
		return refused.Address
	}
	return known
}
