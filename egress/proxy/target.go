package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/doze-run/doze/egress/rule"
)

// target returns the destination of a request.
func target(r *http.Request) (Target, error) {
	switch {
	case r.Method == http.MethodConnect:
		return targetOfConnect(r)
	case r.URL.Host == "" && r.ProtoMajor >= 2:
		return Target{}, errors.New("over HTTP/2 this proxy takes CONNECT only: http and https cannot be distinguished there")
	case r.URL.Host == "" || r.URL.Scheme == "":
		return Target{}, errors.New("this is a proxy: send it CONNECT HOST:PORT, or a request with an absolute URI")
	}
	return targetOfURI(r)
}

func targetOfConnect(r *http.Request) (Target, error) {
	switch {
	case len(r.Header[":protocol"]) > 0: // RFC 8441
		return Target{}, errors.New("a CONNECT with a :protocol is not supported")
	case r.ProtoMajor < 2 && r.ContentLength != 0:
		return Target{}, errors.New("a CONNECT has no body")
	}
	host, port, err := net.SplitHostPort(r.Host)
	if err != nil {
		return Target{}, fmt.Errorf("CONNECT %.80q names no host and port: write it like example.com:443", r.Host)
	}
	return newTarget(host, port)
}

// targetOfURI returns the destination of a request with an absolute URI, whose host
// net/http has stored in r.Host as well.
func targetOfURI(r *http.Request) (Target, error) {
	port := r.URL.Port()
	switch {
	case r.URL.Scheme != "http" && r.URL.Scheme != "https":
		return Target{}, fmt.Errorf("the scheme %.80q is neither http nor https", r.URL.Scheme)
	case port != "":
	case r.URL.Scheme == "https":
		port = "443"
	default:
		port = "80"
	}
	to, err := newTarget(r.URL.Hostname(), port)
	if err == nil && to.Host == "" {
		err = fmt.Errorf("%s is an address; use a host name, or CONNECT", to.Address)
	}
	to.TLS = r.URL.Scheme == "https"
	return to, err
}

func newTarget(host, port string) (to Target, err error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return Target{}, fmt.Errorf("%.80q is not a port; use 1 to 65535", port)
	}
	to.Port = uint16(n)
	if a, err := netip.ParseAddr(host); err == nil {
		if a.Zone() != "" {
			return Target{}, fmt.Errorf("%.80q has a zone, which only this node would understand", host)
		}
		to.Address = a.Unmap()
		return to, nil
	}
	if to.Host, err = rule.CleanHost(host); err != nil {
		return Target{}, fmt.Errorf("%.80q is neither the name of a host nor an address", host)
	}
	return to, nil
}
