package intercept

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"net"
	"net/http"
	"strconv"
	"time"
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
	// continueTime is how long a host has to answer `Expect: 100-continue`
	// before it is sent the body unasked (as curl waits).
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
	wide, narrow transports
	ahead        chan struct{} // of downloads
}

// transports make connections with the same windows.
type transports struct {
	secure *http.Transport // https, and http by HTTP/1.1
	plain2 *http.Transport // http by HTTP/2
}

// NewForwarder returns a Forwarder. Close it.
func NewForwarder(cfg ForwarderConfig) *Forwarder {
	if cfg.Attempt == nil {
		cfg.Attempt = func(context.Context) (func(), error) { return func() {}, nil }
	}
	f := &Forwarder{cfg: cfg, sessions: tls.NewLRUClientSessionCache(tlsSessions), ahead: make(chan struct{}, maxAhead)}
	f.wide, f.narrow = f.transports(maxStreamAhead), f.transports(narrowStreamAhead)
	return f
}

// Close closes the connections that wait for a request. Those in use end with
// their requests.
func (f *Forwarder) Close() {
	for _, t := range []transports{f.wide, f.narrow} {
		t.secure.CloseIdleConnections()
		t.plain2.CloseIdleConnections()
	}
}

func (f *Forwarder) transports(ahead int) transports {
	t := transports{f.transport(ahead), f.transport(ahead)}
	t.secure.Protocols.SetHTTP1(true)
	t.secure.Protocols.SetHTTP2(true)
	t.plain2.Protocols.SetUnencryptedHTTP2(true)
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

// over returns the transport for a request. One without TLS goes on by the
// protocol it came by: there is no other way to know what the host speaks, and
// gRPC needs HTTP/2.
func (f *Forwarder) over(r *http.Request) *http.Transport {
	t := f.wide
	if f.cfg.Narrow != nil && f.cfg.Narrow(r.Context()) {
		t = f.narrow
	}
	if r.URL.Scheme == "http" && r.ProtoMajor == 2 {
		return t.plain2
	}
	return t.secure
}

// target is where a request goes: in its context, because the name by which the
// library dials is that of the pool.
type target struct {
	host    string
	port    uint16
	upgrade bool // by HTTP/1.1 only
}

type targetKey struct{}

// pooled returns the host of the URL by which the library finds connections.
// The encoding leaves no two pools and hosts with the same.
func (f *Forwarder) pooled(ctx context.Context, t target) string {
	key := make([]byte, 0, 128)
	if f.cfg.Pool != nil {
		key = hex.AppendEncode(key, []byte(f.cfg.Pool(ctx)))
		key = append(key, '.')
	}
	return net.JoinHostPort(string(append(key, t.host...)), strconv.Itoa(int(t.port)))
}

func (f *Forwarder) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	done, err := f.cfg.Attempt(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	t := ctx.Value(targetKey{}).(target)
	return f.cfg.Dial(ctx, t.host, t.port)
}

func (f *Forwarder) dialTLS(ctx context.Context, _, _ string) (net.Conn, error) {
	done, err := f.cfg.Attempt(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	t := ctx.Value(targetKey{}).(target)
	raw, err := f.cfg.Dial(ctx, t.host, t.port)
	if err != nil {
		return nil, err
	}
	protocols := []string{"h2", "http/1.1"}
	if t.upgrade {
		protocols = protocols[1:]
	}
	conn := tls.Client(raw, &tls.Config{
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
		return nil, &handshakeError{err}
	}
	return conn, nil
}

// handshakeError is TLS with a host that failed.
type handshakeError struct{ error }

func (e *handshakeError) Unwrap() error { return e.error }
