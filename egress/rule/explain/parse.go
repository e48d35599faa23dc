package explain

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"

	"golang.org/x/net/http/httpguts"

	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/problem"
)

// defaultPorts of the schemes that can be explained; tcp has none.
var defaultPorts = map[string]uint16{"http": 80, "https": 443, "tcp": 0}

// Parse returns the request in the form that rules inspect. The URL is
// https://HOST/PATH or http://HOST/PATH, or tcp://HOST:PORT for traffic other than HTTP,
// which has no method and no header.
func Parse(method, address string, header http.Header) (rule.Request, error) {
	const want = "write https://HOST/PATH, http://HOST/PATH or tcp://HOST:PORT"
	u, err := url.Parse(address)
	if err != nil || u.Hostname() == "" || u.Opaque != "" || u.User != nil {
		return rule.Request{}, &problem.InvalidError{Field: "url", Reason: fmt.Sprintf("invalid URL %.80q", address), Want: want}
	}
	port, known := defaultPorts[u.Scheme]
	if !known {
		return rule.Request{}, &problem.InvalidError{Field: "url", Reason: fmt.Sprintf("unsupported scheme %.20q", u.Scheme), Want: want}
	}
	if text := u.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return rule.Request{}, &problem.InvalidError{Field: "url", Reason: fmt.Sprintf("invalid port %.20q", text), Want: "use 1 to 65535"}
		}
		port = uint16(n)
	}
	if port == 0 {
		return rule.Request{}, &problem.InvalidError{Field: "url", Reason: "no port", Want: want}
	}
	r := rule.Request{Port: port, HTTPS: u.Scheme == "https"}
	if a, err := netip.ParseAddr(u.Hostname()); err == nil && a.Zone() == "" {
		r.Address = a
	} else if r.Host, err = rule.CleanHost(u.Hostname()); err != nil {
		return rule.Request{}, &problem.InvalidError{Field: "url", Reason: err.Error(), Want: want}
	}
	if u.Scheme == "tcp" {
		return r, nil
	}
	if !httpguts.ValidHeaderFieldName(method) { // both are tokens, RFC 9110
		return rule.Request{}, &problem.InvalidError{Field: "method", Reason: fmt.Sprintf("invalid method %.20q", method), Want: "use a method in capitals, such as GET"}
	}
	r.Method, r.Path = method, u.EscapedPath()
	if r.Path == "" {
		r.Path = "/"
	}
	r.Header = make(http.Header, len(header))
	for name, values := range header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	return r, nil
}
