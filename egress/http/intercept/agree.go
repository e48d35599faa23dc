package intercept

import (
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/doze-run/doze/problem"
)

// disagrees returns why a request is refused, or nil if it matches its connection.
// The server name of TLS, the host of the request and the name that was looked up
// must be the same: rules and secrets apply to the last, servers use the others.
func (d *Destination) disagrees(r *http.Request, serverName string) *problem.Problem {
	switch _, err := netip.ParseAddr(d.Host); {
	case !d.TLS, sameHost(serverName, d.Host):
	case serverName != "":
		return problem.Newf(problem.RequestMisdirected, "the TLS handshake was for %.80q, the connection is to %s", serverName, d.Host)
	case err != nil: // clients send no name for an address
		return problem.Newf(problem.RequestMisdirected, "the TLS handshake named no host (SNI), the connection is to %s", d.Host)
	}
	if r.Method == http.MethodConnect {
		return problem.Newf(problem.MethodNotAllowed, "the connection is to %s itself and not to a proxy; do not send CONNECT", d.Host)
	}
	if r.URL.Scheme != "" && r.URL.Scheme != d.scheme() {
		return problem.Newf(problem.RequestMisdirected, "the request is for %.80q, the connection is to %s by %s", r.URL.Scheme+"://"+r.URL.Host, d.Host, d.scheme())
	}
	if host, port, ok := splitAuthority(r.Host); !ok || !sameHost(host, d.Host) || port != 0 && port != d.Port {
		return problem.Newf(problem.RequestMisdirected, "the request is for %.80q, the connection is to %s port %d", r.Host, d.Host, d.Port)
	}
	if r.URL.Opaque != "" || r.URL.Path != "" && r.URL.Path[0] != '/' {
		return problem.Newf(problem.TargetInvalid, "the request target %.80q is not a path", r.RequestURI)
	}
	if protocol := upgradeOf(r.Header); protocol != "" && !isWebSocket(protocol) && !strings.EqualFold(protocol, "h2c") {
		return problem.Newf(problem.UpgradeNotAllowed, "upgrade to %.80q; only WebSocket is allowed", protocol)
	}
	return nil
}

// complete makes the request's URL absolute, and sets its Host to the canonical spelling
// that rules and secrets use: a server may treat another spelling as another host. A
// Content-Length becomes the length of the body: over HTTP/2, net/http reads a request with
// an invalid one, which would mislead rules and policies, as one without a body.
func (d *Destination) complete(r *http.Request) {
	r.URL.Scheme, r.URL.User = d.scheme(), nil
	r.URL.Host = d.Host
	if strings.Contains(d.Host, ":") {
		r.URL.Host = "[" + d.Host + "]"
	}
	if d.Port != defaultPort(r.URL.Scheme) {
		r.URL.Host += ":" + strconv.Itoa(int(d.Port))
	}
	r.Host = r.URL.Host
	if r.URL.Path == "" { // https://host without a path
		r.URL.Path = "/"
	}
	if _, ok := r.Header["Content-Length"]; ok {
		r.Header["Content-Length"] = []string{strconv.FormatInt(r.ContentLength, 10)}
	}
}

func (d *Destination) scheme() string {
	if d.TLS {
		return "https"
	}
	return "http"
}

func defaultPort(scheme string) uint16 {
	if scheme == "https" {
		return 443
	}
	return 80
}

// sameHost reports whether a host that a client sent is the clean host, apart from case
// and a final dot.
func sameHost(sent, clean string) bool {
	return sent != "" && strings.EqualFold(strings.TrimSuffix(sent, "."), clean)
}

// splitAuthority splits host:port. A missing port is 0.
func splitAuthority(authority string) (host string, port uint16, ok bool) {
	host = authority
	if i := strings.LastIndexByte(authority, ':'); i >= 0 && !strings.HasSuffix(authority, "]") {
		n, err := strconv.ParseUint(authority[i+1:], 10, 16)
		if err != nil || n == 0 {
			return "", 0, false
		}
		host, port = authority[:i], uint16(n)
	}
	if inner, bracketed := strings.CutPrefix(host, "["); bracketed {
		if host, ok = strings.CutSuffix(inner, "]"); !ok {
			return "", 0, false
		}
	}
	return host, port, host != ""
}

// upgradeOf returns the protocol that a header requests or confirms an upgrade to, or ""
// without an upgrade.
func upgradeOf(h http.Header) string {
	if !httpguts.HeaderValuesContainsToken(h["Connection"], "Upgrade") {
		return ""
	}
	return strings.Join(h["Upgrade"], ", ")
}

func isWebSocket(protocol string) bool { return strings.EqualFold(protocol, "websocket") }
