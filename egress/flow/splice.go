package flow

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/tls/clienthello"
)

// splice copies between client and server until both have ended, closes both and records
// the connection. A connection that may hide its server's name is intercepted instead, and
// the server receives nothing of it.
func (c *connection) splice(ctx context.Context, client *peekedConn, server net.Conn) {
	defer server.Close()
	defer context.AfterFunc(ctx, func() { server.Close() })()
	var out, in int64
	var errOut, errIn error
	var back sync.WaitGroup
	back.Go(func() { // ends when either connection does
		if in, errIn = receive(client, server); errIn != nil && !client.detached.Load() {
			client.Abort()
			server.Close()
		}
	})
	if out, errOut = c.send(server, client); errors.Is(errOut, errHiddenName) {
		client.detached.Store(true)
		server.Close()
		back.Wait()
		c.to.tls = true
		c.intercept(ctx, client, ReasonECH)
		return
	} else if errOut != nil {
		client.Abort()
		server.Close()
	}
	back.Wait()
	e := audit.Entry{Verdict: audit.Allow, Address: remote(server), BytesOut: out, BytesIn: in}
	if denied, ok := errors.AsType[*deniedError](errOut); ok {
		e.Verdict, e.Reason = audit.Deny, denied.reason
	} else if errOut != nil && errIn != nil && ctx.Err() == nil {
		e.Reason = "the connection was cut"
	}
	c.record(e)
}

// send copies the client's bytes to the server, from the first one on.
func (c *connection) send(server net.Conn, client *peekedConn) (int64, error) {
	if err := c.checkFirst(client); err != nil {
		return 0, err
	}
	n, err := server.Write(client.first)
	client.first = nil
	if err != nil {
		return int64(n), err
	}
	more, err := client.Conn.WriteTo(server)
	if err == nil {
		err = closeWrite(server)
	}
	return int64(n) + more, err
}

// receive copies the server's bytes to the client.
func receive(client *peekedConn, server net.Conn) (int64, error) {
	n, err := client.Conn.ReadFrom(server)
	if err == nil {
		err = client.Conn.CloseWrite()
	}
	return n, err
}

// checkFirst requires that a TLS client on any port names the host that it looked up. It
// returns errHiddenName if that may be another one.
func (c *connection) checkFirst(client *peekedConn) error {
	if client.expectedHost == "" {
		return nil
	}
	hello, err := client.hello()
	switch {
	case errors.Is(err, clienthello.ErrNotTLS):
		return nil
	case len(client.first) == 0 && errors.Is(err, io.EOF):
		return nil // the client sends nothing, and may still receive
	case len(client.first) == 0:
		return err
	case err != nil:
		return &deniedError{"its TLS ClientHello is invalid"}
	case hello.ServerName != "" && serverName(hello) != client.expectedHost:
		return &deniedError{otherHost(hello)}
	case c.mayHideName(hello):
		return errHiddenName
	}
	return nil
}

// errHiddenName ends the connection to the server, not the client's.
var errHiddenName = errors.New("the connection may hide its server's name")

// deniedError ends a connection that is refused after it was accepted.
type deniedError struct{ reason string }

func (e *deniedError) Error() string { return e.reason }

// closeWrite ends the data to a connection; it closes a connection that has no
// CloseWrite.
func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// remote returns the address of the server itself, even behind a proxy.
func remote(c net.Conn) netip.Addr {
	if a, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		return a.Addr().Unmap()
	}
	return netip.Addr{}
}
