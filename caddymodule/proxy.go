package caddymodule

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(Proxy{})
}

// Proxy is an HTTP proxy for programs outside of sandboxes that authenticate with a
// key of the API: the node's rules and their owner's decide on their requests. It
// responds to every request that reaches it. Like the API, it is not served over a TLS
// connection that was made for the name of a preview.
type Proxy struct{ ownHandler }

// CaddyModule returns the Caddy module information.
func (Proxy) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.doze_proxy", New: func() caddy.Module { return new(Proxy) }}
}

// ServeHTTP carries a tunnel or a request. Tunnels over HTTP/1.1 outlive the
// configuration that they came with; all end with the node.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	return p.app.serveOwn(w, r, func(l *live) http.Handler { return l.proxy })
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Proxy)(nil)
	_ caddyhttp.MiddlewareHandler = (*Proxy)(nil)
)
