package intercept

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/requestid"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testca"
)

func TestMain(m *testing.M) {
	// net/http's server lingers for half a second after it refused a client.
	testkit.Main(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

const host = "api.example.com"

// rig is a sandbox's route to an upstream: listener, Server, Upstream, upstream server.
type rig struct {
	t           testing.TB
	addr        string // that the sandbox connects to
	trust       *x509.CertPool
	bundle      []byte // trust, in PEM
	upstream    *httptest.Server
	server      *Server
	filter      Filter
	crowded     bool
	smallWindow bool
	windows     *quota.Pool

	withoutTLS bool

	mu      sync.Mutex
	refused []*problem.Problem
	results chan Result
	log     *testkit.Log
}

type option func(*rig, *Destination, *UpstreamConfig)

func withoutTLS(r *rig, d *Destination, _ *UpstreamConfig) {
	r.withoutTLS, d.TLS, d.Port = true, false, 80
}

func filtered(f Filter) option {
	return func(r *rig, _ *Destination, _ *UpstreamConfig) { r.filter = f }
}

// start returns a rig whose upstream server responds with handler.
func start(t testing.TB, handler http.Handler, options ...option) *rig {
	t.Helper()
	r := &rig{t: t, results: make(chan Result, 1024), log: testkit.NewLog(t)}
	d := Destination{Host: host, Port: 443, TLS: true, Flow: "f1", Refused: func(req *http.Request, why *problem.Problem) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.refused = append(r.refused, why)
		_ = req.URL.EscapedPath() // read like in a real Refused function
	}}
	cfg := UpstreamConfig{}
	for _, o := range options {
		o(r, &d, &cfg)
	}
	r.upstream = httptest.NewUnstartedServer(handler)
	r.upstream.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	r.upstream.EnableHTTP2 = true
	if !d.TLS {
		p := new(http.Protocols)
		p.SetHTTP1(true)
		p.SetUnencryptedHTTP2(true)
		r.upstream.Config.Protocols = p
		r.upstream.Start()
	} else {
		r.upstream.TLS = &tls.Config{Certificates: []tls.Certificate{upstreamLeaf(t)}, NextProtos: []string{"h2", "http/1.1"}}
		r.upstream.StartTLS()
	}
	t.Cleanup(r.upstream.Close)
	if cfg.RootCAs == nil {
		cfg.RootCAs = upstreamCA().Pool()
	}
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, _ dial.Target) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", r.upstream.Listener.Addr().String())
		}
	}
	f := NewUpstream(cfg)
	t.Cleanup(f.Close)
	for r.crowded && len(f.ahead) < cap(f.ahead) {
		f.ahead <- struct{}{}
	}
	if d.Handler == nil {
		d.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			result := f.Do(w, req, Route{Flow: "f1", RequestID: req.Header.Get(requestid.Header), SmallWindow: r.smallWindow, Windows: r.windows}, r.filter)
			r.results <- result
			if result.Cut {
				panic(http.ErrAbortHandler)
			}
		})
	}
	r.listen(d)
	return r
}

// listen accepts connections and serves each as a connection to d.
func (r *rig) listen(d Destination) {
	r.t.Helper()
	authority := newAuthority()
	r.trust, r.bundle = authority.Pool(), authority.PEM()
	r.server = New(Config{Certificate: certificates(authority), Log: slog.New(slog.NewTextHandler(r.log, nil))})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { r.server.Serve(ctx, conn, d) })
		}
	})
	r.t.Cleanup(func() {
		l.Close()
		cancel()
		all.Wait()
	})
}

// upstreamCA signs the certificates of upstreams. Sandboxes do not trust it.
var upstreamCA = sync.OnceValue(newAuthority)

func newAuthority() *testca.Authority {
	a, err := testca.NewAuthority(pkix.Name{CommonName: "test"})
	if err != nil {
		panic(err)
	}
	return a
}

// certificates returns a Config.Certificate that signs by the authority.
func certificates(a *testca.Authority) func(context.Context, string) (*tls.Certificate, error) {
	return func(_ context.Context, host string) (*tls.Certificate, error) {
		leaf, err := a.Leaf(host)
		return &leaf, err
	}
}

func upstreamLeaf(t testing.TB) tls.Certificate {
	leaf, err := upstreamCA().Leaf(host)
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

// client returns a client in the sandbox that speaks only HTTP/1.1 or only HTTP/2.
func (r *rig) client(major int) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(major == 1)
	p.SetHTTP2(major == 2)
	p.SetUnencryptedHTTP2(major == 2)
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", r.addr)
		},
		TLSClientConfig: &tls.Config{RootCAs: r.trust}, Protocols: p, DisableCompression: true, MaxIdleConnsPerHost: 64,
		ExpectContinueTimeout: 1 << 40,
	}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// dialTLS connects like a client in the sandbox.
func (r *rig) dialTLS(serverName string, protocols ...string) *tls.Conn {
	r.t.Helper()
	conn, err := tls.Dial("tcp", r.addr, &tls.Config{ServerName: serverName, RootCAs: r.trust, InsecureSkipVerify: serverName != host, NextProtos: protocols})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

// refusals returns the refusals that the destination was notified of.
func (r *rig) refusals() []*problem.Problem {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused
}

// wantRefusal fails the test unless the response is a refusal with the code and its
// status, from flow f1, with text in its detail. It returns the refusal.
func wantRefusal(t *testing.T, res *http.Response, code problem.Code, text string) *problem.Problem {
	t.Helper()
	body := testkit.Body(t, res)
	why := &problem.Problem{}
	if err := json.Unmarshal([]byte(body), why); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	if res.StatusCode != code.Definition().Status || why.Status != res.StatusCode || why.Code != code || why.Host != host || why.Flow != "f1" ||
		why.Type != problem.TypeBase+code.String() || why.Title != code.Definition().Title || !strings.Contains(why.Detail, text) {
		t.Errorf("got %d %s, want %s with %q", res.StatusCode, body, code, text)
	}
	h := res.Header
	if h.Get("Content-Type") != problem.ContentType || h.Get("Cache-Control") != "no-store" || h.Get(problem.HeaderError) != code.String() || h.Get(problem.HeaderFlow) != "f1" ||
		why.RequestID == "" || h.Get(requestid.Header) != why.RequestID {
		t.Errorf("header %v", h)
	}
	return why
}

// connect connects like a client in the sandbox that speaks HTTP/1.1.
func (r *rig) connect() net.Conn {
	r.t.Helper()
	if !r.withoutTLS {
		return r.dialTLS(host, "http/1.1")
	}
	conn, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

// exchange sends raw bytes and returns all bytes that it receives.
func (r *rig) exchange(text string) string {
	r.t.Helper()
	conn := r.connect()
	io.WriteString(conn, text)
	all, _ := io.ReadAll(conn)
	return string(all)
}

// send sends one raw request and returns the response.
func (r *rig) send(conn net.Conn, text string) *http.Response {
	r.t.Helper()
	io.WriteString(conn, text)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { res.Body.Close() })
	return res
}

// both runs a test with an HTTP/1.1 and an HTTP/2 client.
func both(t *testing.T, run func(t *testing.T, major int)) {
	for _, major := range []int{1, 2} {
		t.Run("HTTP "+strconv.Itoa(major), func(t *testing.T) { run(t, major) })
	}
}

func loopback(a netip.AddrPort) bool { return a.Addr().IsLoopback() && a.Port() != 0 }
