package egress

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

// splice carries what both ends say until both have ended, and writes what came
// of it. It closes both. A connection that may hide its server's name does not pass
// through: it is intercepted, and the server hears nothing of it.
func (c *connection) splice(ctx context.Context, s *opened, server net.Conn) {
	defer server.Close()
	defer context.AfterFunc(ctx, func() { server.Close() })()
	var out, in int64
	var errOut, errIn error
	var back sync.WaitGroup
	back.Go(func() { // ends when either connection does
		if in, errIn = receive(s, server); errIn != nil && !s.kept.Load() {
			s.Abort()
			server.Close()
		}
	})
	if out, errOut = c.send(server, s); errors.Is(errOut, errHides) {
		s.kept.Store(true)
		server.Close()
		back.Wait()
		c.reveal(ctx, s)
		return
	} else if errOut != nil {
		s.Abort()
		server.Close()
	}
	back.Wait()
	e := audit.Entry{Verdict: audit.Allow, Address: remote(server), BytesOut: out, BytesIn: in}
	var denied *deniedError
	switch err := errors.Join(errOut, errIn); {
	case errors.As(err, &denied):
		e.Verdict, e.Reason = audit.Deny, denied.reason
	case errOut != nil && errIn != nil && ctx.Err() == nil:
		e.Reason = "the connection was cut"
	}
	c.entry(e)
}

// send carries the client's bytes to the server, from the first one on.
func (c *connection) send(server net.Conn, s *opened) (int64, error) {
	if err := c.checkFirst(s); err != nil {
		return 0, err
	}
	n, err := server.Write(s.first)
	s.first = nil
	if err != nil {
		return int64(n), err
	}
	more, err := s.Conn.WriteTo(server)
	if err == nil {
		err = closeWrite(server)
	}
	return int64(n) + more, err
}

// receive carries the server's bytes to the sandbox.
func receive(s *opened, server net.Conn) (int64, error) {
	n, err := s.Conn.ReadFrom(server)
	if err == nil {
		err = s.Conn.CloseWrite()
	}
	return n, err
}

// checkFirst holds a TLS client on any port to the name that it looked up. It returns
// errHides if that may be another one.
func (c *connection) checkFirst(s *opened) error {
	if s.wants == "" {
		return nil
	}
	switch kind, err := s.sniffFirst(); {
	case errors.Is(err, io.EOF):
		return nil // it says nothing, and may listen
	case err != nil || !kind:
		return err
	}
	hello, err := s.hello()
	switch {
	case err != nil:
		return &deniedError{"its TLS ClientHello cannot be read"}
	case hello.ServerName != "" && name(hello) != s.wants:
		return &deniedError{otherHost(hello)}
	case c.hides(hello):
		return errHides
	}
	return nil
}

// sniffFirst reads the first bytes, which stay to be read, and says whether they
// are TLS.
func (o *opened) sniffFirst() (isTLS bool, err error) {
	b := make([]byte, 1)
	n, err := o.Conn.Read(b)
	if n == 0 {
		return false, err
	}
	o.first = b
	return clienthello.IsTLS(b[0]), nil
}

// errHides ends what passes through, not the client's connection.
var errHides = errors.New("it may hide its server's name")

// deniedError ends a connection that turned out to be refused.
type deniedError struct{ reason string }

func (e *deniedError) Error() string { return e.reason }

// closeWrite says that no more comes, where the connection can say so.
func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// remote is the address of the server itself, behind a proxy too.
func remote(c net.Conn) netip.Addr {
	if a, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		return a.Addr().Unmap()
	}
	return netip.Addr{}
}
