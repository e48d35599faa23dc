package wakeproxy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

const (
	testID    = sandbox.ID("k3f9x2m7q1az")
	testToken = "8d1fabcdefghjkmnpqrs"
	domain    = "preview.example.com"
)

// fakeNode is a Sandboxes with one sandbox, whose server is a real one on the
// loopback. Tests set states that a Manager has for a moment only, and use it with
// simulated time. TestSandboxesConform holds it to the behavior of a Manager, which is
// behind the same Handler in package caddymodule.
type fakeNode struct {
	mu      sync.Mutex
	sb      sandbox.Sandbox
	server  string // address; empty if no server listens
	wakeErr error
	dialErr error
	closing bool          // it runs and gives no leases
	pipe    bool          // a server accepts connections and sends nothing
	pending chan struct{} // the process of the port is being started until it is closed; nil: none is
	waking  chan struct{} // a wake ends when it is closed; nil: immediately
	kind    sandbox.WakeKind

	read func(f *fakeNode) // changes the sandbox after each ByID; nil: nothing

	begun atomic.Bool // a wake, which goes on without those who wait for it

	log *testkit.Log

	first atomic.Pointer[fakeLease] // that was ever given

	leases, acquired, touches, wakes, dials, lastLogs atomic.Int64
}

func newFakeNode(t *testing.T, server string, port sandbox.Port) *fakeNode {
	now := time.Now()
	port.Port = 3000
	if port.Access == "" {
		port.Access, port.Token = sandbox.AccessToken, testToken
	}
	return &fakeNode{log: testkit.NewLog(t), server: server, sb: sandbox.Sandbox{
		ID: testID, State: sandbox.StateRunning, StateSince: now, StartedAt: now.Add(-time.Hour),
		Ports: []sandbox.Port{port},
	}}
}

// set changes the sandbox and what its next wake is like.
func (f *fakeNode) set(change func(f *fakeNode)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeNode) sleep(kind sandbox.WakeKind, waking chan struct{}) {
	f.set(func(f *fakeNode) {
		f.sb.State, f.kind, f.waking = sandbox.StateAsleep, kind, waking
		f.begun.Store(false)
		if kind == sandbox.WakeCold {
			f.sb.State = sandbox.StateStopped
		}
	})
}

func (f *fakeNode) serve(addr string) { f.set(func(f *fakeNode) { f.server = addr }) }

func (f *fakeNode) ByID(id sandbox.ID) (sandbox.Sandbox, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if id != f.sb.ID {
		return sandbox.Sandbox{}, false
	}
	sb := f.sb
	if f.read != nil {
		f.read(f)
	}
	return sb, true
}

func (f *fakeNode) AcquireRunning(id sandbox.ID) (Lease, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if id != f.sb.ID {
		return nil, fmt.Errorf("fake: %w", sandbox.ErrNotFound)
	}
	if f.sb.State != sandbox.StateRunning || f.closing {
		return nil, fmt.Errorf("fake: %w", sandbox.ErrNotRunning)
	}
	return f.lease(sandbox.WakeNone), nil
}

func (f *fakeNode) Acquire(ctx context.Context, id sandbox.ID, _ sandbox.Cause) (Lease, error) {
	f.mu.Lock()
	waking := f.waking
	f.mu.Unlock()
	f.begun.Store(true)
	if waking != nil {
		select {
		case <-waking:
		case <-ctx.Done():
			select {
			case <-waking: // a wake that has ended wins, as with the Manager
			default:
				return nil, ctx.Err()
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if id != f.sb.ID {
		return nil, fmt.Errorf("fake: %w", sandbox.ErrNotFound)
	}
	if f.wakeErr != nil {
		return nil, f.wakeErr
	}
	if f.sb.State == sandbox.StateRunning {
		return f.lease(f.kind), nil
	}
	f.wakes.Add(1)
	f.begun.Store(false)
	f.sb.State, f.sb.StateSince = sandbox.StateRunning, time.Now()
	if f.kind == sandbox.WakeCold {
		f.sb.StartedAt = time.Now()
	}
	return f.lease(f.kind), nil
}

func (f *fakeNode) Rouse(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (Lease, error) {
	if sb, ok := f.ByID(id); ok && sb.State == sandbox.StateStopped && !f.begun.Load() {
		return nil, fmt.Errorf("fake: %w", sandbox.ErrNotRunning)
	}
	return f.Acquire(ctx, id, cause)
}

func (f *fakeNode) Listens(_ context.Context, id sandbox.ID, _ uint16) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return id == f.sb.ID && f.sb.State == sandbox.StateRunning && f.server != ""
}

func (f *fakeNode) Touch(sandbox.ID) { f.touches.Add(1) }

func (f *fakeNode) LastLog(context.Context, sandbox.ID) string {
	f.lastLogs.Add(1)
	return lastLog
}

const lastLog = "last words"

func (f *fakeNode) lease(kind sandbox.WakeKind) Lease {
	f.leases.Add(1)
	f.acquired.Add(1)
	l := &fakeLease{f: f, wake: sandbox.WakeInfo{Kind: kind}}
	f.first.CompareAndSwap(nil, l)
	return l
}

type fakeLease struct {
	f    *fakeNode
	wake sandbox.WakeInfo
	once sync.Once
	back atomic.Bool // Release was called
}

func (l *fakeLease) Release()                 { l.once.Do(func() { l.back.Store(true); l.f.leases.Add(-1) }) }
func (l *fakeLease) Wake() sandbox.WakeInfo   { return l.wake }
func (l *fakeLease) Sandbox() sandbox.Sandbox { sb, _ := l.f.ByID(testID); return sb }

// lastOutput is what processes of the fake wrote last.
const lastOutput = "Error: no <module>\n    at line 1"

func (l *fakeLease) Pending(uint16) <-chan struct{} {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	return l.f.pending
}

func (l *fakeLease) LastOutput(context.Context, string) string { return lastOutput }

func (l *fakeLease) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	l.f.dials.Add(1)
	l.f.mu.Lock()
	server, dialErr, pipe := l.f.server, l.f.dialErr, l.f.pipe
	l.f.mu.Unlock()
	if pipe {
		conn, _ := net.Pipe()
		return conn, nil
	}
	if dialErr != nil {
		return nil, fmt.Errorf("fake: %w", dialErr)
	}
	if server == "" || port != 3000 {
		return nil, fmt.Errorf("fake: %w", syscall.ECONNREFUSED)
	}
	return new(net.Dialer).DialContext(ctx, "tcp", server)
}

// front is a Handler over fake, behind a real server, with the standard
// library's reverse proxy between; Caddy's is tested in package caddymodule.
type front struct {
	*httptest.Server
	node  *fakeNode
	proxy *Proxy
	t     *testing.T
}

func newFront(t *testing.T, node *fakeNode, opts Options) *front {
	t.Helper()
	proxy := New(node, node.log.Logger())
	opts.Domains = []string{domain}
	server := httptest.NewServer(NewHandler(proxy, reverseProxy(proxy), opts))
	t.Cleanup(func() {
		proxy.Close()
		server.Close()
		proxy.pool.CloseIdleConnections()
	})
	return &front{Server: server, node: node, proxy: proxy, t: t}
}

// reverseProxy is a Next of the standard library's parts.
func reverseProxy(transport http.RoundTripper) Next {
	return func(w http.ResponseWriter, r *http.Request) error {
		var failed error
		rp := &httputil.ReverseProxy{
			Transport: transport,
			Rewrite: func(pr *httputil.ProxyRequest) {
				pr.SetURL(&url.URL{Scheme: "http", Host: "sandbox"})
				pr.Out.Host = pr.In.Host
				pr.SetXForwarded()
			},
			ErrorHandler:  func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err },
			FlushInterval: -1,
		}
		rp.ServeHTTP(w, r)
		return failed
	}
}

// previewHost names the fake sandbox's port with its token.
func previewHost() string {
	return Name{Port: 3000, ID: testID, Token: testToken}.Host(domain)
}

// request makes a request to the preview.
func (f *front) request(method, path string) *http.Request {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.URL+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Host = previewHost()
	return req
}

// do sends a request without following redirects.
func (f *front) do(req *http.Request) *http.Response {
	f.t.Helper()
	res, err := f.Client().Transport.RoundTrip(req)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { res.Body.Close() })
	return res
}

// app is a server as it would be inside the sandbox.
func app(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}
