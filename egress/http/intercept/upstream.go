package intercept

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"sync"
	"time"

	"github.com/doze-run/doze/egress/http/http1"
)

const (
	// Kept connections to hosts that wait for the next request, in all and for
	// one pool and host: beyond that the oldest is closed. As many as a busy
	// sandbox has connections, or it would make new ones all the time.
	idleInAll, idlePerHost = 1024, 128
	// idleTime is below the 60 s after which many servers and load balancers
	// close such a connection, perhaps at the moment it is used again.
	idleTime = 50 * time.Second
	// handshakeTime is for TLS with a host, after the connection was made.
	handshakeTime = 10 * time.Second
	// continueTime is how long a host has to answer `Expect: 100-continue` over HTTP/2
	// before it is sent the body unasked.
	continueTime = time.Second
	// maxAnswerHeader is of an answer's header: some hosts set many cookies.
	maxAnswerHeader = 256 << 10
	// maxStreamAhead is what one HTTP/2 answer may have sent that its client has
	// not taken: with 2 MiB a host at 50 ms delivers 300 Mbit/s. A sandbox that
	// sleeps leaves this much in the node for each answer that it waits for.
	maxStreamAhead = 2 << 20
	// narrowStreamAhead is the same where many answers are awaited at a time.
	narrowStreamAhead = 128 << 10
	// maxFrame of HTTP/2: fewer and larger frames than the 16 KiB of the
	// protocol, from hosts that make use of it.
	maxFrame = 64 << 10
	// A host that sends nothing on an HTTP/2 connection is asked whether it is
	// still there. Without that a connection which the network forgot would
	// swallow requests for minutes.
	pingAfter, pingTime = 30 * time.Second, 15 * time.Second
	// tlsSessions are kept so that the next handshake with a host is short.
	tlsSessions = 1024
)

// ForwarderConfig says how hosts are reached. Dial is required.
type ForwarderConfig struct {
	// Attempt is asked before a connection is made, and its done called when that
	// stands, with TLS, or failed. Like Dial it may outlive the request. nil: any
	// number may be made.
	Attempt func(ctx context.Context) (done func(), err error)
	// Dial connects to a host. Its context has the values of the request for
	// which the connection is made, but may outlive it. An error that is a
	// *RefusedError is told to the client as a refusal.
	Dial func(ctx context.Context, host string, port uint16) (net.Conn, error)
	// Pool names whose connections a request may use: requests with different
	// names never share one. Whatever Dial decides by, but for host and port,
	// belongs into it. nil: all share.
	Pool func(ctx context.Context) string
	// Narrow says that a request is one of so many that no more than 128 KiB of its
	// answer may wait in the node, where others have up to 2 MiB. nil: none is.
	Narrow func(ctx context.Context) bool
	// RootCAs that hosts' certificates are verified against. nil: the system's.
	RootCAs *x509.CertPool
}

// Forwarder sends requests to the hosts that they are for. It may be used by
// several goroutines.
type Forwarder struct {
	cfg          ForwarderConfig
	sessions     tls.ClientSessionCache
	idle         *http1.Pool // connections of HTTP/1.1
	wide, narrow transports
	ahead        chan struct{} // of downloads
}

// transports make connections of HTTP/2 with the same windows.
type transports struct {
	secure *http.Transport // for https
	plain  *http.Transport // for http
}

// NewForwarder returns a Forwarder. Close it.
func NewForwarder(cfg ForwarderConfig) *Forwarder {
	if cfg.Attempt == nil {
		cfg.Attempt = func(context.Context) (func(), error) { return func() {}, nil }
	}
	f := &Forwarder{cfg: cfg, sessions: tls.NewLRUClientSessionCache(tlsSessions), ahead: make(chan struct{}, maxAhead)}
	f.idle = http1.NewPool(idleInAll, idlePerHost, idleTime)
	f.wide, f.narrow = f.transports(maxStreamAhead), f.transports(narrowStreamAhead)
	return f
}

// Close closes the connections that wait for a request. Those in use end with
// their requests.
func (f *Forwarder) Close() {
	f.idle.CloseIdle()
	for _, t := range []transports{f.wide, f.narrow} {
		t.secure.CloseIdleConnections()
		t.plain.CloseIdleConnections()
	}
}

func (f *Forwarder) transports(ahead int) transports {
	t := transports{f.transport(ahead), f.transport(ahead)}
	t.secure.Protocols.SetHTTP2(true)
	t.plain.Protocols.SetUnencryptedHTTP2(true)
	return t
}

func (f *Forwarder) transport(ahead int) *http.Transport {
	return &http.Transport{
		DialContext:            f.dial,
		DialTLSContext:         f.dialTLS,
		DisableCompression:     true, // what the client did not ask for
		MaxIdleConns:           idleInAll,
		MaxIdleConnsPerHost:    idlePerHost,
		IdleConnTimeout:        idleTime,
		ExpectContinueTimeout:  continueTime,
		MaxResponseHeaderBytes: maxAnswerHeader,
		Protocols:              new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: ahead,
			MaxReadFrameSize:          maxFrame,
			SendPingTimeout:           pingAfter,
			PingTimeout:               pingTime,
		},
	}
}

// roundTrip sends a request upstream. Without TLS it uses the protocol of the client: there
// is no other way to know what the upstream speaks, and gRPC needs HTTP/2. With TLS the
// upstream chooses when it is dialed; an idle connection of HTTP/1.1 is reused.
//
// It calls connected for each connection that it uses, and informed for each 1xx response
// except 100 and 101.
func (f *Forwarder) roundTrip(r *http.Request, to *target, version int, connected func(net.Addr), informed func(int, textproto.MIMEHeader) error) (*http.Response, error) {
	t := f.wide
	if f.cfg.Narrow != nil && f.cfg.Narrow(r.Context()) {
		t = f.narrow
	}
	traced := func() *http.Request {
		ctx := context.WithValue(r.Context(), targetKey{}, to)
		return r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotConn:        func(info httptrace.GotConnInfo) { connected(info.Conn.RemoteAddr()) },
			Got1xxResponse: informed,
		}))
	}
	secure := r.URL.Scheme == "https"
	if !secure && version == 2 {
		return t.plain.RoundTrip(traced())
	}
	key := r.URL.Scheme + "://" + r.URL.Host
	if to.upgrade { // others would get HTTP/1.1 of an upstream that speaks HTTP/2
		key += " upgrade"
	}
	send := func(c *http1.Conn) (*http.Response, error) {
		connected(c.RemoteAddr())
		return c.RoundTrip(r, informed, func(reusable bool) {
			if reusable {
				f.idle.Put(key, c)
			}
		})
	}
	if c := f.idle.Get(key); c != nil {
		res, err := send(c)
		if !errors.Is(err, http1.ErrStale) || !repeatable(r) {
			return res, err
		}
	}
	if !secure || to.upgrade {
		c, err := f.connect(r.Context(), to, secure)
		if err != nil {
			return nil, err
		}
		return send(c)
	}
	to.unused = func(c *http1.Conn) { f.idle.Put(key, c) }
	res, err := t.secure.RoundTrip(traced())
	if c := to.accept(); c != nil {
		if errors.Is(err, errHTTP1) {
			if u, ok := r.Body.(*upload); ok {
				u.closed.Store(false) // by net/http, which has not read from it
			}
			return send(c)
		}
		f.idle.Put(key, c) // net/http has used another connection
	}
	return res, err
}

// repeatable reports whether a request may be sent again (RFC 9110, section 9.2.2).
func repeatable(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return r.Body == nil
	}
	return false
}

// target is where a request goes. net/http dials by the pool's key, so requests that it
// sends have their target in the context.
type target struct {
	host    string
	port    uint16
	upgrade bool // by HTTP/1.1 only

	mu     sync.Mutex
	conn   *http1.Conn       // dialed for the request; the upstream speaks HTTP/1.1
	done   bool              // the request does not need a connection any more
	unused func(*http1.Conn) // gets a connection that was dialed too late
}

// errHTTP1 is what net/http's transport, which is for HTTP/2, gets instead of a connection.
var errHTTP1 = errors.New("the upstream speaks HTTP/1.1")

// offer hands over a connection that was dialed for the request.
func (t *target) offer(c *http1.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done {
		t.unused(c)
		return
	}
	t.conn = c
}

// accept returns the connection that was dialed for the request, or nil. Later ones are
// unused.
func (t *target) accept() *http1.Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done = true
	return t.conn
}

type targetKey struct{}

// pooled returns the host of the URL by which the library finds connections.
// The encoding leaves no two pools and hosts with the same.
func (f *Forwarder) pooled(ctx context.Context, t *target) string {
	key := make([]byte, 0, 128)
	if f.cfg.Pool != nil {
		key = hex.AppendEncode(key, []byte(f.cfg.Pool(ctx)))
		key = append(key, '.')
	}
	return net.JoinHostPort(string(append(key, t.host...)), strconv.Itoa(int(t.port)))
}

// dial is for HTTP/2 without TLS.
func (f *Forwarder) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	done, err := f.cfg.Attempt(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	t := ctx.Value(targetKey{}).(*target)
	return f.cfg.Dial(ctx, t.host, t.port)
}

// dialTLS is for upstreams whose protocol is not known. It hands a connection of HTTP/1.1
// to the request's target and returns errHTTP1.
func (f *Forwarder) dialTLS(ctx context.Context, _, _ string) (net.Conn, error) {
	done, err := f.cfg.Attempt(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	t := ctx.Value(targetKey{}).(*target)
	conn, raw, err := f.handshake(ctx, t, "h2", "http/1.1")
	if err != nil {
		return nil, err
	}
	if conn.ConnectionState().NegotiatedProtocol == "h2" {
		return conn, nil
	}
	t.offer(http1.NewConn(conn, raw, maxAnswerHeader))
	return nil, errHTTP1
}

// connect dials an upstream by HTTP/1.1.
func (f *Forwarder) connect(ctx context.Context, t *target, secure bool) (*http1.Conn, error) {
	done, err := f.cfg.Attempt(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if !secure {
		raw, err := f.cfg.Dial(ctx, t.host, t.port)
		if err != nil {
			return nil, err
		}
		return http1.NewConn(raw, raw, maxAnswerHeader), nil
	}
	conn, raw, err := f.handshake(ctx, t, "http/1.1")
	if err != nil {
		return nil, err
	}
	return http1.NewConn(conn, raw, maxAnswerHeader), nil
}

// handshake dials an upstream by TLS and offers it the protocols.
func (f *Forwarder) handshake(ctx context.Context, t *target, protocols ...string) (conn *tls.Conn, raw net.Conn, err error) {
	raw, err = f.cfg.Dial(ctx, t.host, t.port)
	if err != nil {
		return nil, nil, err
	}
	conn = tls.Client(raw, &tls.Config{
		ServerName:         t.host,
		RootCAs:            f.cfg.RootCAs,
		NextProtos:         protocols,
		MinVersion:         tls.VersionTLS12,
		ClientSessionCache: f.sessions,
	})
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, nil, &handshakeError{err}
	}
	return conn, raw, nil
}

// handshakeError is TLS with a host that failed.
type handshakeError struct{ error }

func (e *handshakeError) Unwrap() error { return e.error }
