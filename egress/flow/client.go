// Package flow carries the traffic of clients: it decides on connections and requests by
// the rules of their client, runs policies, replaces placeholders and references by
// secrets, and sends requests to their upstreams.
//
// Package egress decides which rules and settings apply, and passes them to flow as a
// Table for each Client and as the Settings of the Carrier. Files follow a request:
// attachment.go and tunnel.go (a sandbox's network, or the proxy), connection.go, peek.go,
// splice.go (passed through unread), request.go (the stages of an intercepted request).
package flow

import (
	"context"
	"crypto/tls"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/secret/vault"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Sandboxes is the part of *sandbox.Manager that flow needs.
type Sandboxes interface {
	ByID(id sandbox.ID) (sandbox.Sandbox, bool)
	Touch(id sandbox.ID)
	// Rouse wakes the sandbox if it sleeps, without a lease: a program that does not
	// read must not keep its sandbox awake.
	Rouse(ctx context.Context, id sandbox.ID) error
}

// Config of a Carrier. All fields are required.
type Config struct {
	Sandboxes Sandboxes
	// Operator is the owner whose secrets and modules the node's rules use.
	Operator string
	Vault    *vault.Vault
	// Certificate returns the certificate with which connections to a host are
	// intercepted.
	Certificate func(ctx context.Context, host string) (*tls.Certificate, error)
	Audit       *audit.Log
	Log         *slog.Logger
}

// Settings of a Carrier.
type Settings struct {
	Upstreams *Upstreams
	// AllowECH passes through connections that may hide their server's name, instead of
	// intercepting them.
	AllowECH bool
	// MaxConnections bounds the connections of all clients, MaxClientConnections a client's.
	MaxConnections, MaxClientConnections int
}

// Carrier carries the flows of all clients of a node.
type Carrier struct {
	cfg       Config
	server    *intercept.Server
	scrubbers scrubbers
	// Usage is the usage of all clients.
	Usage Usage
	// Connections counts the connections of all clients.
	Connections *quota.Pool
	wide        *quota.Pool // connections with buffers that grow
	settings    atomic.Pointer[Settings]
	flows       atomic.Uint64 // number of the latest flow

	ctx      context.Context // ends with Close
	end      context.CancelFunc
	mu       sync.Mutex
	closed   bool
	sessions sync.WaitGroup // of proxy clients
}

// NewCarrier returns a Carrier, which carries nothing before SetSettings. Close it.
func NewCarrier(cfg Config) *Carrier {
	c := &Carrier{
		cfg: cfg, server: intercept.New(intercept.Config{Certificate: cfg.Certificate, Log: cfg.Log}),
		Usage: Usage{
			Requests: quota.New(MaxRequests), Dials: quota.New(MaxDials),
			Bodies: quota.New(MaxBodies), PolicyBodies: quota.New(MaxPolicyBodies), Windows: quota.New(MaxWindows),
		},
		Connections: quota.New(0), wide: quota.New(MaxLargeWindows),
	}
	// Numbers of earlier runs of the node are lower, unless its clock was set back.
	c.flows.Store(uint64(time.Now().UnixMicro()))
	c.ctx, c.end = context.WithCancel(context.Background())
	return c
}

// SetSettings replaces the settings for all later requests. It returns the Upstreams that
// were used before, or nil; the caller closes them.
func (c *Carrier) SetSettings(s Settings) (before *Upstreams) {
	c.Connections.SetLimit(int64(s.MaxConnections))
	if old := c.settings.Swap(&s); old != nil {
		before = old.Upstreams
	}
	return before
}

// Close ends the connections of proxy clients. The caller has ended the attachments.
func (c *Carrier) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.end()
	c.sessions.Wait()
	if s := c.settings.Load(); s != nil {
		s.Upstreams.Close()
	}
}

// newFlow returns a unique name for a connection.
func (c *Carrier) newFlow() string { return strconv.FormatUint(c.flows.Add(1), 36) }

// Client is a sandbox, or an owner's programs outside of sandboxes: the unit that rules
// and limits apply to.
type Client struct {
	carrier *Carrier
	ID      sandbox.ID // empty outside of sandboxes
	Owner   string
	Usage   Usage
	table   atomic.Pointer[Table]
}

// NewClient returns a client without a table. An empty id stands for the owner's programs
// outside of sandboxes.
func (c *Carrier) NewClient(id sandbox.ID, owner string) *Client {
	all := c.Usage
	return &Client{carrier: c, ID: id, Owner: owner, Usage: Usage{
		Requests: all.Requests.Child(MaxClientRequests), Dials: all.Dials.Child(MaxClientDials),
		Bodies: all.Bodies.Child(MaxClientBodies), PolicyBodies: all.PolicyBodies.Child(MaxClientPolicyBodies), Windows: all.Windows.Child(MaxClientWindows),
	}}
}

// SetTable replaces the table of the client, from its next request on.
func (c *Client) SetTable(t *Table) { c.table.Store(t) }

// Table returns the current table of the client.
func (c *Client) Table() *Table { return c.table.Load() }

// Name returns the value that identifies the client in the audit log, to policies and among
// idle connections: the id of a sandbox, or else the owner's ProxyName.
func (c *Client) Name() string {
	if c.ID == "" {
		return ProxyName(c.Owner)
	}
	return string(c.ID)
}

// ProxyName returns the name of an owner's programs outside of sandboxes. Unlike the ids of
// sandboxes, it has a slash.
func ProxyName(owner string) string { return "proxy/" + owner }

// identity returns the description of the client for policies.
func (c *Client) identity() policy.Sandbox {
	if c.ID == "" {
		return policy.Sandbox{ID: c.Name(), Owner: c.Owner}
	}
	sb, _ := c.carrier.cfg.Sandboxes.ByID(c.ID) // without name and labels if it is being destroyed
	return policy.Sandbox{ID: string(c.ID), Name: sb.Name, Owner: c.Owner, Labels: sb.Labels}
}

// record completes an entry and writes it to the audit log.
func (c *Client) record(entry audit.Entry) {
	entry.Sandbox = c.Name()
	c.carrier.cfg.Audit.Record(entry)
}
