package intercept

import (
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// Codes of refusals by a Server.
const (
	CodeMisdirected = "misdirected" // 421: a name that is not the connection's host
	CodeConnect     = "connect"     // 405: CONNECT inside of a connection
	CodeTarget      = "target"      // 400: a request target that is no path
	CodeUpgrade     = "upgrade"     // 403: to another protocol than WebSocket
	CodeFraming     = "framing"     // 400: a request whose end, or beginning, is not certain
)

// disagrees says with which status and why a request is refused: status 0 if it
// is what its connection is for. The name in TLS, the one in the request and
// the one that led here by DNS have to be the same: rules and secrets are about
// the last, servers go by the others.
func (d *Destination) disagrees(r *http.Request, serverName string) (int, Refusal) {
	refuse := func(status int, code, format string, args ...any) (int, Refusal) {
		return status, Refusal{Code: code, Reason: fmt.Sprintf(format, args...), Host: d.Host}
	}
	switch _, err := netip.ParseAddr(d.Host); {
	case !d.TLS, sameHost(serverName, d.Host):
	case serverName != "":
		return refuse(http.StatusMisdirectedRequest, CodeMisdirected, "the TLS handshake was for %.80q, the connection is to %s", serverName, d.Host)
	case err != nil: // clients send no name for an address
		return refuse(http.StatusMisdirectedRequest, CodeMisdirected, "the TLS handshake named no host (SNI), the connection is to %s", d.Host)
	}
	if r.Method == http.MethodConnect {
		return refuse(http.StatusMethodNotAllowed, CodeConnect, "this is %s itself and no proxy: CONNECT is not carried", d.Host)
	}
	if r.URL.Scheme != "" && r.URL.Scheme != d.scheme() {
		return refuse(http.StatusMisdirectedRequest, CodeMisdirected, "the request is for %.80q, the connection is to %s by %s", r.URL.Scheme+"://"+r.URL.Host, d.Host, d.scheme())
	}
	if host, port, ok := splitAuthority(r.Host); !ok || !sameHost(host, d.Host) || port != 0 && port != d.Port {
		return refuse(http.StatusMisdirectedRequest, CodeMisdirected, "the request is for %.80q, the connection is to %s port %d", r.Host, d.Host, d.Port)
	}
	if r.URL.Opaque != "" || r.URL.Path != "" && r.URL.Path[0] != '/' {
		return refuse(http.StatusBadRequest, CodeTarget, "the request target %.80q is no path", r.RequestURI)
	}
	if protocol := upgradeOf(r.Header); protocol != "" && !isWebSocket(protocol) && !strings.EqualFold(protocol, "h2c") {
		return refuse(http.StatusForbidden, CodeUpgrade, "an upgrade to %.80q: only WebSocket is carried", protocol)
	}
	return 0, Refusal{}
}

// complete makes the request's URL absolute, and its Host the host's name as rules and
// secrets have it: servers may take another spelling for another host.
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
	if r.URL.Path == "" { // https://host as a whole
		r.URL.Path = "/"
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

// sameHost compares what a client sent with a clean host.
func sameHost(sent, clean string) bool {
	return sent != "" && strings.EqualFold(strings.TrimSuffix(sent, "."), clean)
}

// splitAuthority splits host:port, of which the port may be missing: 0.
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

// upgradeOf returns the protocol that a header asks to change to, or has
// changed to; empty if to none.
func upgradeOf(h http.Header) string {
	if !httpguts.HeaderValuesContainsToken(h["Connection"], "Upgrade") {
		return ""
	}
	return strings.Join(h["Upgrade"], ", ")
}

func isWebSocket(protocol string) bool { return strings.EqualFold(protocol, "websocket") }
