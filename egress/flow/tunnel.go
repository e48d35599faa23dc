package flow

import (
	"context"
	"net/http"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

// ProxyClient is an owner's programs outside of sandboxes, as a client of the proxy.
type ProxyClient struct {
	*Client
	connections *quota.Pool // and requests without a connection of their own
}

// NewProxyClient returns the client of an owner, without a table.
func (c *Carrier) NewProxyClient(owner string) *ProxyClient {
	return &ProxyClient{Client: c.NewClient("", owner), connections: c.Connections.Child(0)}
}

// ErrClosing refuses connections and requests while the node closes.
var ErrClosing = problem.New(problem.NodeUnavailable, "the node is shutting down")

// begin counts a connection or request until end is called, or returns the reason for
// refusing it. within is ctx, and ends with the Carrier, too.
func (p *ProxyClient) begin(ctx context.Context) (within context.Context, end func(), refused *problem.Problem) {
	c := p.carrier
	p.connections.SetLimit(int64(c.settings.Load().MaxClientConnections))
	if err := p.connections.TryAcquire(1); err != nil {
		reason := limitReason(err, "connections of the owner's clients of the proxy", "connections of the node")
		flow := c.newFlow()
		p.record(audit.Entry{Kind: audit.Connection, Flow: flow, Verdict: audit.Deny, Reason: reason})
		return nil, nil, problem.New(problem.EgressLimitExceeded, reason).WithFlow("", "", flow)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		p.connections.Release(1)
		return nil, nil, ErrClosing
	}
	c.sessions.Add(1)
	within, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.ctx, cancel)
	return within, func() {
		stop()
		cancel()
		p.connections.Release(1)
		c.sessions.Done()
	}, nil
}

// Connect decides on a connection and carries it. It implements proxy.Egress for one
// owner.
func (p *ProxyClient) Connect(ctx context.Context, to proxy.Target, t *proxy.Tunnel) {
	ctx, end, refused := p.begin(ctx)
	if refused != nil {
		t.Refuse(refused)
		return
	}
	defer end()
	d := destination{host: to.Host, addr: to.Address, port: to.Port, flow: p.carrier.newFlow()}
	p.connect(ctx, d, tunnel{t, ctx})
}

// Request responds to a request. It implements proxy.Egress for one owner.
func (p *ProxyClient) Request(w http.ResponseWriter, r *http.Request, to proxy.Target) {
	ctx, end, refused := p.begin(r.Context())
	if refused != nil {
		intercept.Refuse(w, r, refused)
		return
	}
	defer end()
	defer context.AfterFunc(ctx, func() { cut(w) })()
	d := destination{host: to.Host, port: to.Port, tls: to.TLS, flow: p.carrier.newFlow()}
	p.carrier.server.ServeRequest(w, r.WithContext(ctx), p.interception(d, func(w http.ResponseWriter, r *http.Request) { p.serve(w, r, d, "") }))
}

// cut ends blocked reads from a client and writes to it.
func cut(w http.ResponseWriter) {
	client := http.NewResponseController(w)
	// A server without deadlines ends them with the client's connection.
	_ = client.SetReadDeadline(time.Now())
	_ = client.SetWriteDeadline(time.Now())
}

// tunnel is a CONNECT request without a response yet. It implements pending.
type tunnel struct {
	*proxy.Tunnel
	ctx context.Context
}

// Accept returns a connection that ends with the tunnel's context.
func (t tunnel) Accept() (proxy.Conn, error) {
	conn, err := t.Tunnel.Accept()
	if err != nil {
		return nil, err
	}
	context.AfterFunc(t.ctx, conn.Abort)
	return conn, nil
}

func (tunnel) explains() bool { return true }
