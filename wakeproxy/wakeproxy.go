// Package wakeproxy carries preview requests into sandboxes and wakes the ones
// that sleep.
//
// A preview's host name contains the sandbox and its port. Handler parses it,
// acquires a lease, which wakes the sandbox if needed, and calls a reverse proxy,
// whose transport is the Proxy: it dials into the sandbox, rewrites the headers
// that name the server, and retries requests that are safe to repeat. The reverse
// proxy between them is the caller's; with Caddy it is Caddy's own.
//
// That reverse proxy must add X-Forwarded-For, -Host and -Proto, strip hop-by-hop
// headers, copy a 101 response's Body both ways, and return an error only if it
// has written nothing.
package wakeproxy

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/loglimit"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Sandboxes is the part of a sandbox.Manager that previews use; Of adapts one. Tests
// have an implementation whose states they set, which passes the same conformance
// suite.
type Sandboxes interface {
	// ByID reads from memory.
	ByID(id sandbox.ID) (sandbox.Sandbox, bool)
	// Acquire wakes the sandbox; see sandbox.Manager.Acquire.
	Acquire(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (Lease, error)
	// Rouse wakes one that is asleep and starts no container; see sandbox.Manager.Rouse.
	Rouse(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (Lease, error)
	// AcquireRunning returns sandbox.ErrNotRunning instead of waking.
	AcquireRunning(id sandbox.ID) (Lease, error)
	// Listens reports whether a port accepts connections; it does not count as activity.
	Listens(ctx context.Context, id sandbox.ID, port uint16) bool
	// Touch notes traffic that holds no lease.
	Touch(id sandbox.ID)
	// LastLog returns the last line that the container wrote, if it is known.
	LastLog(ctx context.Context, id sandbox.ID) string
}

// Lease keeps a sandbox awake until Release, which may be called twice.
type Lease interface {
	Release()
	Wake() sandbox.WakeInfo
	Sandbox() sandbox.Sandbox
	// LastOutput returns the last lines that a process wrote; see sandbox.Lease.LastOutput.
	LastOutput(ctx context.Context, process string) string
	// Pending is closed when the declared process that owns a port is ready; see
	// sandbox.Lease.Pending.
	Pending(port uint16) <-chan struct{}
	// Dial returns syscall.ECONNREFUSED (wrapped) when no process listens.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
}

// Of adapts a Manager.
func Of(m *sandbox.Manager) Sandboxes { return manager{m} }

type manager struct{ *sandbox.Manager }

func (m manager) Acquire(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (Lease, error) {
	return leaseOf(m.Manager.Acquire(ctx, id, cause))
}

func (m manager) Rouse(ctx context.Context, id sandbox.ID, cause sandbox.Cause) (Lease, error) {
	return leaseOf(m.Manager.Rouse(ctx, id, cause))
}

func (m manager) AcquireRunning(id sandbox.ID) (Lease, error) {
	return leaseOf(m.Manager.AcquireRunning(id))
}

// leaseOf returns a nil Lease with an error, not a Lease with a nil *sandbox.Lease.
func leaseOf(lease *sandbox.Lease, err error) (Lease, error) {
	if err != nil {
		return nil, err
	}
	return lease, nil
}

// Proxy holds the state that all Handlers of a node share: the connections into
// sandboxes and the counts of requests. It outlives a change of configuration, so
// that neither is lost. It is an http.RoundTripper.
type Proxy struct {
	sandboxes Sandboxes
	pool      *http.Transport
	unpooled  *http.Transport // for retries: has no idle connections
	h2c       *http.Transport // HTTP/2 without TLS
	gates     gates
	hosts     hostChecks
	requests  quota.Keyed[sandbox.ID] // in flight, upgraded connections included
	log       *slog.Logger
	sometimes rate.Sometimes  // logs a dial that failed
	failures  *loglimit.Limit // limits the lines about failed requests

	ctx   context.Context // ends with Close
	close context.CancelFunc
}

const (
	// A connection costs a few kilobytes here and a socket in the sandbox. A
	// page with its assets uses 6 over HTTP/1.1; a burst over HTTP/2 uses up
	// to 100. More are closed after use.
	maxIdlePerPort = 64
	// The least recently used connection is closed beyond it.
	maxIdleInAll = 8192
	// Servers keep idle connections for 5 s (Node) to 120 s.
	idleTimeout = 90 * time.Second
	// Servers in sandboxes are not trusted with the node's memory.
	maxResponseHeader = 256 << 10
)

// logPause and the rate of failures bound the log lines that visitors can cause.
const (
	logPause                         = time.Second
	failuresPerSecond, failuresBurst = 2, 100
)

// New returns a Proxy for the sandboxes. It logs dials that fail because of the
// node rather than the sandbox. Close it when no Handler uses it.
func New(sandboxes Sandboxes, log *slog.Logger) *Proxy {
	ctx, cancel := context.WithCancel(context.Background())
	pool := &http.Transport{
		DialContext:            dialSandbox,
		DisableCompression:     true, // bodies pass unchanged
		MaxIdleConns:           maxIdleInAll,
		MaxIdleConnsPerHost:    maxIdlePerPort,
		IdleConnTimeout:        idleTimeout,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
	}
	unpooled := pool.Clone()
	unpooled.DisableKeepAlives = true
	h2c := pool.Clone()
	h2c.Protocols = new(http.Protocols)
	h2c.Protocols.SetUnencryptedHTTP2(true)
	return &Proxy{
		sandboxes: sandboxes,
		pool:      pool,
		unpooled:  unpooled,
		h2c:       h2c,
		gates:     gates{open: map[gateKey]*gate{}},
		hosts:     hostChecks{known: map[gateKey]hostCheck{}},
		log:       log,
		sometimes: rate.Sometimes{Interval: logPause},
		failures:  loglimit.New(failuresPerSecond, failuresBurst),
		ctx:       ctx,
		close:     cancel,
	}
}

// Close ends all requests in flight, including upgraded connections: their
// handlers return soon after. It wakes no sandbox.
func (p *Proxy) Close() {
	p.close()
	p.pool.CloseIdleConnections()
	p.h2c.CloseIdleConnections()
}
