package wakeproxy

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"syscall"

	"github.com/doze-run/doze/runtime/sandbox"
)

// hostChecks stores which servers refuse the preview's own host, as dev servers do
// against DNS rebinding, and get localhost as their host instead.
type hostChecks struct {
	mu    sync.Mutex
	known map[gateKey]hostCheck
}

// hostCheck is the knowledge about one port of one run of a container.
type hostCheck struct {
	decided      bool // a request has been accepted or refused under one of the names
	rewrite      bool
	inconclusive int  // requests that were refused under either name
	warned       bool // that the server refuses what its own pages send
	probed       bool // for HTTP/2 without TLS
	h2c          bool // the result
}

const (
	// Responses such as 403 have other reasons too. A server that sent so many of
	// them under both names does not mean the name.
	maxInconclusive = 16
	// About 100 bytes each. Beyond it all are deleted, which costs each server one
	// more request.
	maxHostChecks = 16384
)

// get returns the check of a server, the zero value if it is unknown.
func (c *hostChecks) get(key gateKey) hostCheck {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[key]
}

// note stores the result of a request. first reports whether the server has just
// been found to refuse the preview's host.
func (c *hostChecks) note(key gateKey, accepted, rewrite bool) (first bool) {
	before := c.update(key, func(check hostCheck) hostCheck {
		check.decided = true
		check.rewrite = check.rewrite || accepted && rewrite
		if !accepted {
			check.inconclusive++
		}
		return check
	})
	return accepted && rewrite && !before.rewrite
}

// update changes the check of a server and returns the one before.
func (c *hostChecks) update(key gateKey, change func(hostCheck) hostCheck) (before hostCheck) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, known := c.known[key]
	if !known && len(c.known) >= maxHostChecks {
		clear(c.known)
	}
	c.known[key] = change(before)
	return before
}

// roundTripAuto sends a request with the preview's own host, unless the server is
// known to refuse it, and a second time with localhost as the host if it is refused.
// Later requests use the host of the first accepted one.
func (x *exchange) roundTripAuto(req *http.Request, bodyless bool) (*http.Response, error) {
	key := x.gateKey()
	check := x.proxy.hosts.get(key)
	twice := bodyless && repeatable(req) && !check.rewrite && check.inconclusive < maxInconclusive
	// Hardly any server refuses localhost, so a request that cannot be sent twice
	// uses it until the preview's own host is known to be accepted.
	x.names.rewrite = check.rewrite || !check.decided && !twice
	res, err := x.attempt(req, bodyless)
	if !twice || req.Context().Err() != nil {
		return res, err
	}
	if !refusesHost(req, res, err) {
		if err == nil {
			x.proxy.hosts.note(key, true, false)
		}
		return res, err
	}
	first := x.names
	x.names.rewrite = true
	again, errAgain := x.attempt(req, bodyless)
	if errAgain != nil && req.Context().Err() != nil { // the visitor has left
		x.names = first
		return res, err
	}
	accepted := errAgain == nil && again.StatusCode < 500 && !refusesHost(req, again, nil)
	if x.proxy.hosts.note(key, accepted, true) {
		x.proxy.log.Info("server refuses the preview's host; it is addressed as localhost", "sandbox", x.id, "port", x.port.Port)
	}
	if accepted {
		if err == nil {
			res.Body.Close()
		}
		return again, nil
	}
	if errAgain == nil {
		again.Body.Close()
	}
	x.names = first
	return res, err
}

// repeatable: safe methods may be sent twice (RFC 9110, section 9.2.1).
func repeatable(req *http.Request) bool {
	return req.Method == http.MethodGet || req.Method == http.MethodHead || req.Method == http.MethodOptions
}

// refusesHost reports whether a response may be about the request's host or
// origin: 403 of Vite, Rails and webpack, 400 of Django, 421 of the standard. Some
// servers just end a WebSocket's connection, or write an invalid response.
func refusesHost(req *http.Request, res *http.Response, err error) bool {
	if err != nil {
		lost := isLost(err) && !errors.Is(err, syscall.ECONNREFUSED) // refused: no server is up
		return req.Header.Get("Upgrade") != "" && (lost || strings.Contains(err.Error(), "malformed HTTP"))
	}
	switch res.StatusCode {
	case http.StatusBadRequest, http.StatusForbidden, http.StatusMisdirectedRequest:
		return true
	}
	return false
}

// sendUnderName sends a request under the name that the port's mode chooses, which may take two attempts.
func (x *exchange) sendUnderName(req *http.Request, bodyless bool) (*http.Response, error) {
	if x.port.Host == sandbox.HostRewrite || x.port.Host == sandbox.HostPreserve {
		x.names.rewrite = x.port.Host == sandbox.HostRewrite
		return x.attempt(req, bodyless)
	}
	return x.roundTripAuto(req, bodyless)
}

// warnOfOrigin logs, once for each run of the container, that a server refuses a
// request of its own page: a server unaware of the TLS in front of it takes the page
// for another site's. The request is not sent again, for it may have had an effect.
func (x *exchange) warnOfOrigin(req *http.Request, res *http.Response) {
	if res.StatusCode != http.StatusForbidden || x.names.rewrite || repeatable(req) || req.Header.Get("Origin") != x.names.origin {
		return
	}
	before := x.proxy.hosts.update(x.gateKey(), func(check hostCheck) hostCheck {
		check.warned = true
		return check
	})
	if !before.warned {
		x.proxy.log.Warn("server refuses a request from its own page; if it compares Origin with its own scheme, expose the port with host rewrite",
			"sandbox", x.id, "port", x.port.Port, "method", req.Method)
	}
}
