package flow

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/network/dns"
	"github.com/doze-run/doze/egress/network/stack"
	"github.com/doze-run/doze/egress/proxy"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/netns/link"
	"github.com/doze-run/doze/runtime/sandbox"
)

// dnsPort of servers (IANA).
const dnsPort = 53

// Attachment is a sandbox with its network. It implements stack.Handler.
type Attachment struct {
	*Client
	names *dns.Server

	mu    sync.Mutex
	stack *stack.Stack // nil while detached
	ended bool
}

// NewAttachment returns the attachment of a client, detached. It sets names.Decide and
// names.Refused.
func NewAttachment(c *Client, names dns.Config) *Attachment {
	a := &Attachment{Client: c}
	names.Decide, names.Refused = a.decideName, a.refusedName
	a.names = dns.New(names)
	return a
}

// Attach carries the packets of a device until Detach. The caller has called Detach.
// Errors: sandbox.ErrClosed after End, or the stack's.
func (a *Attachment) Attach(device *os.File, listener *net.TCPListener) error {
	c := a.carrier
	s, err := stack.New(stack.Config{
		Device:      device,
		Listener:    listener,
		Handler:     a,
		Limits:      stack.Limits{Connections: c.settings.Load().MaxClientConnections},
		Connections: c.Connections, Wide: c.wide,
		Exceeded: a.exceeded,
		Refused:  a.refusedDatagram,
		Sent:     func() { c.cfg.Sandboxes.Touch(a.ID) },
		// A stopped sandbox is not woken: its connections have ended, too.
		Arriving: func(ctx context.Context) error { return c.cfg.Sandboxes.Rouse(ctx, a.ID) },
		Log:      c.cfg.Log.With("sandbox", a.ID),
	})
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		_ = s.Close() // ends its flows, and its error changes nothing
		return sandbox.ErrClosed
	}
	a.stack = s
	return nil
}

// Detach ends all flows.
func (a *Attachment) Detach() {
	a.mu.Lock()
	s := a.stack
	a.stack = nil
	a.mu.Unlock()
	if s != nil {
		_ = s.Close() // ends its flows, and its error changes nothing
	}
}

// End detaches permanently.
func (a *Attachment) End() {
	a.mu.Lock()
	a.ended = true
	a.mu.Unlock()
	a.Detach()
}

// TCP implements stack.Handler: it decides on a connection and carries it.
func (a *Attachment) TCP(ctx context.Context, f *stack.Flow) {
	to := f.Destination()
	if to.Addr() == link.Gateway {
		a.gateway(ctx, f, to.Port())
		return
	}
	d := destination{port: to.Port(), flow: a.carrier.newFlow()}
	d.host, d.addr = a.hostOf(to.Addr())
	a.connect(ctx, d, pendingFlow{f})
}

// hostOf returns the name that an address stands for, or else the address.
func (a *Attachment) hostOf(addr netip.Addr) (host string, literal netip.Addr) {
	if host, ok := a.names.Host(addr); ok {
		return host, netip.Addr{}
	}
	return "", addr
}

// gateway serves DNS over TCP, and refuses all other ports.
func (a *Attachment) gateway(ctx context.Context, f *stack.Flow, port uint16) {
	if port != dnsPort {
		a.record(audit.Entry{
			Kind: audit.Connection, Address: link.Gateway, Port: port,
			Verdict: audit.Deny, Reason: "only DNS is served there",
		})
		f.Refuse()
		return
	}
	conn, err := f.Accept()
	if err != nil {
		return // the client has disconnected
	}
	defer conn.Close()
	a.names.ServeConn(ctx, conn)
}

// DNS implements stack.Handler.
func (a *Attachment) DNS(_ context.Context, server netip.Addr, query []byte) []byte {
	a.carrier.cfg.Sandboxes.Touch(a.ID)
	return a.names.Answer(server, query)
}

// decideName reports whether a name resolves.
func (a *Attachment) decideName(name string) (bool, string) {
	d := a.Table().Name(name)
	return d.Verdict != rule.VerdictDeny, d.Reason
}

func (a *Attachment) refusedName(name, reason string) {
	entry := audit.Entry{Kind: audit.DNS, Host: name, Verdict: audit.Deny, Reason: reason}
	// Invalid names, and those beyond the limit, are not refused by a rule.
	if d := a.Table().Name(name); d.Verdict == rule.VerdictDeny && d.Reason == reason {
		entry.Rule = d.Rule
	}
	a.record(entry)
}

// exceeded records a limit that was reached. The stack calls it rarely.
func (a *Attachment) exceeded(what stack.Exceeded) {
	a.record(audit.Entry{Kind: audit.Connection, Verdict: audit.Deny, Reason: "a limit was reached: " + string(what)})
}

// refusedDatagram records UDP, which is not carried: mostly QUIC.
func (a *Attachment) refusedDatagram(to netip.AddrPort) {
	host, addr := a.hostOf(to.Addr())
	a.record(audit.Entry{Kind: audit.Connection, Host: host, Address: addr, Port: to.Port(), Verdict: audit.Deny, Reason: "UDP is not supported"})
}

// pendingFlow is a sandbox's connection that was not accepted yet. It implements pending.
type pendingFlow struct{ *stack.Flow }

func (f pendingFlow) Accept() (proxy.Conn, error) { return f.Flow.Accept() }

// Refuse resets the connection, without a reason.
func (f pendingFlow) Refuse(*problem.Problem) { f.Flow.Refuse() }

func (f pendingFlow) explains() bool { return false }
