package dial

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"
)

// proxy is an HTTP proxy that supports CONNECT (RFC 9110, section 9.3.6).
type proxy struct {
	Target             // the proxy's host and port
	tls    *tls.Config // nil for plain HTTP
	header string      // lines of each request, except Host
}

func newProxy(u *url.URL, roots *x509.CertPool) *proxy {
	p := &proxy{Target: Target{Port: 80}}
	if p.Address, _ = netip.ParseAddr(u.Hostname()); !p.Address.IsValid() {
		p.Host = u.Hostname()
	}
	if u.Scheme == "https" {
		p.Port = 443
		p.tls = &tls.Config{ServerName: u.Hostname(), RootCAs: roots, NextProtos: []string{"http/1.1"}}
	}
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
		p.Port = uint16(port)
	}
	if user := u.User; user != nil {
		password, _ := user.Password()
		credentials := base64.StdEncoding.EncodeToString([]byte(user.Username() + ":" + password))
		p.header = "Proxy-Authorization: Basic " + credentials + "\r\n"
	}
	return p
}

// maxProxyTries is how many addresses of a target are requested from the proxy,
// which may not reach one of the families.
const maxProxyTries = 3

// tunnelToFirst connects through the proxy to the first address that the proxy reaches.
func (d *Dialer) tunnelToFirst(ctx context.Context, r route) (conn net.Conn, err error) {
	var first error
	for _, a := range r.addrs[:min(len(r.addrs), maxProxyTries)] {
		if conn, err = d.tunnel(ctx, netip.AddrPortFrom(a, r.Port)); err == nil {
			return conn, nil
		}
		first = cmp.Or(first, err)
	}
	return nil, first
}

// tunnel connects to an address through the proxy.
func (d *Dialer) tunnel(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	// The operator configured the proxy, so its address may be of any kind.
	r, err := d.route(ctx, d.proxy.Target, grantNamed)
	var conn net.Conn
	if err == nil {
		conn, err = d.race(ctx, r)
	}
	if err != nil {
		return nil, fmt.Errorf("reach the upstream proxy: %w", err)
	}
	through := &tunnel{Conn: conn, remote: net.TCPAddrFromAddrPort(to)}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = through.open(ctx, d.proxy, to.String())
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return through, nil
}

// tunnel is a connection through the proxy.
type tunnel struct {
	net.Conn               // to the proxy, perhaps over TLS
	early    *bufio.Reader // holds bytes that arrived with the proxy's response
	remote   net.Addr
}

// maxProxyResponse is the maximum size in bytes of the head of the proxy's response.
const maxProxyResponse = 16 << 10

// open requests a tunnel to authority from the proxy.
func (c *tunnel) open(ctx context.Context, p *proxy, authority string) error {
	if p.tls != nil {
		secured := tls.Client(c.Conn, p.tls)
		if err := secured.HandshakeContext(ctx); err != nil {
			return fmt.Errorf("TLS with the upstream proxy: %w", err)
		}
		c.Conn = secured
	}
	if _, err := fmt.Fprintf(c.Conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", authority, authority, p.header); err != nil {
		return fmt.Errorf("send a request to the upstream proxy: %w", err)
	}
	c.early = bufio.NewReader(io.LimitReader(c.Conn, maxProxyResponse))
	response, err := http.ReadResponse(c.early, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return fmt.Errorf("read the upstream proxy's response: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the upstream proxy responded with %.100q", response.Status)
	}
	return nil
}

func (c *tunnel) Read(b []byte) (int, error) {
	if c.early.Buffered() > 0 {
		return c.early.Read(b)
	}
	return c.Conn.Read(b)
}

func (c *tunnel) RemoteAddr() net.Addr { return c.remote }

// CloseWrite closes the sending half, like the methods of TCP and TLS connections.
func (c *tunnel) CloseWrite() error {
	return c.Conn.(interface{ CloseWrite() error }).CloseWrite()
}
