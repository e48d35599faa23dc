package testkit

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/testkit/testca"
)

// UpstreamOptions configures an Upstream. The zero value serves HTTP/1.1 without TLS.
type UpstreamOptions struct {
	TLS   bool
	HTTP2 bool     // in addition to HTTP/1.1; without TLS by prior knowledge
	Names []string // host names and addresses of the certificate; default *.example.com
	// Streamed leaves the request's body to the handler; otherwise the Upstream reads
	// all of it before it calls the handler, which then reads a copy.
	Streamed bool
	// Raw serves connections (after the TLS handshake) in place of HTTP. The
	// Upstream closes the connection when Raw returns.
	Raw func(net.Conn)
}

// Upstream is a server on 127.0.0.1 that requests under test are sent to. It records
// them and ends with the test.
type Upstream struct {
	server *httptest.Server // nil with Raw
	addr   netip.AddrPort
	ca     []byte
	stream bool

	mu       sync.Mutex
	handler  http.Handler
	requests []*UpstreamRequest
}

// UpstreamRequest is a request as an Upstream received it.
type UpstreamRequest struct {
	*http.Request // its Body belongs to the handler
	body          recording
}

// Text returns the body, as far as it was read.
func (r *UpstreamRequest) Text() string { return r.body.String() }

// recording stores what is written to it.
type recording struct {
	mu sync.Mutex
	b  strings.Builder
}

func (r *recording) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.Write(b)
}

func (r *recording) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.String()
}

// NewUpstream starts an Upstream. Until Handle is called, it responds to every request
// with "this is " and the request's host.
func NewUpstream(t testing.TB, o UpstreamOptions) *Upstream {
	t.Helper()
	u := &Upstream{stream: o.Streamed, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "this is "+r.Host)
	})}
	config := &tls.Config{}
	if o.TLS {
		if len(o.Names) == 0 {
			o.Names = []string{"*.example.com"}
		}
		leaf, ca, err := testca.New(o.Names...)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates, u.ca = []tls.Certificate{leaf}, ca
	}
	if o.Raw != nil {
		u.serveRaw(t, o, config)
		return u
	}
	u.server = httptest.NewUnstartedServer(http.HandlerFunc(u.serve))
	u.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	u.addr = addrPort(u.server.Listener)
	if o.TLS {
		u.server.TLS, u.server.EnableHTTP2 = config, o.HTTP2
		u.server.StartTLS()
	} else {
		u.server.Config.Protocols = new(http.Protocols)
		u.server.Config.Protocols.SetHTTP1(true)
		u.server.Config.Protocols.SetUnencryptedHTTP2(o.HTTP2)
		u.server.Start()
	}
	t.Cleanup(func() {
		u.server.CloseClientConnections() // a handler may wait for the end of its request
		u.server.Close()
	})
	return u
}

// serveRaw hands each connection to o.Raw, and ends them all with the test.
func (u *Upstream) serveRaw(t testing.TB, o UpstreamOptions, config *tls.Config) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.addr = addrPort(l)
	if o.TLS {
		l = tls.NewListener(l, config)
	}
	var serving sync.WaitGroup
	ctx, end := context.WithCancel(context.Background())
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					t.Errorf("accept: %v", err)
				}
				return
			}
			serving.Go(func() {
				defer conn.Close()
				defer context.AfterFunc(ctx, func() { conn.Close() })()
				o.Raw(conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		end()
		serving.Wait()
	})
}

func (u *Upstream) serve(w http.ResponseWriter, r *http.Request) {
	received := &UpstreamRequest{Request: r}
	body := io.TeeReader(r.Body, &received.body)
	var err error
	if !u.stream {
		_, err = io.Copy(io.Discard, body)
		body = strings.NewReader(received.Text())
	}
	u.mu.Lock()
	u.requests = append(u.requests, received)
	handler := u.handler
	u.mu.Unlock()
	if err != nil {
		panic(http.ErrAbortHandler) // the client is gone
	}
	copied := *r
	copied.Body = struct {
		io.Reader
		io.Closer
	}{body, r.Body}
	handler.ServeHTTP(w, &copied)
}

// Handle sets the handler of the requests that follow.
func (u *Upstream) Handle(h http.HandlerFunc) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.handler = h
}

// Requests returns the requests received so far, in the order in which their handlers
// were called.
func (u *Upstream) Requests() []*UpstreamRequest {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]*UpstreamRequest(nil), u.requests...)
}

// Last returns the request received last and ends the test if there is none.
func (u *Upstream) Last(t testing.TB) *UpstreamRequest {
	t.Helper()
	all := u.Requests()
	if len(all) == 0 {
		t.Fatal("the upstream received no request")
	}
	return all[len(all)-1]
}

// PEM returns the certificate of the authority that signed the server's; nil without TLS.
func (u *Upstream) PEM() []byte { return u.ca }

// Addr returns the address of the server.
func (u *Upstream) Addr() netip.AddrPort { return u.addr }

func addrPort(l net.Listener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }
