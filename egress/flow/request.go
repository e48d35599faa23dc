package flow

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
	"github.com/doze-run/doze/egress/secret/session"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
)

// request is one intercepted request with its response. Its methods are the stages, in
// the order in which serve and throughPolicies call them.
type request struct {
	*Client
	to    destination
	began time.Time
	// id is the client's X-Request-Id, or empty: the header may become a secret.
	id      string
	secrets *session.Session
	entry   audit.Entry

	table      *Table // that the decision is from
	decision   rule.Decision
	exchanged  *placeholder.Exchanged // nil: no placeholder was found
	heldBodies int64                  // bytes
}

// serve serves a request. reason is for the audit log, unless a stage sets another one.
func (c *Client) serve(w http.ResponseWriter, r *http.Request, to destination, reason string) {
	q := &request{
		Client: c, to: to, began: time.Now(), id: r.Header.Get(requestid.Header),
		secrets: session.New(c.carrier.cfg.Vault, to.host, to.tls),
		entry: audit.Entry{
			Kind: audit.Request, Flow: to.flow, Host: to.host, Port: to.port,
			Method: r.Method, Path: r.URL.EscapedPath(), Reason: reason,
		},
	}
	defer q.finish()
	if err := c.Usage.Requests.TryAcquire(1); err != nil {
		q.refuse(w, r, problem.EgressLimitExceeded, limitReason(err, "requests under way of the sender", "requests under way in the node"))
		return
	}
	defer c.Usage.Requests.Release(1)
	defer q.releaseBodies()
	steps, err := q.decide(r)
	defer release(steps)
	switch {
	case err != nil:
		q.refuse(w, r, problem.PolicyFailed, err.Error())
		return
	case q.decision.Verdict == rule.VerdictRespond:
		q.respond(w, q.decision.Response)
		return
	case q.decision.Verdict != rule.VerdictAllow:
		q.refuse(w, r, problem.EgressDenied, q.decision.Reason)
		return
	}
	q.entry.Verdict = audit.Allow
	cut := false
	if len(steps) == 0 {
		cut = q.send(w, r, false)
	} else {
		cut = q.throughPolicies(w, r, steps)
	}
	if cut {
		panic(http.ErrAbortHandler) // ends the response without completing it
	}
}

// throughPolicies runs the policies around send. It returns true if the response ended
// early.
func (q *request) throughPolicies(w http.ResponseWriter, r *http.Request, steps []policy.Step) (cut bool) {
	chain := policy.NewChain(w, r, policy.Info{Sandbox: q.identity(), Host: q.to.host, Flow: q.to.flow, Bodies: q.Usage.PolicyBodies})
	defer func() {
		chain.Close()
		q.entry.Notes = chain.Notes
	}()
	failed := false
	if stopped := q.runPolicies(chain, r, steps); !stopped {
		if reason := q.recheck(r); reason != "" {
			q.refuse(chain.Writer(), r, problem.EgressDenied, reason)
		} else {
			failed = q.send(chain.Writer(), r, chain.WroteBody)
		}
	}
	denial, cut := chain.Response(failed)
	if denial != nil && denial.Detail != "" { // for the policy's author; a sandbox can cause any number
		q.carrier.cfg.Log.Debug("policy failed", "sandbox", q.ID, "policy", denial.Policy, "detail", denial.Detail)
	}
	switch {
	case denial != nil && cut:
		q.denied(0, denial.Error())
	case denial != nil:
		q.refuse(w, r, denial.Code, denial.Error())
	case chain.RespondedBy != "":
		q.entry.Verdict, q.entry.Status = audit.Respond, chain.Status
		q.entry.Reason = "response of policy " + chain.RespondedBy
	}
	return cut
}

// decide decides on the request. It returns the policies of the decision, each retained
// until release.
func (q *request) decide(r *http.Request) (steps []policy.Step, err error) {
	request := q.ruleRequest(r)
	for {
		q.table = q.Table()
		q.decision = q.table.Decide(request)
		q.entry.Rule = q.decision.Rule
		// The table is replaced before its policies are released: the next one has others.
		if steps, err = q.steps(); !errors.Is(err, errReplaced) {
			return steps, err
		}
	}
}

// ruleRequest returns a request as rules see it.
func (q *request) ruleRequest(r *http.Request) rule.Request {
	return rule.Request{
		Host: q.to.host, Port: q.to.port, HTTPS: q.to.tls,
		Method: r.Method, Path: r.URL.EscapedPath(), Header: r.Header,
	}
}

// errReplaced means that the table was replaced during the decision on a request.
var errReplaced = errors.New("the policy was replaced")

// steps returns the policies of the decision, retained, with the secrets that their rules
// name.
func (q *request) steps() (steps []policy.Step, err error) {
	q.entry.Policies = nil
	defer func() {
		if err != nil {
			release(steps)
			steps = nil
		}
	}()
	for _, s := range q.decision.Chain {
		l := q.table.LayerOf(s.Source)
		p, err := l.policy(s.Use)
		if err != nil {
			return steps, err
		}
		if !p.Retain() {
			return steps, errReplaced
		}
		q.entry.Policies = append(q.entry.Policies, audit.Policy{Name: s.Policy, Digest: p.Digest()})
		step := policy.Step{Policy: p, Namespace: l.Owner, Secrets: q.secrets.For(l.Owner, s.Secrets)}
		if l.Owner != q.Owner { // a client that sends slowly must not use all instances of the node's policies
			step.Sharer = q.Owner
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

// runPolicies runs the policies over the request. It returns true if the request must not
// be sent.
func (q *request) runPolicies(chain *policy.Chain, r *http.Request, steps []policy.Step) (stop bool) {
	for i, step := range steps {
		var before *http.Request // if another owner's policy has seen the request
		if slices.ContainsFunc(steps[:i], func(earlier policy.Step) bool { return earlier.Namespace != step.Namespace }) {
			before = policy.Snapshot(r)
		}
		if chain.Request(step) {
			return true
		}
		if before != nil && q.secrets.Moved(before, r, chain.Wrote(), step.Namespace) {
			chain.Reject("it moved a secret of another owner to another place")
			return true
		}
	}
	return false
}

// recheck decides again on a request that policies have changed, and returns the reason for
// not sending it. Rules apply to the changed request, too: an owner's policy must not turn
// a request that the node's rules permit into one that they deny, that has to pass other
// policies, or for which they offer no secret.
func (q *request) recheck(r *http.Request) (reason string) {
	before := q.decision
	q.decision = q.table.Decide(q.ruleRequest(r))
	q.entry.Rule = q.decision.Rule
	switch {
	case q.decision.Verdict == rule.VerdictDeny:
		return "as its policies changed it, " + q.decision.Reason
	case q.decision.Verdict != before.Verdict, !slices.EqualFunc(q.decision.Chain, before.Chain, sameStep):
		return "its policies changed it so that other rules apply"
	}
	return ""
}

func sameStep(a, b rule.Step) bool {
	return a.Rule == b.Rule && a.Policy == b.Policy && string(a.Config) == string(b.Config)
}

// send replaces placeholders and references by secrets, sends the request to its upstream
// and the response, without secrets, to w. wroteBody: a policy wrote the body. It returns
// true if the response ended early.
func (q *request) send(w http.ResponseWriter, r *http.Request, wroteBody bool) (cut bool) {
	if err := q.substitute(r); err != nil {
		if _, ok := errors.AsType[*placeholder.RefusedError](err); ok {
			q.refuse(w, r, problem.PlaceholderNotAllowed, err.Error())
			return false
		}
		// Its body is incomplete.
		q.entry.Verdict, q.entry.Reason = audit.Error, "the client ended the request"
		return true
	}
	if err := q.secrets.Render(r, wroteBody); err != nil {
		q.refuse(w, r, problem.SecretNotAllowed, err.Error())
		return false
	}
	scrubber := q.Scrubber(q.to.host, q.secrets)
	result := q.carrier.settings.Load().Upstreams.requests.Do(w, r, intercept.Route{
		Pool: q.Name(), Private: q.decision.Private, SmallWindow: q.SmallWindow(), Dials: q.Usage.Dials, Windows: q.Usage.Windows,
		Flow: q.to.flow, RequestID: q.id,
	}, scrubber)
	q.complete(result)
	return result.Cut
}

// complete records the result of sending the request.
func (q *request) complete(result intercept.Result) {
	q.entry.Status, q.entry.BytesIn, q.entry.BytesOut = result.Status, result.BytesIn, result.BytesOut
	q.entry.Address = result.Address.Addr()
	q.used(q.exchanged.Used())
	if refused := q.exchanged.Refused(); refused != nil {
		q.entry.Verdict, q.entry.Reason = audit.Deny, refused.Error()
	} else if result.Err != nil {
		q.entry.Reason = result.Err.Error()
		q.entry.Verdict, q.entry.Address = verdictOf(result.Err, q.entry.Address)
	}
}

// refuse sends a refusal of the request and records it.
func (q *request) refuse(w http.ResponseWriter, r *http.Request, code problem.Code, reason string) {
	why := problem.New(code, reason).WithFlow(q.to.host, q.decision.Rule, q.to.flow).For(requestid.Or(q.id))
	q.denied(why.Status, reason)
	intercept.Refuse(w, r, why)
}

// denied records that the request was refused.
func (q *request) denied(status int, reason string) {
	q.entry.Verdict, q.entry.Reason, q.entry.Status = audit.Deny, reason, status
}

// respond sends a rule's own response.
func (q *request) respond(w http.ResponseWriter, a *rule.Response) {
	q.entry.Verdict, q.entry.Status = audit.Respond, a.Status
	for name, value := range a.Headers {
		w.Header().Set(name, value)
	}
	w.WriteHeader(a.Status)
	n, _ := w.Write([]byte(a.Body)) // fails if the client has disconnected
	q.entry.BytesIn = int64(n)
}

// used records the names of secrets.
func (q *request) used(ids []secret.ID) {
	for _, id := range ids {
		if !slices.Contains(q.entry.Secrets, id.Name) {
			q.entry.Secrets = append(q.entry.Secrets, id.Name)
		}
	}
}

// finish writes the entry to the audit log.
func (q *request) finish() {
	q.entry.Duration = audit.Took(time.Since(q.began))
	q.used(q.secrets.Used())
	q.record(q.entry)
}
