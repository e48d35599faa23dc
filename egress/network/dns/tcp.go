package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
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
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer conn.Close()
	for {
		if err := s.serveOne(ctx, conn); err != nil {
			return // the client cannot be notified
		}
	}
}

var errNoQuery = errors.New("no query")

func (s *Server) serveOne(ctx context.Context, conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint16(length[:])
	if n < headerSize || n > maxQuery {
		return errNoQuery
	}
	query := make([]byte, n)
	if _, err := io.ReadFull(conn, query); err != nil {
		return err
	}
	if !isQuery(query) {
		return errNoQuery
	}
	if err := s.limiter.Wait(ctx); err != nil {
		return err
	}
	answer := s.answer(query, dns.RcodeRefused)
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
	return err
}
