package client

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

var dialer = net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}

// dialContext connects to names under localhost on the loopback, as browsers do
// (RFC 6761, section 6.3). Many systems' resolvers do not.
func dialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil || !isLocalhost(host) {
		return dialer.DialContext(ctx, network, address)
	}
	conn, err := dialer.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", port))
	if err != nil && ctx.Err() == nil {
		if conn6, err6 := dialer.DialContext(ctx, network, net.JoinHostPort("::1", port)); err6 == nil {
			return conn6, nil
		}
	}
	return conn, err
}

// proxy returns the proxy of the environment, and none for the loopback, because
// http.ProxyFromEnvironment does not know names under localhost.
func proxy(req *http.Request) (*url.URL, error) {
	if IsLoopback(req.URL.Hostname()) {
		return nil, nil
	}
	return http.ProxyFromEnvironment(req)
}

func isLocalhost(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	return host == "localhost" || strings.HasSuffix(host, ".localhost")
}

// IsLoopback reports whether the host of a URL is on the loopback.
func IsLoopback(host string) bool {
	ip := net.ParseIP(host)
	return isLocalhost(host) || ip != nil && ip.IsLoopback()
}
