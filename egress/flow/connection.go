package flow

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/tls/clienthello"
	"github.com/doze-run/doze/problem"
)

// httpPort and httpsPort of servers (IANA).
const (
	httpPort  = 80
	httpsPort = 443
)

// destination is the destination of a connection: a host by its name, or an address without
// a name.
type destination struct {
	host string
	addr netip.Addr // set if host is empty
	port uint16
	tls  bool   // known after the client's first bytes
	flow string // the id of the connection, or of a request to the proxy, in the audit log
}

// pending is a connection that a client has requested and that was not accepted yet.
type pending interface {
	// Accept is called at most once, and not after Refuse.
	Accept() (proxy.Conn, error)
	Refuse(why *problem.Problem)
	// explains reports whether Refuse sends the reason to the client.
	explains() bool
}

// connection is a connection of a client to a server.
type connection struct {
	*Client
	pending  pending
	to       destination
	began    time.Time
	decision rule.Decision
}

// connect decides on a connection, and refuses it, passes it through or intercepts it.
func (c *Client) connect(ctx context.Context, to destination, p pending) {
	conn := &connection{Client: c, pending: p, to: to, began: time.Now(), decision: c.Table().Connect(rule.Request{Host: to.host, Address: to.addr, Port: to.port})}
	switch {
	case conn.decision.Verdict == rule.VerdictDeny:
		conn.refuse(ctx)
	case to.host == "" || !conn.waitsForClient():
		conn.pass(ctx)
	default:
		conn.inspect(ctx)
	}
}

// waitsForClient reports whether the client's first bytes decide how the connection is
// carried. They are awaited before the server is dialed. On other ports the server may be
// the first to send.
func (c *connection) waitsForClient() bool {
	return c.decision.Verdict == rule.VerdictInspect || c.to.port == httpPort || c.to.port == httpsPort
}

// inspect waits for the client's first bytes, and intercepts HTTP and TLS as the rules require.
func (c *connection) inspect(ctx context.Context) {
	conn, err := c.pending.Accept()
	if err != nil {
		return
	}
	p := &peekedConn{Conn: conn}
	defer p.Close()
	switch protocol, err := p.sniff(); {
	case err != nil:
		c.recordFailure(errSilent)
		conn.Abort()
	case protocol == protocolTLS:
		c.inspectTLS(ctx, p)
	case protocol == protocolHTTP:
		c.intercept(ctx, p, "")
	case c.decision.Verdict == rule.VerdictInspect:
		c.recordDenial("a rule inspects requests to this host and port, but the connection is neither HTTP nor TLS")
		conn.Abort()
	default:
		c.passThrough(ctx, p)
	}
}

// inspectTLS checks a ClientHello, and intercepts the connection or passes it through.
func (c *connection) inspectTLS(ctx context.Context, p *peekedConn) {
	c.to.tls = true
	hello, err := p.hello()
	switch name := serverName(hello); {
	case err != nil:
		c.recordDenial("its TLS ClientHello is invalid")
	case name == "":
		c.recordDenial("its TLS ClientHello has no server name (SNI)")
	case name != c.to.host:
		c.recordDenial(otherHost(hello))
	case c.decision.Verdict == rule.VerdictInspect:
		c.intercept(ctx, p, "")
		return
	case c.mayHideName(hello):
		c.intercept(ctx, p, ReasonECH)
		return
	default:
		c.passThrough(ctx, p)
		return
	}
	// Without a certificate for the name, the client would not read a response.
	p.Abort()
}

// mayHideName reports whether a connection may be for a name that the node cannot read,
// and therefore must not pass through.
func (c *connection) mayHideName(h clienthello.Hello) bool {
	return h.ECH && !c.carrier.settings.Load().AllowECH
}

// ReasonECH is why requests are intercepted that no rule inspects. The node is a server
// without ECH, which reads only the outer name. A client that sent noise (GREASE) continues;
// one that hides a name ends the connection (RFC 9849, section 6.1.6).
const ReasonECH = "intercepted because its ClientHello has ECH"

// otherHost returns the reason for refusing a connection whose ClientHello names another host.
func otherHost(h clienthello.Hello) string {
	return fmt.Sprintf("its TLS connection is for %.80q, not for the host that was looked up", h.ServerName)
}

func serverName(h clienthello.Hello) string {
	return strings.ToLower(strings.TrimSuffix(h.ServerName, "."))
}

// intercept serves the requests of the connection. reason is for the audit log.
func (c *connection) intercept(ctx context.Context, p *peekedConn, reason string) {
	c.serveConn(ctx, p, func(w http.ResponseWriter, r *http.Request) { c.serve(w, r, c.to, reason) })
}

func (c *connection) serveConn(ctx context.Context, p *peekedConn, h http.HandlerFunc) {
	err := c.carrier.server.Serve(ctx, p, c.interception(c.to, h))
	if err != nil { // mostly because the client does not trust the node's CA
		c.record(audit.Entry{Verdict: audit.Error, Reason: err.Error()})
	}
}

// interception returns how requests to a destination are served.
func (c *Client) interception(to destination, h http.HandlerFunc) intercept.Destination {
	return intercept.Destination{
		Host: to.host, Port: to.port, TLS: to.tls, Flow: to.flow, Handler: h,
		Refused: func(r *http.Request, why *problem.Problem) {
			c.record(audit.Entry{
				Kind: audit.Request, Flow: to.flow, Host: to.host, Port: to.port, Method: r.Method, Path: r.URL.EscapedPath(),
				Verdict: audit.Deny, Reason: why.Detail, Status: why.Status,
			})
		},
	}
}

// refuse ends a connection that is denied: by a response where it is HTTP and the client
// can read one, elsewhere by a reset.
func (c *connection) refuse(ctx context.Context) {
	c.recordDenial(c.decision.Reason)
	if c.pending.explains() || c.to.host == "" || c.to.port != httpPort && c.to.port != httpsPort {
		c.pending.Refuse(c.refusal(c.decision.Reason))
		return
	}
	conn, err := c.pending.Accept()
	if err != nil {
		return
	}
	p := &peekedConn{Conn: conn}
	defer p.Close()
	protocol, err := p.sniff()
	if err == nil && protocol == protocolTLS {
		_, err = p.hello()
	}
	if err != nil || protocol == protocolOther {
		conn.Abort()
		return
	}
	c.to.tls = protocol == protocolTLS
	c.serveConn(ctx, p, func(w http.ResponseWriter, r *http.Request) { intercept.Refuse(w, r, c.refusal(c.decision.Reason)) })
}

func (c *connection) refusal(reason string) *problem.Problem {
	return problem.New(problem.EgressDenied, reason).WithFlow(c.to.host, c.decision.Rule, c.to.flow)
}

// pass dials the server before the client has sent any bytes, and passes the connection through.
func (c *connection) pass(ctx context.Context) {
	server, err := c.dial(ctx)
	if err != nil {
		c.recordFailure(err)
		why := problem.New(problem.UpstreamUnreachable, err.Error()).WithFlow(c.to.host, "", c.to.flow)
		if verdict, _ := verdictOf(err, netip.Addr{}); verdict == audit.Deny {
			why = c.refusal(err.Error())
		}
		c.pending.Refuse(why)
		return
	}
	conn, err := c.pending.Accept()
	if err != nil {
		server.Close()
		return
	}
	p := &peekedConn{Conn: conn, expectedHost: c.to.host}
	defer p.Close()
	c.splice(ctx, p, server)
}

// passThrough is pass for a connection that was accepted.
func (c *connection) passThrough(ctx context.Context, p *peekedConn) {
	server, err := c.dial(ctx)
	if err != nil {
		c.recordFailure(err)
		p.Abort()
		return
	}
	c.splice(ctx, p, server)
}

func (c *connection) dial(ctx context.Context) (net.Conn, error) {
	return c.carrier.settings.Load().Upstreams.dialer.Dial(ctx, dial.Target{
		Host: c.to.host, Address: c.to.addr, Port: c.to.port,
		Private: c.decision.Private, Listed: c.to.host == "",
	})
}

// recordDenial writes the reason for which the connection was refused.
func (c *connection) recordDenial(reason string) {
	c.record(audit.Entry{Verdict: audit.Deny, Reason: reason})
}

// recordFailure writes the reason for which the server was not reached.
func (c *connection) recordFailure(err error) {
	verdict, address := verdictOf(err, netip.Addr{})
	c.record(audit.Entry{Verdict: verdict, Reason: err.Error(), Address: address})
}

// record completes an entry about the connection and writes it.
func (c *connection) record(e audit.Entry) {
	e.Kind, e.Flow, e.Host, e.Port, e.Rule = audit.Connection, c.to.flow, c.to.host, c.to.port, c.decision.Rule
	if !e.Address.IsValid() {
		e.Address = c.to.addr
	}
	e.Duration = audit.Took(time.Since(c.began))
	c.Client.record(e)
}

// verdictOf returns the verdict on a request or connection that failed, and the address
// that the error refuses, or else the known address.
func verdictOf(err error, known netip.Addr) (audit.Verdict, netip.Addr) {
	if refused, ok := errors.AsType[*dial.RefusedError](err); ok {
		return audit.Deny, refused.Address
	}
	if failure, ok := errors.AsType[*intercept.Failure](err); ok && failure.Denied {
		return audit.Deny, known
	}
	return audit.Error, known
}
