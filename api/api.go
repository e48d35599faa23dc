// Package api is the HTTP API of a node: routes, authentication, JSON, raw
// bodies, server-sent events and the OpenAPI document that describes them all.
//
// It decides nothing about sandboxes: it converts between HTTP and the calls of a
// sandbox.Manager and an egress.Egress. Reads never wake a sandbox.
package api

import (
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"runtime/debug"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/redact"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Prefix is where the routes are.
const Prefix = "/api/v1"

// maxURI is longer than any address with the longest path a file can have
// (4,096 bytes, each written as %XX).
const maxURI = 16 << 10

// Config of an API. Sandboxes, Egress, Auth and PreviewURL are required.
type Config struct {
	Sandboxes *sandbox.Manager
	Egress    *egress.Egress
	// Auth returns the owner that a token authenticates. It is called for every request
	// and must compare in constant time.
	Auth func(token string) (owner string, ok bool)
	// PreviewURL returns the address of an exposed port.
	PreviewURL func(sandbox.Sandbox, sandbox.Port) string
	// Version of the node.
	Version string
	// Log gets what failed on the node's side, never a token or a body; nil
	// logs nothing.
	Log *slog.Logger
	// Metrics to count into; nil counts for nobody.
	Metrics *Metrics
	// Limits that are zero get their defaults.
	Limits Limits
}

// Limits of what clients may hold at once, and for how long.
type Limits struct {
	// MaxStreams is how many server-sent event streams are open at once,
	// default 1024. One more gets stream_limit_exceeded.
	MaxStreams int
	// MaxCalls is how many buffered commands and file transfers are under way
	// at once, until their answers have been written, default 512. One more gets
	// call_limit_exceeded. A command counts once for each MiB of output that it may
	// keep, so this also bounds memory.
	MaxCalls int
	// Heartbeat is how long a stream is silent before it gets a comment line,
	// default 15 s: proxies close what is silent for 30 s or 60 s.
	Heartbeat time.Duration
	// Stall is how long one read from or write to a client may take, default
	// 60 s. A slow client is served; one that does nothing is cut off.
	Stall time.Duration
}

func (l Limits) withDefaults() Limits {
	if l.MaxStreams == 0 {
		l.MaxStreams = 1024
	}
	if l.MaxCalls == 0 {
		l.MaxCalls = 512
	}
	if l.Heartbeat == 0 {
		l.Heartbeat = 15 * time.Second
	}
	if l.Stall == 0 {
		l.Stall = time.Minute
	}
	return l
}

// API serves the routes under Prefix. Make one with New.
type API struct {
	sandboxes  *sandbox.Manager
	egress     *egress.Egress
	auth       func(token string) (owner string, ok bool)
	previewURL func(sandbox.Sandbox, sandbox.Port) string
	version    string
	log        *slog.Logger
	metrics    *Metrics
	limits     Limits
	streams    limiter
	calls      limiter
	pushes     pushes
	// Lines of calls in the log.
	callLines, refusedLines *lineLimit

	execCommand *huma.Schema

	mux  *http.ServeMux
	huma huma.API
}

var _ http.Handler = (*API)(nil)

// New returns the API. It starts nothing and needs no closing: every goroutine
// belongs to a request.
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
	a := &API{
		sandboxes:  cfg.Sandboxes,
		egress:     cfg.Egress,
		auth:       cfg.Auth,
		previewURL: cfg.PreviewURL,
		version:    cfg.Version,
		log:        cfg.Log,
		metrics:    cfg.Metrics,
		limits:     cfg.Limits.withDefaults(),
		callLines:  newLineLimit(callsPerSecond, callsBurst), refusedLines: newLineLimit(refusedPerSecond, refusedBurst),
		mux: http.NewServeMux(),
	}
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	if a.metrics == nil {
		a.metrics = NewMetrics()
	}
	a.streams = limiter{pool: quota.New(int64(a.limits.MaxStreams)), refuse: problem.Newf(problem.StreamLimitExceeded,
		"%d streams are open, which is as many as this node allows; close one or try again later", a.limits.MaxStreams)}
	a.calls = limiter{pool: quota.New(int64(a.limits.MaxCalls)), refuse: problem.Newf(problem.CallLimitExceeded,
		"%d commands and transfers are under way, which is as many as this node allows; try again later", a.limits.MaxCalls)}
	a.huma = a.newHuma()
	a.registerSandboxes()
	a.registerLife()
	a.registerExec()
	a.registerExecSocket()
	a.registerFiles()
	a.registerArchives()
	a.registerProcesses()
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
	a.registerOpenAPI()
	a.mux.HandleFunc(catchAll, a.refuseRoute)
	return a, nil
}

// ServeHTTP answers with a result or a Problem, never with anything else. Who
// cancels the context of a request because the node closes does so with the cause
// sandbox.ErrClosed, and its client is told.
func (a *API) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w := newTimedWriter(rw, a.limits.Stall)
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
	if r.URL.Path != Prefix+openAPIPath {
		owner, p := a.authenticate(r)
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

// recover keeps a panic from one request to itself.
func (a *API) recover(w *timedWriter, r *http.Request, requestID string) {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		a.log.Error("request panicked", "method", r.Method, "path", clip(r.URL.Path), "request_id", requestID, "panic", redact.Panic(v), "stack", string(debug.Stack()))
	}
	if w.wrote || v == http.ErrAbortHandler {
		// Half an answer must not look like a whole one.
		panic(http.ErrAbortHandler)
	}
	problem.New(problem.InternalError, "the node failed; its log has the cause").Write(w, r)
}

// clip keeps what an answer repeats of its request short.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
