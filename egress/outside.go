package egress

import (
	"context"
	"net/http"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/sandbox"
)

// outside is what an owner has outside of sandboxes: the clients of the proxy that
// show one of his keys. The node's rules and his own apply to them.
type outside struct {
	sender
	connections *quota.Pool // and requests that came without one of their own
}

// outsideOf returns the owner's, and makes it when it is missing.
func (e *Egress) outsideOf(ctx context.Context, owner string) (*outside, error) {
	e.mu.RLock()
	o := e.outside[owner]
	e.mu.RUnlock()
	if o != nil {
		return o, nil
	}
	if err := e.changing.take(ctx); err != nil { // so that no change of rules misses it
		return nil, err
	}
	defer e.changing.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, sandbox.ErrClosed
	}
	if o := e.outside[owner]; o != nil {
		return o, nil
	}
	o = &outside{sender: sender{e: e, owner: owner, load: e.load.child()}, connections: e.connections.Child(0)}
	e.build(&o.sender)
	e.outside[owner] = o
	return o, nil
}

// visit is the time of a connection or request from outside, which leave ends.
type visit struct {
	*outside
	ctx  context.Context // ends with the node, too
	end  context.CancelFunc
	stop func() bool
}

// errClosing refuses connections and requests while the node closes.
var errClosing = problem.New(problem.NodeUnavailable, "the node is shutting down")

// enter counts a connection or request in, or returns why it is refused.
func (e *Egress) enter(ctx context.Context, owner string) (*visit, *problem.Problem) {
	o, err := e.outsideOf(ctx, owner)
	if err != nil {
		return nil, errClosing
	}
	o.connections.SetLimit(int64(e.settings.Load().MaxSandboxConnections))
	switch o.connections.TryAcquire(1) {
	case quota.ErrExceeded:
		return nil, o.exceeded("connections of the owner's clients of the proxy")
	case quota.ErrTotalExceeded:
		return nil, o.exceeded("connections of the node")
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	if e.closed {
		o.connections.Release(1)
		return nil, errClosing
	}
	e.served.Add(1)
	s := &visit{outside: o}
	s.ctx, s.end = context.WithCancel(ctx)
	s.stop = context.AfterFunc(e.ctx, s.end)
	return s, nil
}

func (o *outside) exceeded(what string) *problem.Problem {
	reason := "a limit was reached: " + what
	flow := o.e.newFlow()
	o.record(audit.Entry{Kind: audit.Connection, Flow: flow, Verdict: audit.Deny, Reason: reason})
	return problem.New(problem.EgressLimitExceeded, reason).WithFlow("", "", flow)
}

func (s *visit) leave() {
	s.stop()
	s.end()
	s.connections.Release(1)
	s.e.served.Done()
}

// Connect implements proxy.Way.
func (e *Egress) Connect(ctx context.Context, owner string, to proxy.Target, t *proxy.Tunnel) {
	s, refused := e.enter(ctx, owner)
	if refused != nil {
		t.Refuse(refused)
		return
	}
	defer s.leave()
	s.connect(s.ctx, destination{host: to.Host, addr: to.Address, port: to.Port, flow: e.newFlow()}, tunnel{t, s.ctx})
}

// Request implements proxy.Way.
func (e *Egress) Request(w http.ResponseWriter, r *http.Request, owner string, to proxy.Target) {
	s, refused := e.enter(r.Context(), owner)
	if refused != nil {
		intercept.Refuse(w, r, refused)
		return
	}
	defer s.leave()
	defer context.AfterFunc(s.ctx, func() { cut(w) })()
	d := destination{host: to.Host, port: to.Port, flow: e.newFlow()}
	e.server.ServeRequest(w, r.WithContext(s.ctx), s.interception(d, to.TLS, s.handler(d, to.TLS)))
}

// cut ends reads from a client and writes to it that wait: it may do neither.
func cut(w http.ResponseWriter) {
	client := http.NewResponseController(w)
	// A server without deadlines ends them with the client's connection.
	_ = client.SetReadDeadline(time.Now())
	_ = client.SetWriteDeadline(time.Now())
}

// tunnel is a CONNECT that was not answered yet. It implements asked.
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

// OutsideFlows are what an owner's clients of the proxy sent, or wanted to, oldest
// first.
func (e *Egress) OutsideFlows(owner string, f audit.Filter) []audit.Entry {
	return e.audit.Entries(outsideName(owner), f)
}

// FollowOutsideFlows returns those and then what comes, until the node closes or
// stop is called.
func (e *Egress) FollowOutsideFlows(owner string, f audit.Filter) (flows <-chan audit.Entry, stop func()) {
	return e.audit.Follow(outsideName(owner), f)
}

var _ proxy.Way = (*Egress)(nil)
