// Package dial connects to upstreams: it resolves, checks and dials. A name is resolved when a
// connection to it is made, every resolved address is checked, and one that passed is dialed: later
// lookups do not affect the connection. So a name whose addresses change (DNS rebinding), or that
// has both a public and a private address, leads to public addresses only.
package dial

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"time"
)

// Config configures a Dialer. The zero value is the node's own view of the network.
type Config struct {
	// Resolver looks up the addresses of names, which end in a dot so that no
	// search list applies. If it is nil, Servers are queried, or the system's
	// servers if Servers is empty; the node's hosts file comes first in both cases.
	Resolver Resolver
	Servers  []netip.AddrPort
	// Overrides are the addresses of names, `git.corp`, and of all names below
	// one, `*.corp`; the longest match wins. The operator configures them, so they
	// may be of any kind, including the node's own, and are dialed directly even
	// if there is a Proxy.
	Overrides map[string]Override
	// Own returns the addresses of this node; nil means its interfaces' addresses.
	// These do not include an address that is translated to the node's elsewhere (NAT).
	Own func() ([]netip.Addr, error)

	// Proxy is the URL of an HTTP proxy, such as http://user:password@proxy.corp:3128
	// or an https one, through which public addresses are reached by CONNECT.
	Proxy *url.URL
	// ProxyRoots are the root certificates for an https proxy; nil means the system's.
	ProxyRoots *x509.CertPool

	// Timeout limits a whole dial; 0 means 10 seconds. A client that waits longer
	// has its own retries.
	Timeout time.Duration
}

// Override is the operator's address for a host.
type Override struct {
	Addrs []netip.Addr
	// Port is dialed whichever port is requested; 0 means the requested one.
	Port uint16
}

// Resolver is the subset of net.Resolver that a Dialer needs. Like net.Resolver,
// it shares concurrent lookups of the same name.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
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
	timeout   time.Duration
	// connect uses net.Dialer; tests replace it.
	connect func(ctx context.Context, a netip.AddrPort, control control) (net.Conn, error)
}

// New returns a Dialer for a Config that Validate accepts.
func New(cfg Config) *Dialer {
	d := &Dialer{overrides: cfg.Overrides, timeout: cfg.Timeout, connect: connect}
	if d.timeout == 0 {
		d.timeout = 10 * time.Second
	}
	d.cache.resolver = cfg.Resolver
	switch {
	case cfg.Resolver != nil:
	case len(cfg.Servers) > 0:
		d.cache.resolver = newResolver(cfg.Servers)
	default:
		d.cache.resolver = net.DefaultResolver
	}
	d.own.list = cfg.Own
	if cfg.Own == nil {
		d.own.list = interfaceAddresses
	}
	if cfg.Proxy != nil {
		d.proxy = newProxy(cfg.Proxy, cfg.ProxyRoots)
	}
	return d
}

// Dial connects to a target. The connection's RemoteAddr is the target's address, even
// through a proxy. Without a proxy, the connection is a *net.TCPConn; with one, it has
// CloseWrite.
//
// Errors: *RefusedError if no address of the target may be reached; otherwise the
// error of resolving or connecting.
func (d *Dialer) Dial(ctx context.Context, t Target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	if t.Port == 0 {
		return nil, fmt.Errorf("connecting to %s: there is no port 0", t)
	}
	conn, err := d.dial(ctx, t)
	if refused := (*RefusedError)(nil); errors.As(err, &refused) {
		return nil, refused
	}
	if err != nil {
		return nil, fmt.Errorf("connecting to %s, port %d: %w", t, t.Port, err)
	}
	return conn, nil
}

func (d *Dialer) dial(ctx context.Context, t Target) (net.Conn, error) {
	if named, ok := d.overrides.find(t.Host); ok {
		checked, err := d.check(t, grantNamed, named.Addrs)
		if err != nil {
			return nil, err
		}
		if named.Port != 0 {
			t.Port = named.Port
		}
		return d.race(ctx, route{t, grantNamed, checked})
	}
	checked, err := d.find(ctx, t)
	if err != nil {
		return nil, err
	}
	if d.proxy != nil && isPublic(checked) {
		return d.tunnelToFirst(ctx, t, checked)
	}
	return d.race(ctx, route{t, t.grant(), checked})
}

// find returns the addresses of a target that may be dialed, at least one.
func (d *Dialer) find(ctx context.Context, t Target) ([]netip.Addr, error) {
	found := []netip.Addr{t.Address}
	if t.Host != "" {
		var err error
		if found, err = d.cache.lookup(ctx, t.Host); err != nil {
			return nil, err
		}
	}
	return d.check(t, t.grant(), found)
}
