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

// proxySession is a connection or a request of a proxy client.
type proxySession struct {
	*ProxyClient
	ctx  context.Context // ends with the Carrier, too
	end  context.CancelFunc
	stop func() bool
}

// ErrClosing refuses connections and requests while the node closes.
var ErrClosing = problem.New(problem.NodeUnavailable, "the node is shutting down")

// begin counts a connection or request until its end, or returns the reason for refusing
// it.
func (p *ProxyClient) begin(ctx context.Context) (*proxySession, *problem.Problem) {
	c := p.carrier
	p.connections.SetLimit(int64(c.settings.Load().MaxClientConnections))
	if err := p.connections.TryAcquire(1); err != nil {
		reason := limitReason(err, "connections of the owner's clients of the proxy", "connections of the node")
		flow := c.newFlow()
		p.record(audit.Entry{Kind: audit.Connection, Flow: flow, Verdict: audit.Deny, Reason: reason})
		return nil, problem.New(problem.EgressLimitExceeded, reason).WithFlow("", "", flow)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		p.connections.Release(1)
		return nil, ErrClosing
	}
	c.sessions.Add(1)
	s := &proxySession{ProxyClient: p}
	s.ctx, s.end = context.WithCancel(ctx)
	s.stop = context.AfterFunc(c.ctx, s.end)
	return s, nil
}

func (s *proxySession) close() {
	s.stop()
	s.end()
	s.connections.Release(1)
	s.carrier.sessions.Done()
}

// Connect decides on a connection and carries it. It implements proxy.Egress for one
// owner.
func (p *ProxyClient) Connect(ctx context.Context, to proxy.Target, t *proxy.Tunnel) {
	s, refused := p.begin(ctx)
	if refused != nil {
		t.Refuse(refused)
		return
	}
	defer s.close()
	d := destination{host: to.Host, addr: to.Address, port: to.Port, flow: p.carrier.newFlow()}
	p.connect(s.ctx, d, tunnel{t, s.ctx})
}

// Request responds to a request. It implements proxy.Egress for one owner.
func (p *ProxyClient) Request(w http.ResponseWriter, r *http.Request, to proxy.Target) {
	s, refused := p.begin(r.Context())
	if refused != nil {
		intercept.Refuse(w, r, refused)
		return
	}
	defer s.close()
	defer context.AfterFunc(s.ctx, func() { cut(w) })()
	d := destination{host: to.Host, port: to.Port, tls: to.TLS, flow: p.carrier.newFlow()}
	p.carrier.server.ServeRequest(w, r.WithContext(s.ctx), p.interception(d, p.serving(d, "")))
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
