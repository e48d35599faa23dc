package intercept

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
)

// connection is a sandbox's, and at the same time the listener from which the
// library's server accepts it if it speaks HTTP/2: so that one server is enough for all
// of them, and its Serve returns when the connection has ended.
type connection struct {
	to         *Destination
	ctx        context.Context // of its requests; has the connection in it
	serverName string          // of its TLS
	raw        net.Conn
	wire       *wire     // over raw
	tls        *tls.Conn // over wire; nil: none
	served     net.Conn  // by the library's server
	accepted   bool      // used by Accept only

	closing sync.Once
	err     error         // of closing
	closed  chan struct{} // closed with raw

	entered atomic.Int64 // requests that have a handler, or had

	mu       sync.Mutex
	handlers int           // that have begun
	ended    bool          // no handler begins any more
	idle     chan struct{} // closed when it has ended and no handler runs
}

type connectionKey struct{}

func newConnection(ctx context.Context, raw net.Conn, to *Destination) *connection {
	c := &connection{to: to, raw: raw, closed: make(chan struct{}), idle: make(chan struct{})}
	c.wire = &wire{Conn: raw, of: c}
	c.ctx = context.WithValue(ctx, connectionKey{}, c)
	return c
}

func connectionOf(ctx context.Context) *connection {
	return ctx.Value(connectionKey{}).(*connection)
}

// Accept returns the connection, and net.ErrClosed after it was closed.
func (c *connection) Accept() (net.Conn, error) {
	if !c.accepted {
		c.accepted = true
		return c.served, nil
	}
	<-c.closed
	return nil, net.ErrClosed
}

// Close closes the connection. It may be called more than once.
func (c *connection) Close() error {
	c.closing.Do(func() {
		c.err = c.raw.Close()
		close(c.closed)
	})
	return c.err
}

// Addr is of the connection's end here.
func (c *connection) Addr() net.Addr { return c.raw.LocalAddr() }

// enter counts the handler of a request in, unless the connection has ended.
func (c *connection) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.handlers++
	c.entered.Add(1)
	return true
}

func (c *connection) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handlers--; c.ended && c.handlers == 0 {
		close(c.idle)
	}
}

// handlersDone returns when no handler of the connection runs; none begins.
func (c *connection) handlersDone() {
	c.mu.Lock()
	c.ended = true
	if c.handlers == 0 {
		close(c.idle)
	}
	c.mu.Unlock()
	<-c.idle
}
