package wakeproxy

import (
	"net/http"
	"strings"
)

// requestHeader returns the visitor's headers that the app gets. Authorization and
// cookies belong to the app and pass; the visitor's claims about proxies and about
// doze do not. The reverse proxy adds the true ones.
func requestHeader(header http.Header, trusted bool) http.Header {
	out := header.Clone()
	for key := range out {
		name := strings.ReplaceAll(lowerASCII(key), "_", "-")
		// A trusted proxy replaces these headers, but may let another spelling pass.
		if strings.HasPrefix(name, "doze-") || (!trusted || strings.Contains(key, "_")) && setByProxies(name) {
			delete(out, key)
		}
	}
	return out
}

// setByProxies reports whether applications take a request header, named in
// lower case with dashes, for a header of a proxy in front of them. CGI and
// WSGI do not distinguish X_Real_Ip from X-Real-Ip, hence the dashes.
func setByProxies(name string) bool {
	return strings.HasPrefix(name, "x-forwarded") || strings.HasPrefix(name, "x-original-") || proxyHeaders[name]
}

// proxyHeaders are the headers in which proxies, load balancers and content delivery
// networks pass a visitor's address, the address of the site or its scheme. "Proxy"
// becomes HTTP_PROXY in CGI programs (https://httpoxy.org).
var proxyHeaders = map[string]bool{
	"forwarded": true, "proxy": true, "remote-addr": true,
	"client-ip": true, "true-client-ip": true, "proxy-client-ip": true, "wl-proxy-client-ip": true, "fastly-client-ip": true, "fly-client-ip": true,
	"x-client-ip": true, "x-cluster-client-ip": true, "x-real-ip": true, "x-remote-addr": true, "x-remote-ip": true, "x-proxyuser-ip": true,
	"cf-connecting-ip": true, "cf-connecting-ipv6": true, "cf-pseudo-ipv4": true, "cf-ipcountry": true, "cf-visitor": true,
	"cloudfront-viewer-address": true, "cloudfront-forwarded-proto": true,
	"x-appengine-user-ip": true, "x-azure-clientip": true, "x-azure-socketip": true, "x-envoy-external-address": true, "x-vercel-forwarded-for": true,
	"x-host": true, "x-http-host-override": true, "x-rewrite-url": true, "x-scheme": true, "x-url-scheme": true, "front-end-https": true,
}

// cleanHeader rewrites a header that comes from the app, be it a 103's: only the node
// reports wakes, a redirect to the app's own address leads back to the preview, and a
// cookie belongs to this preview alone.
func cleanHeader(header http.Header, n names) {
	for key := range header {
		if strings.HasPrefix(key, "Doze-") {
			delete(header, key)
		}
	}
	n.toVisitor(header)
	cookies := header["Set-Cookie"]
	for i, cookie := range cookies {
		cookies[i] = withoutDomain(cookie)
	}
}

// withoutDomain drops the Domain attribute of a Set-Cookie. "localhost" would
// make the browser refuse the cookie; a parent domain would send it to the
// previews of all other sandboxes. Without the attribute it belongs to the
// preview's own host.
func withoutDomain(cookie string) string {
	if !strings.Contains(lowerASCII(cookie), "domain") {
		return cookie
	}
	parts := strings.Split(cookie, ";")
	kept := parts[:1]
	for _, part := range parts[1:] {
		name, _, _ := strings.Cut(part, "=")
		if !strings.EqualFold(strings.TrimSpace(name), "domain") {
			kept = append(kept, part)
		}
	}
	return strings.Join(kept, ";")
}
