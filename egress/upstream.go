package egress

import (
	"crypto/x509"
	"errors"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
)

// upstreams are the ways to servers under some settings.
type upstreams struct {
	dialer   *dial.Dialer // of connections that pass through
	requests *intercept.Upstream
}

func (e *Egress) newUpstreams(s Settings) (*upstreams, error) {
	roots, err := rootsWith(s.UpstreamCAs)
	if err != nil {
		return nil, err
	}
	u := &upstreams{dialer: dial.New(dial.Config{Servers: s.NameServers, Overrides: s.Resolve, Proxy: s.UpstreamProxy, ProxyRoots: roots})}
	u.requests = intercept.NewUpstream(intercept.UpstreamConfig{Dial: u.dialer.Dial, RootCAs: roots})
	return u, nil
}

// errNoCertificate is of a file that was given as one with certificates.
var errNoCertificate = errors.New("egress: upstream_ca: there is no certificate in PEM in it")

// rootsWith are the system's and those in pem. Nil stands for the system's alone.
func rootsWith(pem []byte) (*x509.CertPool, error) {
	if len(pem) == 0 {
		return nil, nil
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errNoCertificate
	}
	return roots, nil
}

// retire closes idle connections; those in use go on.
func (u *upstreams) retire() { u.requests.Close() }
