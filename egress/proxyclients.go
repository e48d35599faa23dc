package egress

import (
	"context"
	"net/http"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/runtime/sandbox"
)

// proxyClient returns the client of an owner's programs outside of sandboxes, and makes it
// if it does not exist. The node's rules and the owner's apply to it.
func (e *Egress) proxyClient(ctx context.Context, owner string) (*flow.ProxyClient, error) {
	e.mu.RLock()
	p := e.proxyClients[owner]
	e.mu.RUnlock()
	if p != nil {
		return p, nil
	}
	if err := e.changeMu.LockContext(ctx); err != nil { // so that no change of rules misses it
		return nil, err
	}
	defer e.changeMu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, sandbox.ErrClosed
	}
	if p := e.proxyClients[owner]; p != nil {
		return p, nil
	}
	p = e.carrier.NewProxyClient(owner)
	e.build(p.Client)
	e.proxyClients[owner] = p
	return p, nil
}

// Connect implements proxy.Egress.
func (e *Egress) Connect(ctx context.Context, owner string, to proxy.Target, t *proxy.Tunnel) {
	p, err := e.proxyClient(ctx, owner)
	if err != nil {
		t.Refuse(flow.ErrClosing)
		return
	}
	p.Connect(ctx, to, t)
}

// Request implements proxy.Egress.
func (e *Egress) Request(w http.ResponseWriter, r *http.Request, owner string, to proxy.Target) {
	p, err := e.proxyClient(r.Context(), owner)
	if err != nil {
		intercept.Refuse(w, r, flow.ErrClosing)
		return
	}
	p.Request(w, r, to)
}

var _ proxy.Egress = (*Egress)(nil)
