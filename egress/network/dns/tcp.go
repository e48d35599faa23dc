package dns

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/miekg/dns"
)

// patience is how long a connection may be silent, and how long each query and each
// answer may take on it (RFC 7766, section 6.2.3, recommends some seconds).
const patience = 10 * time.Second

// ServeConn answers queries on a TCP connection, in their order, until the client
// closes its half, is silent for 10 seconds or sends a message that is not a query, or
// until ctx ends. It closes conn.
func (s *Server) ServeConn(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer conn.Close()
	buffer := make([]byte, maxQuery)
	for {
		if err := s.serveOne(ctx, &dns.Conn{Conn: conn}, buffer); err != nil {
			return // the client cannot be notified
		}
	}
}

func (s *Server) serveOne(ctx context.Context, conn *dns.Conn, buffer []byte) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	n, err := conn.Read(buffer) // fails if the message is larger
	if err != nil {
		return err
	}
	query := buffer[:n]
	if !isQuery(query) {
		return errors.New("not a query")
	}
	if err := s.limiter.Wait(ctx); err != nil {
		return err
	}
	answer := s.answer(query, dns.RcodeRefused)
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, err = conn.Write(answer)
	return err
}
