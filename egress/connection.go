package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/network/stack"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/tls/clienthello"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/netns/link"
)

// dnsPort, httpPort and httpsPort of servers (IANA).
const (
	dnsPort   = 53
	httpPort  = 80
	httpsPort = 443
)

// destination of a connection: a host by its name, or an address that no name
// led to.
type destination struct {
	host string
	addr netip.Addr // the virtual one, or that which no name led to
	port uint16
	flow string // what the audit log calls the connection, or the request from outside
}

func (d destination) request() rule.Request {
	r := rule.Request{Host: d.host, Port: d.port}
	if d.host == "" {
		r.Address = d.addr
	}
	return r
}

// TCP implements stack.Handler: it decides on a connection and carries it.
func (m *member) TCP(ctx context.Context, f *stack.Flow) {
	to := f.Destination()
	if to.Addr() == link.Gateway {
		m.gateway(ctx, f, to.Port())
		return
	}
	d := destination{addr: to.Addr(), port: to.Port(), flow: m.e.newFlow()}
	d.host, _ = m.names.Host(to.Addr())
	m.connect(ctx, d, flow{f})
}

// flow is a sandbox's connection that was not answered yet. It implements asked.
type flow struct{ *stack.Flow }

func (f flow) Accept() (proxy.Conn, error) {
	conn, err := f.Flow.Accept()
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// Refuse resets the connection, which cannot say why.
func (f flow) Refuse(*problem.Problem) { f.Flow.Refuse() }

func (f flow) explains() bool { return false }

// asked is a connection that a client asks for and that was not answered yet.
type asked interface {
	// Accept is called once at most, and not after Refuse.
	Accept() (proxy.Conn, error)
	Refuse(why *problem.Problem)
	// explains says whether Refuse tells the client why.
	explains() bool
}

// connect decides on a connection and carries it.
func (m *sender) connect(ctx context.Context, d destination, f asked) {
	c := &connection{m: m, flow: f, to: d, began: time.Now(), decision: m.table.Load().Connect(d.request())}
	switch {
	case c.decision.Verdict == rule.VerdictDeny:
		c.refuse(ctx)
	case d.host == "" || !c.decides(d.port):
		c.pass(ctx)
	default:
		c.look(ctx)
	}
}

// gateway answers DNS over TCP; nothing else listens there.
func (m *member) gateway(ctx context.Context, f *stack.Flow, port uint16) {
	if port != dnsPort {
		m.record(audit.Entry{
			Kind: audit.Connection, Address: link.Gateway, Port: port,
			Verdict: audit.Deny, Reason: "nothing but DNS is served there",
		})
		f.Refuse()
		return
	}
	conn, err := f.Accept()
	if err != nil {
		return // the client has left
	}
	defer conn.Close()
	m.names.ServeConn(ctx, conn)
}

// connection of a sender to a server.
type connection struct {
	m        *sender
	flow     asked
	to       destination
	began    time.Time
	decision rule.Decision
}

// decides says whether what the client sends first decides what becomes of the
// connection, so that it is awaited before the server is dialled. On other ports
// the server may be the one who speaks first.
func (c *connection) decides(port uint16) bool {
	return c.decision.Verdict == rule.VerdictInspect || port == httpPort || port == httpsPort
}

// look awaits the client's first bytes and goes on as they say.
func (c *connection) look(ctx context.Context) {
	conn, err := c.flow.Accept()
	if err != nil {
		return
	}
	s := &opened{Conn: conn}
	defer s.Close()
	switch kind, err := s.sniff(); {
	case err != nil:
		c.failed(errSilent)
		conn.Abort()
	case kind == speaksTLS:
		c.tls(ctx, s)
	case kind == speaksHTTP:
		c.intercept(ctx, s, false, c.m.handler(c.to, false))
	case c.decision.Verdict == rule.VerdictInspect:
		c.deny("a rule looks at the requests to this host and port, and this is neither HTTP nor TLS")
		conn.Abort()
	default:
		c.carry(ctx, s)
	}
}

// tls checks a ClientHello and intercepts the connection or passes it on.
func (c *connection) tls(ctx context.Context, s *opened) {
	hello, err := s.hello()
	switch name := name(hello); {
	case err != nil:
		c.deny("its TLS ClientHello cannot be read")
	case name == "":
		c.deny("its TLS connection names no server (no SNI)")
	case name != c.to.host:
		c.deny(otherHost(hello))
	case c.decision.Verdict == rule.VerdictInspect:
		c.intercept(ctx, s, true, c.m.handler(c.to, true))
		return
	case c.hides(hello):
		c.reveal(ctx, s)
		return
	default:
		c.carry(ctx, s)
		return
	}
	// No certificate fits: the client would not read an answer.
	s.Abort()
}

// hides says whether a connection may be for a name that the node cannot read, and
// must not pass through therefore.
func (c *connection) hides(h clienthello.Hello) bool {
	return h.ECH && !c.m.e.settings.Load().AllowECH
}

// reasonECH is why requests are looked at that no rule looks at.
const reasonECH = "intercepted because its ClientHello has ECH"

// reveal intercepts a connection that may hide its server's name. What is hidden
// goes nowhere: the node is a server without ECH, which reads the outer name only. A
// client that sent noise (GREASE) goes on, one that hides a name ends the connection
// (RFC 9849, section 6.1.6).
func (c *connection) reveal(ctx context.Context, s *opened) {
	c.intercept(ctx, s, true, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.m.serve(w, r, c.to, true, reasonECH)
	}))
}

// otherHost is why a connection is refused whose TLS is for another host.
func otherHost(h clienthello.Hello) string {
	return fmt.Sprintf("its TLS connection is for %.80q, another host than that which was looked up", h.ServerName)
}

func name(h clienthello.Hello) string {
	return strings.ToLower(strings.TrimSuffix(h.ServerName, "."))
}

// intercept serves the requests of the connection.
func (c *connection) intercept(ctx context.Context, s *opened, tls bool, h http.Handler) {
	err := c.m.e.server.Serve(ctx, s, c.m.interception(c.to, tls, h))
	if err != nil { // mostly a client that does not trust the node's CA
		c.entry(audit.Entry{Verdict: audit.Error, Reason: err.Error()})
	}
}

// interception is how requests to a destination are served.
func (m *sender) interception(to destination, tls bool, h http.Handler) intercept.Destination {
	return intercept.Destination{
		Host: to.host, Port: to.port, TLS: tls, Flow: to.flow, Handler: h,
		Refused: func(r *http.Request, why *problem.Problem) {
			m.record(audit.Entry{
				Kind: audit.Request, Flow: to.flow, Host: to.host, Port: to.port, Method: r.Method, Path: r.URL.EscapedPath(),
				Verdict: audit.Deny, Reason: why.Detail, Status: why.Status,
			})
		},
	}
}

// refuse ends a connection that is denied: by an answer where it is HTTP and the
// client will read it, by a reset elsewhere.
func (c *connection) refuse(ctx context.Context) {
	c.deny(c.decision.Reason)
	if c.flow.explains() || c.to.host == "" || c.to.port != httpPort && c.to.port != httpsPort {
		c.flow.Refuse(c.refusal(c.decision.Reason))
		return
	}
	conn, err := c.flow.Accept()
	if err != nil {
		return
	}
	s := &opened{Conn: conn}
	defer s.Close()
	kind, err := s.sniff()
	if err == nil && kind == speaksTLS {
		_, err = s.hello()
	}
	if err != nil || kind == speaksOther {
		conn.Abort()
		return
	}
	c.intercept(ctx, s, kind == speaksTLS, c.refusing(c.decision.Reason))
}

// refusing answers every request with the reason.
func (c *connection) refusing(reason string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		intercept.Refuse(w, r, c.refusal(reason))
	})
}

func (c *connection) refusal(reason string) *problem.Problem {
	return problem.New(problem.EgressDenied, reason).WithFlow(c.to.host, c.decision.Rule, c.to.flow)
}

// pass dials the server and carries what both say.
func (c *connection) pass(ctx context.Context) {
	server, err := c.dial(ctx)
	if err != nil {
		c.failed(err)
		c.unreached(err)
		return
	}
	conn, err := c.flow.Accept()
	if err != nil {
		server.Close()
		return
	}
	s := &opened{Conn: conn, wants: c.to.host}
	defer s.Close()
	c.splice(ctx, s, server)
}

// unreached refuses the connection because there is none to the server.
func (c *connection) unreached(err error) {
	if verdictOf(err) == audit.Deny {
		c.flow.Refuse(c.refusal(err.Error()))
		return
	}
	c.flow.Refuse(problem.New(problem.UpstreamUnreachable, err.Error()).WithFlow(c.to.host, "", c.to.flow))
}

// carry is pass for a client that has spoken already.
func (c *connection) carry(ctx context.Context, s *opened) {
	server, err := c.dial(ctx)
	if err != nil {
		c.failed(err)
		s.Abort()
		return
	}
	c.splice(ctx, s, server)
}

func (c *connection) dial(ctx context.Context) (net.Conn, error) {
	return c.m.e.upstream.Load().dialer.Dial(ctx, dial.Target{
		Host: c.to.host, Address: c.to.unnamed(), Port: c.to.port,
		Private: c.decision.Private, Listed: c.to.host == "",
	})
}

// unnamed is the address that no name led to.
func (d destination) unnamed() netip.Addr {
	if d.host != "" {
		return netip.Addr{}
	}
	return d.addr
}

// deny writes that the connection was refused, and why.
func (c *connection) deny(reason string) {
	c.entry(audit.Entry{Verdict: audit.Deny, Reason: reason})
}

// failed writes why the server was not reached.
func (c *connection) failed(err error) {
	c.entry(audit.Entry{Verdict: verdictOf(err), Reason: err.Error(), Address: refusedAddress(err, netip.Addr{})})
}

// entry completes an entry about the connection and writes it.
func (c *connection) entry(e audit.Entry) {
	e.Kind, e.Flow, e.Host, e.Port, e.Rule = audit.Connection, c.to.flow, c.to.host, c.to.port, c.decision.Rule
	if !e.Address.IsValid() {
		e.Address = c.to.unnamed()
	}
	e.Duration = audit.Took(time.Since(c.began))
	c.m.record(e)
}

// errSilent is why a connection came to nothing of which the first bytes say
// where it goes.
var errSilent = errors.New("the client ended the connection before it had said anything")

// opened is an accepted connection of which the first bytes may have been read.
type opened struct {
	proxy.Conn
	first []byte      // read, and to be read again
	wants string      // the host of which a ClientHello has to be; empty if it was checked
	kept  atomic.Bool // it outlives the connection to the server
}

// speaks is what a client's first bytes look like.
type speaks int

const (
	speaksOther speaks = iota
	speaksTLS
	speaksHTTP
)

// longestMethod that is waited for: the longest that are registered have 17 (RFC
// 4437). What has more letters is taken for a request, and refused as one.
const longestMethod = 20

// sniff reads until it knows what the client speaks. The bytes stay to be read.
func (o *opened) sniff() (speaks, error) {
	buf := make([]byte, longestMethod+1)
	n := 0
	for n < len(buf) {
		k, err := o.Conn.Read(buf[n:])
		n += k
		o.first = buf[:n]
		if n > 0 {
			if clienthello.IsTLS(buf[0]) {
				return speaksTLS, nil
			}
			if kind, sure := method(buf[:n]); sure {
				return kind, nil
			}
		}
		switch {
		case err == io.EOF && n > 0: // it has said all, and that is no request
			return speaksOther, nil
		case err != nil:
			return speaksOther, err
		}
	}
	return speaksHTTP, nil
}

// method says whether b is the start of a request line, or of HTTP/2's preface, as
// some server may read it: letters of any case, and white space; line breaks may
// precede it. Who reads more strictly refuses it. It is not sure as long as all are
// letters. Digits, as in the greeting of SSH, are in no method.
func method(b []byte) (kind speaks, sure bool) {
	line := bytes.TrimLeft(b, "\r\n")
	for i, c := range line {
		switch {
		case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c == '-' || c == '_':
		case (c == ' ' || c == '\t') && i > 0:
			return speaksHTTP, true
		default:
			return speaksOther, true
		}
	}
	return speaksOther, false
}

// hello reads the ClientHello. The bytes stay to be read.
func (o *opened) hello() (clienthello.Hello, error) {
	h, taken, err := clienthello.Read(io.MultiReader(bytes.NewReader(o.first), o.Conn))
	o.first = taken
	return h, err
}

// Read reads what the client sends, from its first byte on.
func (o *opened) Read(p []byte) (int, error) {
	if len(o.first) > 0 {
		n := copy(p, o.first)
		o.first = o.first[n:]
		return n, nil
	}
	return o.Conn.Read(p)
}
