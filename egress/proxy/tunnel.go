package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/doze-run/doze/egress/http/intercept"
	"github.com/doze-run/doze/problem"
)

// Conn is a client's connection to its destination.
type Conn interface {
	net.Conn
	io.WriterTo
	io.ReaderFrom
	// CloseWrite ends the data to the client.
	CloseWrite() error
	// Abort ends the connection so that the client can detect that it was cut. After
	// Close it does nothing.
	Abort()
}

// ErrDecided means that the tunnel was already accepted or refused.
var ErrDecided = errors.New("the tunnel is decided on")

// Tunnel is a CONNECT request without a response yet.
type Tunnel struct {
	w       http.ResponseWriter
	r       *http.Request
	decided bool
	conn    Conn // set if it was accepted; over HTTP/2 a *stream
}

// Accept responds that the connection is established. The Conn is closed when
// Egress.Connect returns, at the latest.
func (t *Tunnel) Accept() (Conn, error) {
	if t.decided {
		return nil, ErrDecided
	}
	t.decided = true
	if t.r.ProtoMajor >= 2 {
		t.w.WriteHeader(http.StatusOK)
		s := newStream(t.w, t.r)
		t.conn = s
		if err := s.flush(); err != nil {
			return nil, fmt.Errorf("respond to a CONNECT: %w", err)
		}
		return s, nil
	}
	conn, buffered, err := http.NewResponseController(t.w).Hijack()
	if err != nil {
		return nil, fmt.Errorf("hijack the connection of a CONNECT: %w", err)
	}
	t.conn = &hijacked{Conn: conn, early: buffered.Reader}
	if _, err := io.WriteString(conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return nil, fmt.Errorf("respond to a CONNECT: %w", err)
	}
	return t.conn, nil
}

// Refuse responds with the reason for refusing the connection.
func (t *Tunnel) Refuse(why *problem.Problem) {
	if t.decided {
		return
	}
	t.decided = true
	intercept.Refuse(t.w, t.r, why)
}

// closeConns closes connections that Egress.Connect left open. HTTP/2 clients receive a
// reset of their stream if the connection was cut.
func (t *Tunnel) closeConns() {
	if t.conn != nil {
		t.conn.Close()
	}
	if s, ok := t.conn.(*stream); ok && s.wait() {
		panic(http.ErrAbortHandler)
	}
}

// hijacked is an HTTP/1.1 connection that became a tunnel.
type hijacked struct {
	net.Conn
	early *bufio.Reader // bytes that arrived with the request; nil once they are read
}

func (c *hijacked) Read(p []byte) (int, error) {
	if c.early == nil {
		return c.Conn.Read(p)
	}
	if n := c.early.Buffered(); n > 0 {
		return c.early.Read(p[:min(n, len(p))])
	}
	c.early = nil
	return c.Conn.Read(p)
}

func (c *hijacked) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, onlyReader{c}) }

func (c *hijacked) ReadFrom(r io.Reader) (int64, error) { return io.Copy(onlyWriter{c}, onlyReader{r}) }

func (c *hijacked) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// Abort closes the connection below TLS, which then ends without a close_notify alert.
// Without TLS, it resets the connection.
func (c *hijacked) Abort() {
	below := c.Conn
	for {
		inner, ok := below.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		below = inner.NetConn()
	}
	if tcp, ok := below.(interface{ SetLinger(int) error }); ok && below == c.Conn {
		_ = tcp.SetLinger(0) // on an error, Close closes it normally
	}
	below.Close()
}

// onlyReader and onlyWriter hide the WriteTo and ReadFrom methods, with which io.Copy
// would recurse.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)
