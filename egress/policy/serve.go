package policy

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/doze-run/doze/problem"
)

// Serve runs steps around next: each sees the request that the one before it has
// made, and responses the other way round. The request is changed in place.
//
// A policy that denies, or fails, ends it with a Denial, which is also in x.Denied;
// then next was not called, or what it answered was kept back, and nothing was
// written to w: writing the refusal is the caller's. If the error is ErrCut, the
// response has begun and must not look whole: the caller panics with it.
// When next panics, policies are told, and the panic goes on.
//
// Steps hold on to their policies until Serve returns; the caller sees to it that
// they are retained when it is called.
func Serve(w http.ResponseWriter, r *http.Request, x *Exchange, steps []Step, next http.Handler) (*Denial, error) {
	for i, s := range steps {
		if !s.Policy.Retain() {
			for _, s := range steps[:i] {
				s.Policy.Release()
			}
			x.Denied = &Denial{Policy: s.Policy.name, Reason: "the policy was removed", Code: problem.PolicyUnavailable}
			return x.Denied, nil
		}
	}
	defer func() {
		for _, s := range steps {
			s.Policy.Release()
		}
	}()
	d, err := serve(w, r, x, steps, next)
	x.Denied = d
	return d, err
}

func serve(w http.ResponseWriter, r *http.Request, x *Exchange, steps []Step, next http.Handler) (*Denial, error) {
	if len(steps) == 0 {
		next.ServeHTTP(w, r)
		return nil, nil
	}
	p := steps[0].Policy
	i, err := p.acquire(r.Context(), steps[0].Sharer)
	if err != nil {
		return unavailable(p, err), nil
	}
	held := holder{i}
	defer held.drop() // unless it was put back

	c := &i.call
	c.begin(i, p.host.config.TimeLimit)
	c.exchange, c.writer, c.r = x, w, r
	c.namespace = steps[0].Namespace
	if s := steps[0].Secrets; s != nil {
		c.secrets = s
	}
	check, before := steps[0].Check, (*http.Request)(nil)
	if check != nil {
		before = asSent(r)
	}
	pass, context, err := i.handleRequest()
	if err == nil && c.denied == nil && pass {
		err = c.sendRequest()
		if err == nil && check != nil {
			err = c.checked(check(before, r, c.body.written))
		}
	}
	switch {
	case err != nil:
		return i.denial(err), nil
	case c.denied != nil:
		d := c.denied
		held.put()
		return d, nil
	case !pass:
		own := c.own
		x.Answered, x.Status = p.name, own.statusCode()
		held.put()
		own.send(w, r)
		return nil, nil
	}
	c.own.addTo(w.Header())
	if c.own.written { // and the request goes on: what comes back is appended
		c.features |= bufferResponse
	} else if p.module.deaf || c.features&requestOnly != 0 && c.features&bufferResponse == 0 {
		held.put()
		return serve(w, r, x, steps[1:], next)
	}
	return around(&held, context, w, r, x, steps[1:], next)
}

// checked is the guest's failure if a check refuses what it made.
func (c *call) checked(err error) error {
	if err == nil {
		return nil
	}
	return &failure{err.Error(), problem.PolicyFailed}
}

// around runs the rest, and then the guest's handle_response.
func around(held *holder, context uint32, w http.ResponseWriter, r *http.Request, x *Exchange, steps []Step, next http.Handler) (*Denial, error) {
	i := held.instance
	c := &i.call
	inner := w
	if c.features&bufferResponse != 0 {
		if upgrades(r) {
			return &Denial{Policy: i.policy.name, Code: problem.PolicyFailed,
				Reason: "the policy looks at whole responses, and a connection that changes its protocol has none"}, nil
		}
		c.buffer = &recorder{live: w.Header().Clone(), limit: i.policy.host.config.ResponseLimit}
		c.buffer.body, c.buffer.status = c.own.body, c.own.status
		inner = c.buffer
	}
	c.r = asSent(r)
	d, err, panicked := guarded(inner, r, x, steps, next)
	if c.buffer != nil {
		c.buffer.finish()
		if c.buffer.over && d == nil {
			// Who could not write on may have panicked because of that.
			panicked, d = nil, &Denial{Policy: i.policy.name, Code: problem.PolicyResponseTooLarge,
				Reason: fmt.Sprintf("the policy looks at whole responses, and this one has more than %d bytes", c.buffer.limit)}
		}
	}
	trap := i.handleResponse(context, d != nil || panicked != nil)
	own := c.denied
	if trap != nil {
		own = i.denial(trap)
	} else {
		defer held.put()
	}
	switch {
	case panicked != nil:
		panic(panicked)
	case d == nil && own == nil:
		if c.buffer != nil {
			clear(w.Header())
			c.buffer.send(w, r)
		}
		return nil, nil
	case d == nil: // what the upstream answered must not stand
		d, err = own, ErrCut
	}
	if c.buffer != nil {
		err = nil // nothing has left
	}
	return d, err
}

// asSent is what the guest goes on seeing of a request: those who come after change
// it, and the last of them puts secrets in.
func asSent(r *http.Request) *http.Request {
	s, u := *r, *r.URL
	s.URL, s.Header, s.Trailer, s.Body = &u, r.Header.Clone(), r.Trailer.Clone(), nil
	return &s
}

// guarded is serve, with its panic as a value.
func guarded(w http.ResponseWriter, r *http.Request, x *Exchange, steps []Step, next http.Handler) (d *Denial, err error, panicked any) {
	defer func() { panicked = recover() }()
	d, err = serve(w, r, x, steps, next)
	return d, err, nil
}

// holder puts an instance back, or drops it, once.
type holder struct{ instance *instance }

func (h *holder) put() {
	if i := h.instance; i != nil {
		h.instance = nil
		i.policy.put(i)
	}
}

func (h *holder) drop() {
	if i := h.instance; i != nil {
		h.instance = nil
		i.policy.drop(i)
	}
}

// unavailable is the denial when no instance could be had.
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

// upgrades says whether the request asks for another protocol.
func upgrades(r *http.Request) bool {
	return r.Method == http.MethodConnect || httpguts.HeaderValuesContainsToken(r.Header["Connection"], "upgrade") &&
		strings.TrimSpace(r.Header.Get("Upgrade")) != ""
}
