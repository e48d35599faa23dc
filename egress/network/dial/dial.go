// Package dial connects to upstreams: it resolves, checks and dials. A name is resolved when a
// connection to it is made, every resolved address is checked, and one that passed is dialed: later
// lookups do not affect the connection. So a name whose addresses change (DNS rebinding), or that
// has both a public and a private address, leads to public addresses only.
package dial

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"time"
)

// timeout limits a whole dial. A client that waits longer has its own retries.
const timeout = 10 * time.Second

// Config configures a Dialer. The zero value is the node's own view of the network.
type Config struct {
	// Servers are queried for the addresses of names, or the system's servers if it is
	// empty; the node's hosts file comes first in both cases.
	Servers []netip.AddrPort
	// Overrides are the addresses of names, `git.corp`, and of all names below
	// one, `*.corp`; the longest match wins. The operator configures them, so they
	// may be of any kind, including the node's own, and are dialed directly even
	// if there is a Proxy.
	Overrides map[string]Override

	// Proxy is the URL of an HTTP proxy, such as http://user:password@proxy.corp:3128
	// or an https one, through which public addresses are reached by CONNECT.
	Proxy *url.URL
	// ProxyRoots are the root certificates for an https proxy; nil means the system's.
	ProxyRoots *x509.CertPool
}

// Override is the operator's address for a host.
type Override struct {
	Addrs []netip.Addr
	// Port is dialed whichever port is requested; 0 means the requested one.
	Port uint16
}

// Target is the destination of a connection.
type Target struct {
	Host    string     // clean, see rule.CleanHost; empty if Address is set
	Address netip.Addr // of a target without a name
	Port    uint16
	Private bool // a rule of the node allows the host a private address
	Listed  bool // a rule of the node lists the address
}

func (t Target) String() string {
	if t.Host != "" {
		return t.Host
	}
	return t.Address.String()
}

// Dialer dials targets. It is safe for concurrent use.
type Dialer struct {
	overrides overrides
	cache     cache
	own       own
	proxy     *proxy
	// connect uses net.Dialer; tests replace it.
	connect func(ctx context.Context, a netip.AddrPort, control control) (net.Conn, error)
}

// New returns a Dialer for a Config that Validate accepts.
func New(cfg Config) *Dialer {
	d := &Dialer{overrides: cfg.Overrides, connect: connect}
	d.cache.resolve = net.DefaultResolver.LookupNetIP
	if len(cfg.Servers) > 0 {
		d.cache.resolve = newResolver(cfg.Servers).LookupNetIP
	}
	d.own.list = interfaceAddresses
	if cfg.Proxy != nil {
		d.proxy = newProxy(cfg.Proxy, cfg.ProxyRoots)
	}
	return d
}

// Dial connects to a target. The connection's RemoteAddr is the target's address, even
// through a proxy. Without a proxy, the connection is a *net.TCPConn; with one, it has
// CloseWrite.
//
// Errors: *RefusedError if no address of the target may be reached and so none was dialed;
// otherwise the error of resolving or connecting.
func (d *Dialer) Dial(ctx context.Context, t Target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if t.Port == 0 {
		return nil, fmt.Errorf("connect to %s: invalid port 0; use 1 to 65535", t)
	}
	conn, err := d.dial(ctx, t)
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		return nil, refused
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s, port %d: %w", t, t.Port, err)
	}
	return conn, nil
}

func (d *Dialer) dial(ctx context.Context, t Target) (net.Conn, error) {
	r, err := d.route(ctx, t, t.grant())
	if err != nil {
		return nil, err
	}
	if d.proxy != nil && r.grant != grantNamed && isPublic(r.addrs) {
		return d.tunnelToFirst(ctx, r)
	}
	return d.race(ctx, r)
}

// route is a target with the addresses that may be dialed, at least one.
type route struct {
	Target
	grant grant
	addrs []netip.Addr
}

// route looks up the addresses of a target and checks them.
func (d *Dialer) route(ctx context.Context, t Target, g grant) (route, error) {
	found := []netip.Addr{t.Address}
	if named, ok := d.overrides.find(t.Host); ok {
		found, g = named.Addrs, grantNamed
		t.Port = cmp.Or(named.Port, t.Port)
	} else if t.Host != "" {
		var err error
		if found, err = d.cache.lookup(ctx, t.Host); err != nil {
			return route{}, err
		}
	}
	checked, err := d.check(t, g, found)
	return route{t, g, checked}, err
}
