package policy

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/doze-run/doze/problem"
)

// Chain runs policies over one request, in order, and over its response, in reverse:
//
//	c := NewChain(w, r, info)
//	defer c.Close()
//	stopped := false
//	for _, step := range steps {
//		if stopped = c.Request(step); stopped {
//			break
//		}
//	}
//	if !stopped {
//		failed = send(c.Writer(), r)
//	}
//	denial, cut := c.Response(failed)
//
// The caller retains the policies until Close. A Chain is not safe for concurrent use.
type Chain struct {
	Info
	// RespondedBy is the policy that responded instead of the upstream, with Status.
	RespondedBy string
	Status      int
	// WroteBody reports whether a policy wrote the request's body.
	WroteBody bool
	// Notes for the audit log, in the order in which policies left them.
	Notes []string

	r       *http.Request
	inner   http.ResponseWriter // for the next step or the upstream
	running *instance           // nil unless a policy runs
	waiting []waiting           // for the response
	last    string              // the policy that saw the request last
	awaited bool                // last is the latest entry of waiting
	wrote   []byte              // the body that last wrote, or nil
	denial  *Denial
	held    int64 // bytes acquired from Bodies

	sandboxJSON []byte
}

// waiting is an instance whose handle_response has not run.
type waiting struct {
	instance *instance
	context  uint32
	outer    http.ResponseWriter // of the steps before
}

// NewChain returns a chain for a request, which policies change in place, and for the
// response to w.
func NewChain(w http.ResponseWriter, r *http.Request, i Info) *Chain {
	return &Chain{Info: i, r: r, inner: w}
}

// Request runs a policy over the request as the policies before have changed it. It
// returns true if the request must not be sent: the policy denied it, failed, or
// responded itself.
func (c *Chain) Request(s Step) (stop bool) {
	p := s.Policy
	i, err := p.acquire(c.r.Context(), s.Sharer)
	if err != nil {
		return c.deny(unavailable(p, err))
	}
	c.running, c.last, c.awaited, c.wrote = i, p.name, false, nil
	call := &i.call
	call.begin(i, p.host.config.TimeLimit)
	call.chain, call.writer, call.r, call.namespace, call.secrets = c, c.inner, c.r, s.Namespace, s.Secrets
	pass, context, err := i.handleRequest()
	if err == nil && call.denied == nil && pass {
		err = call.sendRequest()
	}
	switch {
	case err != nil:
		return c.fail(i.denial(err))
	case call.denied != nil:
		c.deny(call.denied)
		c.park()
		return true
	case !pass:
		own := call.own
		c.RespondedBy, c.Status = p.name, own.statusCode()
		c.park()
		own.send(c.inner, c.r)
		return true
	}
	c.wrote = call.body.written
	maps.Copy(c.inner.Header(), call.own.header)
	if call.own.written { // and the request is sent: the upstream's response is appended
		call.features |= bufferResponse
	} else if p.module.ignoresResponse || call.features&requestOnly != 0 && call.features&bufferResponse == 0 {
		c.park()
		return false
	}
	return c.await(context)
}

// await holds the running instance for the response.
func (c *Chain) await(context uint32) (stop bool) {
	i := c.running
	call, outer := &i.call, c.inner
	if call.features&bufferResponse != 0 {
		if upgrades(c.r) {
			return c.fail(&Denial{Policy: i.policy.name, Code: problem.PolicyFailed,
				Reason: "the policy buffers responses; a connection that changes its protocol has none"})
		}
		call.buffer = &recorder{live: outer.Header().Clone(), limit: i.policy.host.config.ResponseLimit}
		call.buffer.body, call.buffer.status = call.own.body, call.own.status
		c.inner = call.buffer
	}
	call.r = Snapshot(c.r)
	c.running, c.awaited, c.waiting = nil, true, append(c.waiting, waiting{i, context, outer})
	return false
}

// Wrote returns the body that the last policy wrote, or nil if it did not change it.
func (c *Chain) Wrote() []byte { return c.wrote }

// Reject denies the request because of a change that the last policy made. Like a failed
// policy, that policy does not see the response.
func (c *Chain) Reject(reason string) {
	c.deny(&Denial{Policy: c.last, Reason: "the policy was stopped: " + reason, Detail: reason, Code: problem.PolicyFailed})
	if c.awaited {
		n := len(c.waiting) - 1
		w := c.waiting[n]
		c.waiting, c.inner = c.waiting[:n], w.outer
		w.instance.policy.drop(w.instance)
	}
}

// Writer returns the writer for the response to the request.
func (c *Chain) Writer() http.ResponseWriter { return c.inner }

// Response runs the policies over the response, which was written to Writer unless
// Request returned true. failed means that only a part of it was written. The caller
// sends a refusal for denial, if it is not nil, or aborts the response if cut is true.
func (c *Chain) Response(failed bool) (denial *Denial, cut bool) {
	for len(c.waiting) > 0 {
		n := len(c.waiting) - 1
		w := c.waiting[n]
		c.waiting, c.running = c.waiting[:n], w.instance
		failed, cut = c.response(w, failed, cut)
	}
	return c.denial, cut || failed
}

// response runs one policy over the response.
func (c *Chain) response(w waiting, failed, cut bool) (stillFailed, stillCut bool) {
	i := w.instance
	buffer := i.call.buffer
	if buffer != nil {
		buffer.finish()
		if buffer.over && c.denial == nil { // the upstream's response could not be written
			failed = false
			c.denial = &Denial{Policy: i.policy.name, Code: problem.PolicyResponseTooLarge,
				Reason: fmt.Sprintf("the policy buffers responses, and this one has more than %d bytes", buffer.limit)}
		}
	}
	trap := i.handleResponse(w.context, c.denial != nil || failed)
	denied := i.call.denied
	if trap != nil {
		denied = i.denial(trap)
		c.running = nil
		i.policy.drop(i)
	} else {
		defer c.park()
	}
	switch {
	case failed:
		return true, cut
	case c.denial == nil && denied == nil:
		if buffer != nil {
			clear(w.outer.Header())
			buffer.send(w.outer, c.r)
		}
		return false, cut
	case c.denial == nil: // the upstream's response must not be used
		c.denial, cut = denied, true
	}
	return false, cut && buffer == nil // a buffered response was not sent
}

// hold acquires n bytes for a body. At the limit it ends the guest.
func (c *Chain) hold(n int) {
	if c.Bodies == nil {
		return
	}
	if c.Bodies.TryAcquire(int64(n)) != nil {
		failWith(problem.EgressLimitExceeded, "a limit was reached: bytes of bodies that policies read or write")
	}
	c.held += int64(n)
}

// release releases n of the bytes that are held.
func (c *Chain) release(n int64) {
	if c.Bodies != nil {
		c.Bodies.Release(n)
		c.held -= n
	}
}

// Close releases the instances of a request that ended early, and the memory of bodies.
func (c *Chain) Close() {
	c.release(c.held)
	if i := c.running; i != nil {
		c.running = nil
		i.policy.drop(i)
	}
	for _, w := range c.waiting {
		w.instance.policy.drop(w.instance)
	}
	c.waiting = nil
}

func (c *Chain) deny(d *Denial) (stop bool) {
	c.denial = d
	return true
}

// fail denies the request and ends the running instance.
func (c *Chain) fail(d *Denial) (stop bool) {
	i := c.running
	c.running = nil
	i.policy.drop(i)
	return c.deny(d)
}

// park returns the running instance to its policy.
func (c *Chain) park() {
	i := c.running
	c.running = nil
	i.policy.put(i)
}

// Snapshot returns a copy of a request without its body. A policy continues to see the
// copy while later policies, and secrets, change the original.
func Snapshot(r *http.Request) *http.Request {
	s, u := *r, *r.URL
	s.URL, s.Header, s.Trailer, s.Body = &u, r.Header.Clone(), r.Trailer.Clone(), nil
	return &s
}

// unavailable returns the denial for an error of acquire.
func unavailable(p *Policy, err error) *Denial {
	d := &Denial{Policy: p.name, Code: problem.PolicyUnavailable}
	var start *StartError
	switch {
	case errors.Is(err, errBusy):
		d.Reason = "busy: all instances of the policy are in use"
	case errors.As(err, &start):
		d.Reason, d.Detail = "the policy does not start: "+start.Reason, start.Detail
	default:
		d.Reason = "the request ended before the policy began"
	}
	return d
}

// upgrades reports whether the request asks for another protocol.
func upgrades(r *http.Request) bool {
	return r.Method == http.MethodConnect || httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade") &&
		strings.TrimSpace(r.Header.Get("Upgrade")) != ""
}
