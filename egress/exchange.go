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
		if cut := x.forward(w, r, false); cut {
			panic(http.ErrAbortHandler)
		}
		return
	}
	chain := policy.NewChain(w, r, policy.Info{Sandbox: x.m.identity(), Host: x.to.host, Flow: x.to.flow})
	defer func() {
		chain.Close()
		x.entry.Notes = chain.Notes
	}()
	failed := false
	if stopped := x.runPolicies(chain, r, steps); !stopped {
		failed = x.forwardChanged(chain, r)
	}
	denial, cut := chain.Response(failed)
	if denial != nil && denial.Detail != "" { // for the policy's author; a sandbox can cause any number
		x.m.e.log.Debug("a policy failed", "sandbox", x.m.id, "policy", denial.Policy, "detail", denial.Detail)
	}
	switch {
	case denial != nil && cut:
		x.denied(0, denial.Error())
	case denial != nil:
		x.refuse(w, r, denial.Code, denial.Error())
	case chain.Answered != "":
		x.entry.Verdict, x.entry.Status = audit.Respond, chain.Status
		x.entry.Reason = "answered by policy " + chain.Answered
	}
	if cut {
		panic(http.ErrAbortHandler)
	}
}

// runPolicies runs the policies over the request. It returns true if the request must not
// be sent.
func (x *exchange) runPolicies(chain *policy.Chain, r *http.Request, steps []policy.Step) (stop bool) {
	for i, step := range steps {
		var before *http.Request // if policies of others have seen the request
		if slices.ContainsFunc(steps[:i], func(earlier policy.Step) bool { return earlier.Namespace != step.Namespace }) {
			before = policy.Snapshot(r)
		}
		if chain.Request(step) {
			return true
		}
		if before != nil && x.secrets.Moved(before, r, chain.Wrote(), step.Namespace) {
			chain.Reject("it puts a secret of another owner where that did not put it")
			return true
		}
	}
	return false
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
		steps = append(steps, step)
	}
	return steps, nil
}

func release(steps []policy.Step) {
	for _, s := range steps {
		s.Policy.Release()
	}
}

// forwardChanged is forward for a request that policies may have changed.
func (x *exchange) forwardChanged(chain *policy.Chain, r *http.Request) (failed bool) {
	if reason := x.recheck(r); reason != "" {
		x.refuse(chain.Writer(), r, problem.EgressDenied, reason)
		return false
	}
	return x.forward(chain.Writer(), r, chain.WroteBody)
}

// forward sends the request as the policies made it, with the secrets in their
// places, and the response back without them. wroteBody: a policy wrote the body. It
// returns true if the response ended early.
func (x *exchange) forward(w http.ResponseWriter, r *http.Request, wroteBody bool) (cut bool) {
	var refused *placeholder.RefusedError
	switch err := x.exchangePlaceholders(r); {
	case errors.As(err, &refused):
		x.refuse(w, r, problem.PlaceholderNotAllowed, err.Error())
		return false
	case err != nil: // its body did not come to its end
		x.entry.Verdict, x.entry.Reason = audit.Error, "the client ended the request"
		return true
	}
	if err := x.secrets.Render(r, wroteBody); err != nil {
		x.refuse(w, r, problem.SecretNotAllowed, err.Error())
		return false
	}
	filter := x.m.filter(x.to.host, x.secrets)
	result := x.m.e.upstream.Load().requests.Do(w, r, intercept.Route{
		Pool: x.m.name(), Private: x.decided.Private, SmallWindow: x.m.narrow(), Dials: x.m.load.attempts,
		Flow: x.to.flow, RequestID: x.requestID,
	}, filter)
	x.entry.Status, x.entry.BytesIn, x.entry.BytesOut = result.Status, result.BytesIn, result.BytesOut
	x.entry.Address = result.Address.Addr()
	x.used(x.exchanged.Used())
	if refused := x.exchanged.Refused(); refused != nil {
		x.entry.Verdict, x.entry.Reason = audit.Deny, refused.Error()
	} else if result.Err != nil {
		x.entry.Verdict, x.entry.Reason = verdictOf(result.Err), result.Err.Error()
		x.entry.Address = refusedAddress(result.Err, x.entry.Address)
	}
	return result.Cut
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
