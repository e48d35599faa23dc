package caddymodule

import (
	"context"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddytls"

	"github.com/doze-run/doze/wakeproxy"
)

func init() {
	caddy.RegisterModule(Permission{})
}

// Permission allows certificates on demand for the hosts of existing previews
// only: the sandbox exists, the port is exposed, and the token is right. It
// wakes nothing.
//
// Certificate authorities bound how many certificates one domain gets, and
// publish the name of each: prefer a wildcard certificate where the DNS
// challenge is available.
type Permission struct {
	// Domains under which previews live. Default: the doze app's
	// preview_domain.
	Domains []string `json:"domains,omitempty"`

	app *App
}

// CaddyModule returns the Caddy module information.
func (Permission) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "tls.permission.doze", New: func() caddy.Module { return new(Permission) }}
}

// Provision finds the doze app.
func (p *Permission) Provision(ctx caddy.Context) (err error) {
	if p.app, err = dozeApp(ctx); err != nil {
		return err
	}
	p.Domains = p.app.domains(p.Domains)
	return nil
}

// Validate checks the domains.
func (p *Permission) Validate() error {
	for _, domain := range p.Domains {
		if err := wakeproxy.ValidateDomain(domain); err != nil {
			return fmt.Errorf("permission doze: %w", err)
		}
	}
	return nil
}

// CertificateAllowed implements caddytls.OnDemandPermission. It reads memory
// only. The name is not repeated in the error: it holds the token.
func (p *Permission) CertificateAllowed(_ context.Context, name string) error {
	node, err := p.app.node()
	if err != nil {
		return err
	}
	if !node.Previews.Exists(name, p.Domains) {
		return fmt.Errorf("%w: the preview does not exist", caddytls.ErrPermissionDenied)
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Permission)(nil)
	_ caddy.Validator             = (*Permission)(nil)
	_ caddytls.OnDemandPermission = (*Permission)(nil)
)
