package caddymodule

import (
	"fmt"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/doze-run/doze/caddymodule/inuse"
)

// checkListeners returns an error if another process listens where this
// configuration's servers will: Caddy would share the address without an error.
func (a *App) checkListeners() error {
	app, err := a.ctx.AppIfConfigured("http")
	if err != nil {
		return nil // no HTTP app
	}
	for name, server := range app.(*caddyhttp.App).Servers {
		for i, listen := range server.Listen {
			address, err := caddy.ParseNetworkAddress(listen)
			if err != nil {
				return fmt.Errorf("server %s: %w", name, err)
			}
			protocols := server.Protocols
			if server.ListenProtocols != nil && server.ListenProtocols[i] != nil {
				protocols = server.ListenProtocols[i]
			}
			http3 := len(server.TLSConnPolicies) > 0 && slices.Contains(protocols, "h3")
			if err := inuse.CheckAll(address, http3); err != nil {
				return err
			}
		}
	}
	return nil
}
