// Package api is the HTTP API of a node: routes, authentication, JSON, raw
// bodies, server-sent events and the OpenAPI document that describes them all.
//
// It decides nothing about sandboxes: it converts between HTTP and the calls of a
// sandbox.Manager and an egress.Egress. Reads never wake a sandbox.
package api

import (
	"cmp"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"runtime/debug"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/api/signedurl"
	"github.com/doze-run/doze/api/terminalpage"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/loglimit"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/redact"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Prefix is the path of all routes.
const Prefix = "/api/v1"

// maxURI limits path and query. The longest path of a file, of 4,096 bytes that are each
// written as %XX, fits.
const maxURI = 16 << 10

// Config of an API. Sandboxes, Egress, Auth and PreviewURL are required.
type Config struct {
	Sandboxes *sandbox.Manager
	Egress    *egress.Egress
	// Auth returns the owner that a token authenticates. It is called for every request
	// and must compare in constant time.
	Auth func(token string) (owner string, ok bool)
	// Signer signs URLs for clients without a token. Nil makes one whose URLs end with
	// this API.
	Signer *signedurl.Signer
	// PreviewURL returns the address of an exposed port.
	PreviewURL func(sandbox.Sandbox, sandbox.Port) string
	// Version of the node.
	Version string
	// Log records calls and failures of the node, never a token or a body; nil discards
	// it.
	Log *slog.Logger
	// Metrics count the calls; nil makes new ones.
	Metrics *Metrics
	Limits  Limits
}

// Limits of the calls of clients. A zero limit is its default.
type Limits struct {
	// MaxStreams limits open streams of server-sent events and WebSockets. A call beyond
	// it gets stream_limit_exceeded. Default: 1024.
	MaxStreams int
	// MaxCalls limits buffered commands, file transfers and large bodies, until their
	// responses have been written. A call beyond it gets call_limit_exceeded. A call counts
	// about once for each MiB that it may take, so this also limits memory. Default: 512.
	MaxCalls int
	// Heartbeat is how long a stream is silent before a comment line is sent: proxies
	// close streams that are silent for 30 s or 60 s. Default: 15 s.
	Heartbeat time.Duration
	// Stall is how long one read from or write to a client may take. A slow client is
	// served; one that stalls is disconnected. Default: 60 s.
	Stall time.Duration
}

func (l Limits) withDefaults() Limits {
	return Limits{
		MaxStreams: cmp.Or(l.MaxStreams, 1024),
		MaxCalls:   cmp.Or(l.MaxCalls, 512),
		Heartbeat:  cmp.Or(l.Heartbeat, 15*time.Second),
		Stall:      cmp.Or(l.Stall, time.Minute),
	}
}

// API serves the routes under Prefix, and the page of package terminalpage.
type API struct {
	cfg             Config
	streams         limiter
	calls           limiter
	pushes, exports *ownerLimiter
	// Limits of lines in the log.
	callLines, refusedLines *loglimit.Limit

	execCommand *huma.Schema
	// terminalMessages are the messages of the clients of terminals.
	terminalMessages map[types.TerminalMessageType]*huma.Schema
	// signed are the routes that accept signed URLs, by the patterns of the mux.
	signed map[string]signedRoute

	mux  *http.ServeMux
	huma huma.API
}

var _ http.Handler = (*API)(nil)

// New returns the API. It needs no closing: every goroutine belongs to a request.
func New(cfg Config) (*API, error) {
	switch {
	case cfg.Sandboxes == nil:
		return nil, errors.New("api: Config.Sandboxes is missing")
	case cfg.Egress == nil:
		return nil, errors.New("api: Config.Egress is missing")
	case cfg.Auth == nil:
		return nil, errors.New("api: Config.Auth is missing")
	case cfg.PreviewURL == nil:
		return nil, errors.New("api: Config.PreviewURL is missing")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics()
	}
	if cfg.Signer == nil {
		cfg.Signer = signedurl.New([]byte(rand.Text()+rand.Text()), func(string) []byte { return nil })
	}
	cfg.Limits = cfg.Limits.withDefaults()
	a := &API{
		cfg: cfg,
		streams: limiter{quota.New(int64(cfg.Limits.MaxStreams)), problem.Newf(problem.StreamLimitExceeded,
			"%d streams are open, the limit of this node; close one or try again later", cfg.Limits.MaxStreams)},
		calls: limiter{quota.New(int64(cfg.Limits.MaxCalls)), problem.Newf(problem.CallLimitExceeded,
			"%d commands and transfers are in progress, the limit of this node; try again later", cfg.Limits.MaxCalls)},
		pushes: newPushes(), exports: newExports(),
		callLines: loglimit.New(callsPerSecond, callsBurst), refusedLines: loglimit.New(refusedPerSecond, refusedBurst),
		signed: map[string]signedRoute{},
		mux:    http.NewServeMux(),
	}
	a.huma = a.newHuma()
	a.registerSandboxes()
	a.registerLifecycle()
	a.registerExec()
	a.registerExecSocket()
	a.registerFiles()
	a.registerArchives()
	a.registerSignedURLs()
	a.registerSessions()
	a.registerSnapshots()
	a.registerBackups()
	a.registerMounts()
	a.registerContexts()
	a.registerEnvironment()
	a.registerWatch()
	a.registerSearch()
	a.registerProcesses()
	a.registerTerminals()
	a.registerReady()
	a.registerLogs()
	a.registerPorts()
	a.registerEvents()
	a.registerFeed()
	a.registerRules()
	a.registerSecrets()
	a.registerPolicies()
	a.registerPolicyLogs()
	a.registerFlows()
	a.registerTrust()
	a.registerNode()
	a.registerQuarantine()
	a.registerGit()
	a.registerOpenAPI()
	terminalpage.Register(a.mux, func(w http.ResponseWriter, r *http.Request) { noRoute(r).Write(w, r) })
	a.mux.HandleFunc(catchAll, a.refuseRoute)
	return a, nil
}

// ServeHTTP responds with a result or a problem. A caller that cancels the context of a
// request because the node shuts down sets the cause sandbox.ErrClosed: the client then
// gets the problem node_unavailable.
func (a *API) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w := newTimedWriter(rw, a.cfg.Limits.Stall)
	defer w.finish(r)
	c := newCall(w, r)
	defer a.record(c, w)
	defer a.recover(w, r, c.id)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if p := checkAddress(r); p != nil {
		p.Write(w, r)
		return
	}
	c.signed = isSigned(r)
	if c.signed && allowOrigins(w, r) {
		return
	}
	if r.URL.Path != Prefix+openAPIPath && !strings.HasPrefix(r.URL.Path, terminalpage.Path) {
		authenticate := a.authenticate
		if c.signed {
			authenticate = a.verifySigned
		}
		owner, p := authenticate(r)
		if p != nil {
			p.Write(w, r)
			return
		}
		c.owner = owner
	}
	if p := r.URL.EscapedPath(); p == "" || path.Clean(p) != p {
		noRoute(r).Write(w, r) // the mux would redirect
		return
	}
	defer c.done()
	a.mux.ServeHTTP(w, c.withContext(r))
}

// checkAddress refuses addresses that are too long or cannot be parsed.
func checkAddress(r *http.Request) *problem.Problem {
	if n := len(r.URL.EscapedPath()) + len(r.URL.RawQuery); n > maxURI {
		return problem.Newf(problem.URITooLong, "path and query have %d bytes; at most %d are allowed", n, maxURI)
	}
	if _, err := url.ParseQuery(r.URL.RawQuery); err != nil {
		return problem.Newf(problem.RequestInvalid, "the query cannot be read: %v; write it as name=value&name=value with %%XX for special characters", err)
	}
	return nil
}

func noRoute(r *http.Request) *problem.Problem {
	return problem.Newf(problem.RouteNotFound, "%s is not a route; all routes are in %s", clip(r.URL.Path), Prefix+openAPIPath)
}

// catchAll is the mux's pattern of requests that no route matches.
const catchAll = "/"

// refuseRoute responds to requests that no route matches.
func (a *API) refuseRoute(w http.ResponseWriter, r *http.Request) {
	var allowed []string
	for _, method := range []string{http.MethodDelete, http.MethodGet, http.MethodHead, http.MethodPatch, http.MethodPost, http.MethodPut} {
		other := *r
		other.Method = method
		if _, pattern := a.mux.Handler(&other); pattern != catchAll {
			allowed = append(allowed, method)
		}
	}
	p := noRoute(r)
	if len(allowed) > 0 {
		allow := strings.Join(allowed, ", ")
		p = problem.Newf(problem.MethodNotAllowed, "%s has no method %s; use %s", clip(r.URL.Path), clip(r.Method), allow).WithHeader("Allow", allow)
	}
	p.Write(w, r)
}

// recover responds to a request that panicked, so that others go on.
func (a *API) recover(w *timedWriter, r *http.Request, requestID string) {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		a.cfg.Log.Error("request panicked", "method", r.Method, "path", clip(r.URL.Path), "request_id", requestID, "panic", redact.Panic(v), "stack", string(debug.Stack()))
	}
	if w.wrote || v == http.ErrAbortHandler {
		// An incomplete response must not look complete.
		panic(http.ErrAbortHandler)
	}
	problem.New(problem.InternalError, "the node failed; its log has the cause").Write(w, r)
}

// clip shortens a part of a request that a response or the log repeats.
func clip(s string) string {
	const limit = 120
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
