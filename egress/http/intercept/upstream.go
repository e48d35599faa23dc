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
	"net/netip"
	"net/textproto"
	"strconv"
	"sync"
	"time"

	"github.com/doze-run/doze/egress/http/http1"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
)

const (
	// idleInAll and idlePerHost limit the idle connections to upstreams, in all and
	// for one pool and host: beyond them the oldest is closed. A busy sandbox has
	// about as many connections; with a lower limit it would dial all the time.
	idleInAll, idlePerHost = 1024, 128
	// idleTime is below the 60 s after which many servers and load balancers
	// close such a connection, perhaps at the moment it is used again.
	idleTime = 50 * time.Second
	// handshakeTime is the time limit of a TLS handshake with an upstream, after the
	// connection was made.
	handshakeTime = 10 * time.Second
	// continueTime is how long an upstream has to respond to `Expect: 100-continue` over HTTP/2
	// before it is sent the body unasked.
	continueTime = time.Second
	// maxResponseHeader is the size limit of a response's header: some hosts set many cookies.
	maxResponseHeader = 256 << 10
	// maxStreamAhead limits the bytes of one HTTP/2 response that were received and
	// that its client has not read: with 2 MiB an upstream at 50 ms delivers 300
	// Mbit/s. For a sandbox that sleeps, the node holds up to this much of each
	// response that it waits for.
	maxStreamAhead = 2 << 20
	// smallStreamAhead is the same limit while many responses are pending.
	smallStreamAhead = 128 << 10
	// maxFrame is the size limit of an HTTP/2 frame. Upstreams that make use of it
	// send fewer and larger frames than the 16 KiB of the protocol.
	maxFrame = 64 << 10
	// An upstream that sends nothing on an HTTP/2 connection is pinged. Otherwise a
	// connection that the network dropped would swallow requests for minutes.
	pingAfter, pingTime = 30 * time.Second, 15 * time.Second
	// tlsSessions is the number of cached TLS sessions, which shorten the next handshake with a
	// host.
	tlsSessions = 1024
)

// UpstreamConfig configures how upstreams are reached. Dial is required.
type UpstreamConfig struct {
	// Dial connects to an upstream, as (*dial.Dialer).Dial does. Its context has the
	// values of the request for which the connection is made, but may outlive it.
	Dial func(ctx context.Context, to dial.Target) (net.Conn, error)
	// RootCAs verify the certificates of upstreams. nil: the system's.
	RootCAs *x509.CertPool
}

// Route has the connections that a request may use, and the limits that apply to it.
type Route struct {
	// Pool names the connections that the request may use: requests with different
	// names never share one.
	Pool string
	// Private permits an upstream at a private address. Requests with another value never
	// share a connection.
	Private bool
	// SmallWindow limits the part of an HTTP/2 response that may wait in the node to 128
	// KiB, instead of 2 MiB.
	SmallWindow bool
	// Dials limits the connections that are being made, including TLS. Some outlive their
	// requests. nil: any number.
	Dials *quota.Pool
	// Windows limits the decoders of filtered responses that take megabytes: 16 MiB for br
	// and some 10 MiB for zstd. Beyond the limit, requests do not accept these codings. nil:
	// any number.
	Windows *quota.Pool
	// Flow and RequestID identify the request in refusals. RequestID is the client's
	// X-Request-Id, or empty: the header of the request may have become a secret.
	Flow, RequestID string
}

// Upstream sends requests to their upstreams. It is safe for concurrent use.
type Upstream struct {
	cfg          UpstreamConfig
	sessions     tls.ClientSessionCache
	idle         *http1.Pool   // HTTP/1.1 connections
	large, small transports    // by their windows
	ahead        chan struct{} // of downloads
}

// transports make HTTP/2 connections with the same windows.
type transports struct {
	secure *http.Transport // for https
	plain  *http.Transport // for http
}

// NewUpstream returns an Upstream. Close it.
func NewUpstream(cfg UpstreamConfig) *Upstream {
	u := &Upstream{cfg: cfg, sessions: tls.NewLRUClientSessionCache(tlsSessions), ahead: make(chan struct{}, maxAhead)}
	u.idle = http1.NewPool(idleInAll, idlePerHost, idleTime)
	u.large, u.small = u.transports(maxStreamAhead), u.transports(smallStreamAhead)
	return u
}

// Close closes idle connections. Those in use end with their requests.
func (u *Upstream) Close() {
	u.idle.CloseIdle()
	for _, t := range []transports{u.large, u.small} {
		t.secure.CloseIdleConnections()
		t.plain.CloseIdleConnections()
	}
}

func (u *Upstream) transports(ahead int) transports {
	t := transports{u.transport(ahead), u.transport(ahead)}
	t.secure.Protocols.SetHTTP2(true)
	t.plain.Protocols.SetUnencryptedHTTP2(true)
	return t
}

func (u *Upstream) transport(ahead int) *http.Transport {
	return &http.Transport{
		DialContext:            u.dial,
		DialTLSContext:         u.dialTLS,
		DisableCompression:     true, // the client's header decides
		MaxIdleConns:           idleInAll,
		MaxIdleConnsPerHost:    idlePerHost,
		IdleConnTimeout:        idleTime,
		ExpectContinueTimeout:  continueTime,
		MaxResponseHeaderBytes: maxResponseHeader,
		Protocols:              new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: ahead,
			MaxReadFrameSize:          maxFrame,
			SendPingTimeout:           pingAfter,
			PingTimeout:               pingTime,
		},
	}
}

// roundTrip sends a request upstream. Without TLS it uses the protocol of the client: the
// protocol of the upstream cannot be known otherwise, and gRPC needs HTTP/2. With TLS the
// upstream chooses when it is dialed; an idle connection of HTTP/1.1 is reused.
//
// It calls informed for each 1xx response except 100 and 101.
func (u *Upstream) roundTrip(r *http.Request, to *target, version int, informed func(int, textproto.MIMEHeader) error) (*http.Response, error) {
	t := u.large
	if to.SmallWindow {
		t = u.small
	}
	traced := func() *http.Request {
		ctx := context.WithValue(r.Context(), targetKey{}, to)
		return r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
			GotConn:        func(info httptrace.GotConnInfo) { to.connected(info.Conn) },
			Got1xxResponse: informed,
		}))
	}
	secure := r.URL.Scheme == "https"
	if !secure && version == 2 {
		return t.plain.RoundTrip(traced())
	}
	key := r.URL.Scheme + "://" + r.URL.Host
	if to.upgrade { // otherwise other requests would use HTTP/1.1 with an upstream that speaks HTTP/2
		key += " upgrade"
	}
	send := func(c *http1.Conn) (*http.Response, error) {
		to.connected(c)
		return c.RoundTrip(r, informed, func(reusable bool) {
			if reusable {
				u.idle.Put(key, c)
			}
		})
	}
	if c := u.idle.Get(key); c != nil {
		res, err := send(c)
		if !errors.Is(err, http1.ErrStale) || !repeatable(r) {
			return res, err
		}
	}
	if !secure || to.upgrade {
		var protocols []string
		if secure {
			protocols = []string{"http/1.1"}
		}
		conn, raw, err := u.connect(r.Context(), to, protocols...)
		if err != nil {
			return nil, err
		}
		return send(http1.NewConn(conn, raw, maxResponseHeader))
	}
	to.unused = func(c *http1.Conn) { u.idle.Put(key, c) }
	res, err := t.secure.RoundTrip(traced())
	if c := to.accept(); c != nil {
		if errors.Is(err, errHTTP1) {
			if body, ok := r.Body.(*upload); ok {
				body.closed.Store(false) // net/http closed it without reading from it
			}
			return send(c)
		}
		u.idle.Put(key, c) // net/http has used another connection
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

// target is where one request goes. net/http dials by the pool's key, so requests that it
// sends have their target in the context.
type target struct {
	Route
	host    string
	port    uint16
	upgrade bool // by HTTP/1.1 only

	mu      sync.Mutex
	address netip.AddrPort    // of the latest connection
	conn    *http1.Conn       // dialed for the request; the upstream speaks HTTP/1.1
	done    bool              // the request does not need a connection any more
	unused  func(*http1.Conn) // gets a connection that was dialed too late
}

func newTarget(r *http.Request, to Route) *target {
	t := &target{Route: to, host: r.URL.Hostname(), port: defaultPort(r.URL.Scheme), upgrade: isWebSocket(upgradeOf(r.Header))}
	if _, port, ok := splitAuthority(r.URL.Host); ok && port != 0 {
		t.port = port
	}
	return t
}

// poolKey returns the host of the URL by which net/http finds connections. No two routes
// and hosts have the same.
func (t *target) poolKey() string {
	key := make([]byte, 0, 128)
	if t.Pool != "" || t.Private {
		key = hex.AppendEncode(key, []byte(t.Pool))
		if t.Private {
			key = append(key, "-private"...)
		}
		key = append(key, '.')
	}
	return net.JoinHostPort(string(append(key, t.host...)), strconv.Itoa(int(t.port)))
}

// connected records the address of a connection that is used for the request.
func (t *target) connected(c interface{ RemoteAddr() net.Addr }) {
	if a, ok := c.RemoteAddr().(interface{ AddrPort() netip.AddrPort }); ok {
		t.mu.Lock()
		t.address = a.AddrPort()
		t.mu.Unlock()
	}
}

// errHTTP1 is returned to net/http's transport, which is for HTTP/2, instead of a connection.
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

// dial connects to an upstream for HTTP/2 without TLS.
func (u *Upstream) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	conn, _, err := u.connect(ctx, ctx.Value(targetKey{}).(*target))
	return conn, err
}

// dialTLS connects to an upstream whose protocol is not known. It hands a connection of
// HTTP/1.1 to the request's target and returns errHTTP1.
func (u *Upstream) dialTLS(ctx context.Context, _, _ string) (net.Conn, error) {
	t := ctx.Value(targetKey{}).(*target)
	conn, raw, err := u.connect(ctx, t, "h2", "http/1.1")
	if err != nil {
		return nil, err
	}
	if conn.(*tls.Conn).ConnectionState().NegotiatedProtocol == "h2" {
		return conn, nil
	}
	t.offer(http1.NewConn(conn, raw, maxResponseHeader))
	return nil, errHTTP1
}

// errDials refuses a request that would need another connection.
var errDials = &Failure{
	Code:   problem.EgressLimitExceeded,
	Reason: "a limit was reached: connections being established to servers",
	Denied: true,
}

// connect dials an upstream. With protocols, conn is TLS over raw, and the upstream chooses
// one of them; otherwise it is raw.
func (u *Upstream) connect(ctx context.Context, t *target, protocols ...string) (conn, raw net.Conn, err error) {
	if t.Dials != nil && t.Dials.TryAcquire(1) != nil {
		return nil, nil, errDials
	}
	defer t.Dials.Release(1)
	raw, err = u.cfg.Dial(ctx, dial.Target{Host: t.host, Port: t.port, Private: t.Private})
	if refused, ok := errors.AsType[*dial.RefusedError](err); ok {
		err = &Failure{Code: problem.EgressDenied, Reason: refused.Error(), Err: refused, Denied: true}
	}
	if err != nil || protocols == nil {
		return raw, raw, err
	}
	secured := tls.Client(raw, &tls.Config{
		ServerName:         t.host,
		RootCAs:            u.cfg.RootCAs,
		NextProtos:         protocols,
		MinVersion:         tls.VersionTLS12,
		ClientSessionCache: u.sessions,
	})
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, nil, &handshakeError{err}
	}
	return secured, raw, nil
}

// handshakeError is a failed TLS handshake with an upstream.
type handshakeError struct{ error }

func (e *handshakeError) Unwrap() error { return e.error }
