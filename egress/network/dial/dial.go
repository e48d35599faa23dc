// Package dial connects to upstreams: it resolves, checks and dials. A name is resolved when a
// connection to it is made, every answer is checked, and one that passed is
// dialled: no answer that comes later counts. So a name whose answers change
// (DNS rebinding), or that has a public and a private address at once, leads to
// public addresses only.
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

// Config of a Dialer. The zero value is the node's own view of the network.
type Config struct {
	// Resolver is asked for the addresses of names, which end in a dot so that
	// no search list is tried. If it is nil, Servers are, or the system's if
	// there are none either; the node's hosts file comes first in both cases.
	Resolver Resolver
	Servers  []netip.AddrPort
	// Overrides are the addresses of names, `git.corp`, and of all names below
	// one, `*.corp`; the longest counts. They are the operator's word: they may
	// be of any kind, the node's own too, and are dialled directly even if there
	// is a Proxy.
	Overrides map[string]Override
	// Own returns the addresses of this node; its interfaces' if nil. One at
	// which it is reached through a translation elsewhere is not among those.
	Own func() ([]netip.Addr, error)

	// Proxy is an HTTP proxy, such as http://user:password@proxy.corp:3128 or an
	// https one, through which public addresses are reached by CONNECT.
	Proxy *url.URL
	// ProxyRoots are trusted for an https proxy; the system's if nil.
	ProxyRoots *x509.CertPool

	// Timeout of a dial in all: 10 seconds. A client that waits longer has its
	// own retries.
	Timeout time.Duration
}

// Override says where a host is.
type Override struct {
	Addrs []netip.Addr
	// Port that is dialled whatever port is asked for; 0 is the one asked for.
	Port uint16
}

// Resolver is what of net.Resolver is needed. Like that, it shares lookups of
// the same name.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Target is where a connection is to go.
type Target struct {
	Host    string     // clean, see rule.CleanHost; empty for Address
	Address netip.Addr // without a name
	Port    uint16
	Private bool // a rule of the node lets the host be at a private address
	Listed  bool // a rule of the node names the address
}

func (t Target) String() string {
	if t.Host != "" {
		return t.Host
	}
	return t.Address.String()
}

// Dialer dials. It is safe for concurrent use.
type Dialer struct {
	overrides overrides
	cache     cache
	own       own
	proxy     *proxy
	timeout   time.Duration
	// connect is net.Dialer's; tests have others.
	connect func(ctx context.Context, a netip.AddrPort, control control) (net.Conn, error)
}

// New returns a Dialer with a Config that Validate has nothing against.
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

// Dial connects to a target. The connection's RemoteAddr is the real address, behind
// a proxy too. Without a proxy it is a *net.TCPConn; with one it has CloseWrite.
//
// Errors: *RefusedError if no address of the target may be reached; otherwise
// what went wrong in resolving or connecting.
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

// find returns the addresses of a target that may be dialled; at least one.
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
