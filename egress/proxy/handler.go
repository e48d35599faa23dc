// Package proxy implements the HTTP proxy for programs outside of sandboxes. A key
// identifies their owner, whose rules decide on their requests as on a sandbox's.
//
// A Handler accepts the requests of proxy clients: CONNECT, over HTTP/1.1 and HTTP/2, and
// requests with an absolute URI (RFC 9110, section 9.3.6; RFC 9112, section 3.2.2). An
// Egress carries them.
package proxy

import (
	"context"
	"maps"
	"net/http"
	"net/netip"
	"strings"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/problem"
)

// maxHeader is the size limit of all fields of a request's header, as for requests within
// an intercepted connection.
const maxHeader = 64 << 10

// Target is the destination of a request or connection.
type Target struct {
	Host    string     // clean, see rule.CleanHost; empty if Address is set
	Address netip.Addr // for a destination without a name
	Port    uint16
	TLS     bool // of a request: the scheme is https
}

// Egress carries the connections and requests of owners' clients. Both methods return
// when the connection or request has ended, or soon after the end of ctx.
type Egress interface {
	// Connect decides on a connection: it refuses t, or accepts it and carries the
	// connection.
	Connect(ctx context.Context, owner string, to Target, t *Tunnel)
	// Request responds to a request. Its header does not have the fields for the proxy.
	Request(w http.ResponseWriter, r *http.Request, owner string, to Target)
}

// Handler serves only the requests of proxy clients. All fields are required.
type Handler struct {
	// Authenticate returns the owner of a key. Any client can cause calls, so it must
	// compare in constant time.
	Authenticate func(key string) (owner string, ok bool)
	Egress       Egress
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !confidential(r) {
		intercept.Refuse(w, r, problem.New(problem.ProxyTLSRequired, "from other machines, this proxy accepts API keys over TLS only; use https:// in the proxy's URL"))
		return
	}
	owner, ok := h.authenticate(r)
	if !ok {
		requireKey(w, r)
		return
	}
	if size(r.Header) > maxHeader {
		intercept.Refuse(w, r, problem.New(problem.HeaderTooLarge, "the header of the request has more than 64 KiB"))
		return
	}
	to, err := target(r)
	if err != nil {
		intercept.Refuse(w, r, problem.New(problem.TargetInvalid, err.Error()))
		return
	}
	// Policies and upstreams must not see the fields for this proxy, above all the key.
	maps.DeleteFunc(r.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "Proxy-") })
	clear(w.Header()) // the server's own fields do not describe the upstream
	if r.Method != http.MethodConnect {
		h.Egress.Request(w, r, owner, to)
		return
	}
	t := &Tunnel{w: w, r: r}
	defer t.closeConns()
	h.Egress.Connect(r.Context(), owner, to, t)
}

func size(h http.Header) (n int) {
	for name, values := range h {
		for _, v := range values {
			n += len(name) + len(v)
		}
	}
	return n
}
