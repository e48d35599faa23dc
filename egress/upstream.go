package egress

import (
	"context"
	"crypto/x509"
	"errors"
	"net"
	"net/http"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/problem"
)

// upstreams are the ways to servers under some settings.
type upstreams struct {
	dialer    *dial.Dialer
	forwarder *intercept.Forwarder
}

func (e *Egress) newUpstreams(s Settings) (*upstreams, error) {
	roots, err := rootsWith(s.UpstreamCAs)
	if err != nil {
		return nil, err
	}
	u := &upstreams{dialer: dial.New(dial.Config{Servers: s.NameServers, Overrides: s.Resolve, Proxy: s.UpstreamProxy, ProxyRoots: roots})}
	u.forwarder = intercept.NewForwarder(intercept.ForwarderConfig{
		Attempt: attempt, Dial: u.dial, Pool: poolOf, Narrow: narrow, RootCAs: roots,
	})
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

// way is what decides which connections to a host a request may use: those that
// its sender made, for requests that may go to the same addresses.
type way struct {
	from    *sender
	private bool
}

type wayKey struct{}

// along returns the request as one that goes that way.
func (w way) along(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), wayKey{}, w))
}

func wayOf(ctx context.Context) way { return ctx.Value(wayKey{}).(way) }

func poolOf(ctx context.Context) string {
	w := wayOf(ctx)
	if w.private {
		return "private " + w.from.name() // which begins no name of a sender
	}
	return w.from.name()
}

func narrow(ctx context.Context) bool { return wayOf(ctx).from.narrow() }

func attempt(ctx context.Context) (done func(), err error) { return wayOf(ctx).from.attempt() }

// dial connects to the host of a request.
func (u *upstreams) dial(ctx context.Context, host string, port uint16) (net.Conn, error) {
	conn, err := u.dialer.Dial(ctx, dial.Target{Host: host, Port: port, Private: wayOf(ctx).private})
	var refused *dial.RefusedError
	if errors.As(err, &refused) {
		err = &intercept.RefusedError{Code: problem.EgressDenied, Reason: err.Error(), Err: err}
	}
	return conn, err
}

// retire closes the connections that are kept; those in use go on.
func (u *upstreams) retire() { u.forwarder.Close() }
