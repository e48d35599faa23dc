// Package intercept serves HTTP to a sandbox in the name of an upstream, and forwards
// the requests to that upstream.
//
// A Server accepts a connection whose destination is known, completes its TLS with a
// certificate for that host, and hands each request to the destination's
// handler, which sends it on through an Upstream: that streams both ways, whatever the
// size, and passes the whole response through a Filter.
package intercept

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/doze-run/doze/egress/http/http1"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/redact"
)

const (
	// maxHeader is the size limit of all fields of a request's header; larger ones
	// get 431. Cookies and tokens take up to 16 KiB; the limits of servers are 8 to
	// 64 KiB.
	maxHeader = 64 << 10
	// maxStreams is the limit of concurrent requests on an HTTP/2 connection, as in
	// most servers.
	maxStreams = 250
	// maxUploadStream and maxUpload limit the bytes that a sandbox has sent on an
	// HTTP/2 connection and that were not forwarded yet, per stream and in all. The
	// kernel of the sandbox is 0.1 ms away.
	maxUploadStream, maxUpload = 256 << 10, 512 << 10
)

// Config of a Server.
type Config struct {
	// Certificate returns the certificate for connections to the host.
	Certificate func(ctx context.Context, host string) (*tls.Certificate, error)
	// Log receives the panics of handlers.
	Log *slog.Logger
}

// Destination is the upstream of a connection, and the handler of its requests.
type Destination struct {
	Host string // clean: lower case, no dot at the end; or the text of an address
	Port uint16
	TLS  bool
	Flow string // of refusals
	// Handler is called with requests that match the destination. Their URL is
	// absolute, with the path as it was sent. Their header does not have the fields
	// that apply to the client's connection only (RFC 9110, section 7.6.1), except
	// Te: trailers and the fields that request a WebSocket.
	Handler http.Handler
	// Refused is called for requests that the Server refuses because they do not match
	// the destination, or because they are malformed HTTP/1.1: then r has an empty method
	// and path. May be nil.
	Refused func(r *http.Request, why *problem.Problem)
}

func (d *Destination) refuse(w http.ResponseWriter, r *http.Request, why *problem.Problem) {
	why = why.WithFlow(d.Host, "", d.Flow)
	if d.Refused != nil {
		d.Refused(r, why)
	}
	Refuse(w, r, why)
}

// Server speaks HTTP/1.1 and HTTP/2 with sandboxes. It may serve any number of
// connections at a time; the caller limits their number.
//
// It sets no time limits for a sandbox: a sleeping one can neither finish a
// header nor use an idle connection, and both are unchanged when it wakes.
type Server struct {
	cfg   Config
	tls   *tls.Config
	http2 *http.Server
}

// New returns a Server, which has no goroutines except for connections and needs no Close.
func New(cfg Config) *Server {
	s := &Server{cfg: cfg}
	s.tls = &tls.Config{
		MinVersion:     tls.VersionTLS12,
		NextProtos:     []string{"h2", "http/1.1"},
		GetCertificate: s.certificate,
		// Small records help a browser over a slow network. This one has none.
		DynamicRecordSizingDisabled: true,
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true) // with prior knowledge: gRPC without TLS
	s.http2 = &http.Server{
		Handler:        s,
		MaxHeaderBytes: maxHeader,
		Protocols:      protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReceiveBufferPerStream:     maxUploadStream,
			MaxReceiveBufferPerConnection: maxUpload,
		},
		BaseContext: func(l net.Listener) context.Context {
			c := l.(*connection)
			return context.WithValue(c.ctx, connectionKey{}, c)
		},
		DisableGeneralOptionsHandler: true, // of `OPTIONS *`
		ErrorLog:                     log.New(redact.NewLibrary(cfg.Log, slog.LevelDebug), "", 0),
	}
	return s
}

// Serve serves the client on conn until the connection and all its handlers have ended.
// The end of ctx closes the connection. Serve closes conn in any case. d's Handler and
// Refused do not run after it has returned.
//
// An error is a failed TLS handshake, mostly with a client that does not trust the
// certificate, or the alert of a client that ended TLS without a request, for instance
// because it requires Encrypted Client Hello. Later failures are reported to the client.
func (s *Server) Serve(ctx context.Context, conn net.Conn, d Destination) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := newConnection(ctx, conn, &d)
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if d.TLS {
		c.tls = tls.Server(c.wire, s.tls)
		if err := c.tls.HandshakeContext(c.ctx); err != nil {
			return fmt.Errorf("TLS with a client of %s: %w", d.Host, err)
		}
		c.serverName = c.tls.ConnectionState().ServerName
	}
	if err := s.speak(c); err != nil {
		return err
	}
	cancel()
	c.endHandlers()
	if c.tls != nil && c.entered.Load() == 0 {
		c.Close()
		if err := rejection(c.tls); err != nil {
			return fmt.Errorf("TLS with a client of %s: %w", d.Host, err)
		}
	}
	return nil
}

// speak serves the connection in the protocol of its client.
func (s *Server) speak(c *connection) error {
	switch {
	case c.tls == nil:
		start, is := readPreface(c.wire)
		in := io.MultiReader(bytes.NewReader(start), c.wire)
		if !is {
			s.serveHTTP1(c, c.wire, in)
			return nil
		}
		c.served = &prefaced{c.wire, in}
	case c.tls.ConnectionState().NegotiatedProtocol == "h2":
		c.served = c.tls
	default:
		s.serveHTTP1(c, c.tls, c.tls)
		return nil
	}
	if err := s.http2.Serve(c); !errors.Is(err, net.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// serveHTTP1 serves a connection by HTTP/1.1. It reads from in, which is conn or conn with
// data that was read before.
func (s *Server) serveHTTP1(c *connection, conn net.Conn, in io.Reader) {
	w := &writer{wire: c.wire}
	server := http1.Server{
		Handler: func(response http.ResponseWriter, r *http.Request) {
			w.ResponseWriter = response
			s.handle(w, r, c)
		},
		Refuse:  c.to.refuse,
		MaxHead: maxHeader,
	}
	server.Serve(c.ctx, conn, in)
}

// preface is the start of an HTTP/2 connection from a client (RFC 9113, section 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// readPreface reads from a connection as long as the bytes match the preface, and reports
// whether they are all of it. The next Read returns the error that ends the connection
// again.
func readPreface(conn io.Reader) (start []byte, is bool) {
	start = make([]byte, 0, len(preface))
	for len(start) < len(preface) && strings.HasPrefix(preface, string(start)) {
		n, err := conn.Read(start[len(start):cap(start)])
		start = start[:len(start)+n]
		if err != nil {
			break
		}
	}
	return start, string(start) == preface
}

// prefaced is a connection whose first bytes were already read.
type prefaced struct {
	net.Conn
	in io.Reader
}

func (p *prefaced) Read(b []byte) (int, error) { return p.in.Read(b) }

// rejection returns the alert with which the client ended a connection that is closed, or
// nil.
func rejection(t *tls.Conn) error {
	_, err := t.Read(make([]byte, 1)) // returns the error of the last Read again
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" { // the form of alerts in crypto/tls
		return err
	}
	return nil
}

func (s *Server) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return s.cfg.Certificate(hello.Context(), hello.Conn.(*wire).of.to.Host)
}

// ServeHTTP handles a request over HTTP/2. net/http passes its connection in the context.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.handle(w, r, r.Context().Value(connectionKey{}).(*connection))
}

// handle passes a request to the handler of its connection's destination.
func (s *Server) handle(w http.ResponseWriter, r *http.Request, c *connection) {
	if !c.enter() { // the connection has ended, and so has the response
		panic(http.ErrAbortHandler)
	}
	defer c.handlers.Done()
	s.serve(w, r, c.to, c.serverName)
}

// ServeRequest is Serve for one request that arrived with an absolute URI on a connection
// to a proxy, and not on a connection to its destination.
func (s *Server) ServeRequest(w http.ResponseWriter, r *http.Request, d Destination) {
	r = r.WithContext(r.Context())
	target := *r.URL // r's own URL belongs to the caller
	r.URL, r.RequestURI = &target, target.RequestURI()
	s.serve(w, r, &d, d.Host)
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, to *Destination, serverName string) {
	defer s.report(to, r)
	if why := to.disagrees(r, serverName); why != nil {
		to.refuse(w, r, why)
		return
	}
	to.complete(r)
	toHost(r.Header)
	to.Handler.ServeHTTP(w, r)
}

// report logs the panic of a handler. The client sees its stream end.
func (s *Server) report(to *Destination, r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		s.cfg.Log.Error("request handler panicked", "host", to.Host, "method", r.Method, "panic", redact.Panic(v), "stack", string(debug.Stack()))
	}
	panic(http.ErrAbortHandler)
}

// connection is a sandbox's connection, and also the listener from which net/http accepts
// it if it speaks HTTP/2. One http.Server is therefore enough for all connections, and
// its Serve returns when the connection has ended.
type connection struct {
	to         *Destination
	ctx        context.Context // of its requests
	serverName string          // of its TLS
	raw        net.Conn
	wire       *wire     // over raw
	tls        *tls.Conn // over wire; nil: none
	served     net.Conn  // by net/http
	accepted   bool      // used by Accept only

	closing sync.Once
	err     error         // of closing
	closed  chan struct{} // closed with raw

	entered atomic.Int64 // number of handlers that have begun

	handlers sync.WaitGroup
	mu       sync.Mutex
	ended    bool // no handler begins any more
}

type connectionKey struct{}

func newConnection(ctx context.Context, raw net.Conn, to *Destination) *connection {
	c := &connection{to: to, ctx: ctx, raw: raw, closed: make(chan struct{})}
	c.wire = &wire{Conn: raw, of: c}
	return c
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

// Addr returns the connection's local address.
func (c *connection) Addr() net.Addr { return c.raw.LocalAddr() }

// enter registers a handler and returns true, unless the connection has ended.
func (c *connection) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.handlers.Add(1)
	c.entered.Add(1)
	return true
}

// endHandlers prevents new handlers of the connection, and returns when none runs.
func (c *connection) endHandlers() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.handlers.Wait()
}
