package flow

import (
	"crypto/x509"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
)

// Upstreams connects to upstreams under some settings.
type Upstreams struct {
	dialer   *dial.Dialer // of connections that pass through
	requests *intercept.Upstream
}

// NewUpstreams returns Upstreams with a valid configuration. roots verify the certificates
// of upstreams; nil: the system's.
func NewUpstreams(cfg dial.Config, roots *x509.CertPool) *Upstreams {
	d := dial.New(cfg)
	return &Upstreams{d, intercept.NewUpstream(intercept.UpstreamConfig{Dial: d.Dial, RootCAs: roots})}
}

// Close closes idle connections. Those in use end with their requests.
func (u *Upstreams) Close() { u.requests.Close() }
