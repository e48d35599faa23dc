package caddymodule

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(API{})
}

// API serves the node's HTTP API under /api/v1, and the page of terminals under /terminal.
// It is not served on a host of previews, whatever the routes of Caddy are: code from a
// sandbox must not share an origin with the API. Nor is it served over a TLS connection
// that was made for the name of a preview.
type API struct{ ownHandler }

// CaddyModule returns the Caddy module information.
func (API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.doze_api", New: func() caddy.Module { return new(API) }}
}

// ownHandler is a handler of the node's own requests.
type ownHandler struct{ app *App }

// Provision finds the doze app.
func (h *ownHandler) Provision(ctx caddy.Context) (err error) {
	h.app, err = dozeApp(ctx)
	return err
}

func dozeApp(ctx caddy.Context) (*App, error) {
	app, err := ctx.App("doze")
	if err != nil {
		return nil, err
	}
	return app.(*App), nil
}

// ServeHTTP responds with a result or a problem document.
func (h *API) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if h.app.previews.Contains(r.Host) {
		return next.ServeHTTP(w, r)
	}
	return h.app.serveOwn(w, r, func(l *live) http.Handler { return l.api })
}

// Interface guards
var (
	_ caddy.Provisioner           = (*API)(nil)
	_ caddyhttp.MiddlewareHandler = (*API)(nil)
)
