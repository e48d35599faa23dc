package wakeproxy

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Next proxies a request with the Proxy as its transport. It returns an error
// only if it has written nothing.
type Next func(w http.ResponseWriter, r *http.Request) error

// Options of a Handler. Zero values mean the defaults.
type Options struct {
	// Domains under which previews live, such as "preview.example.com", in lower case.
	Domains []string
	// WaitTimeout is how long a request waits for a wake, and for the port to
	// accept connections after a cold one: default 30 s, below the 60 s after
	// which most clients and load balancers give up. Beyond it: 504.
	WaitTimeout time.Duration
	// WaitingPageAfter is how long a browser's navigation waits before it gets the
	// waiting page: default 1 s, after which people believe that the site is down.
	WaitingPageAfter time.Duration
	// MaxRequests bounds the requests in flight, default 16384, and
	// MaxRequestsPerSandbox the requests to one sandbox, default 4096; upgraded
	// connections count. Beyond it: 503.
	MaxRequests, MaxRequestsPerSandbox int
	// Trusted reports whether a request came through a proxy whose X-Forwarded-*
	// headers are to be believed; nil trusts none.
	Trusted func(*http.Request) bool
}

func (o Options) withDefaults() Options {
	o.WaitTimeout = cmp.Or(o.WaitTimeout, 30*time.Second)
	o.WaitingPageAfter = cmp.Or(o.WaitingPageAfter, time.Second)
	o.MaxRequests = cmp.Or(o.MaxRequests, 16384)
	o.MaxRequestsPerSandbox = cmp.Or(o.MaxRequestsPerSandbox, 4096)
	if o.Trusted == nil {
		o.Trusted = func(*http.Request) bool { return false }
	}
	return o
}

// Handler serves the previews of its domains only: a request for another host gets
// the same 404 as one for a preview that does not exist.
type Handler struct {
	proxy *Proxy
	next  Next
	opts  Options
}

// NewHandler returns a Handler that calls next with the sandbox awake.
func NewHandler(proxy *Proxy, next Next, opts Options) *Handler {
	return &Handler{proxy: proxy, next: next, opts: opts.withDefaults()}
}

// ServeHTTP serves one preview request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id, port, ok := h.proxy.lookup(r.Host, h.opts.Domains)
	if !ok {
		writeProblem(w, r, notFound)
		return
	}
	if h.proxy.requests.TryAcquire(id, h.opts.MaxRequestsPerSandbox, h.opts.MaxRequests) != nil {
		writeProblem(w, r, tooManyRequests)
		return
	}
	defer h.proxy.requests.Release(id)

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(h.proxy.ctx, cancel)()

	own := r.URL.Path == WakePath || r.URL.Path == StatusPath
	switch {
	case own && r.Method != http.MethodGet:
		w.Header().Set("Allow", http.MethodGet)
		writeProblem(w, r, methodNotAllowed)
		return
	case own && r.URL.Path == WakePath:
		h.serveWake(w, r.WithContext(ctx), id, port)
		return
	case own:
		h.serveStatus(w, r.WithContext(ctx), id, port)
		return
	}
	x := h.newExchange(r, id, port)
	defer x.cleanUp()
	if err := h.forward(ctx, x, w, r); err != nil {
		h.fail(w, r, x, err)
	}
}

// forward acquires the lease and calls next.
func (h *Handler) forward(ctx context.Context, x *exchange, w http.ResponseWriter, r *http.Request) error {
	if err := x.acquire(ctx); err != nil {
		return err
	}
	out := r.WithContext(context.WithValue(ctx, exchangeKey{}, x))
	out.Host = canonicalHost(r.Host)
	out.Header = requestHeader(r.Header, h.opts.Trusted(r))
	return h.next(w, out)
}

// fail writes the response to a request that could not be served. It must be called
// before anything was written.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, x *exchange, err error) {
	waiting := errors.Is(err, errStillWaking) || errors.Is(err, errNotReady)
	switch {
	case r.Context().Err() != nil:
		w.WriteHeader(statusClientGone)
	case h.proxy.ctx.Err() != nil:
		writeProblem(w, r, nodeClosing)
	case waiting && isNavigation(r):
		writeWaitingPage(w)
	case errors.Is(err, sandbox.ErrNotRunning) && isRobots(r):
		writeRobots(w)
	default:
		x.noteWake(w.Header())
		p := x.problemOf(r.Context(), err)
		writeProblem(w, r, p)
		h.proxy.logFailure(x, r, p, w.Header().Get(requestid.Header))
	}
}

// logFailure logs a request to which the node responded instead of the application.
func (p *Proxy) logFailure(x *exchange, r *http.Request, failure *problem.Problem, requestID string) {
	suppressed, ok := p.failures.Allow()
	if !ok {
		return
	}
	attrs := []slog.Attr{
		slog.String("sandbox", string(x.id)), slog.Int("port", int(x.port.Port)), slog.String("code", failure.Code.String()),
		slog.Int("status", failure.Status), slog.Float64("duration_ms", float64(time.Since(x.start).Microseconds())/1000),
		slog.String("request_id", requestID),
	}
	p.log.LogAttrs(r.Context(), slog.LevelInfo, "preview request failed", append(attrs, suppressed...)...)
}

// statusClientGone is for the access log: no client receives it.
const statusClientGone = 499

// lookup finds the exposed port that a host names. Clients cannot distinguish the
// reasons of a failure: the steps are the same in every case, and every byte of a
// token is compared.
func (p *Proxy) lookup(host string, domains []string) (sandbox.ID, sandbox.Port, bool) {
	// As long as a token, and never equal to one: it is not [a-z0-9].
	const noToken = "--------------------"
	name, ok := ParseHost(host, domains)
	sb, known := p.sandboxes.ByID(name.ID)
	port, exposed := sb.Exposed(name.Port)
	want := port.Token
	switch {
	case !exposed, port.Access != sandbox.AccessPublic && want == "":
		want = noToken
	case port.Access == sandbox.AccessPublic:
		want = ""
	}
	match := subtle.ConstantTimeCompare([]byte(name.Token), []byte(want)) == 1
	return name.ID, port, ok && known && exposed && match
}

// Exists reports whether a host is the name of an existing preview, including its
// token. It wakes no sandbox.
func (p *Proxy) Exists(host string, domains []string) bool {
	_, _, ok := p.lookup(host, domains)
	return ok
}

// isNavigation reports whether a browser opens a page.
func isNavigation(r *http.Request) bool {
	mode := r.Header.Get("Sec-Fetch-Mode")
	return r.Method == http.MethodGet && wantsHTML(r) && (mode == "" || mode == "navigate") && r.Header.Get("Upgrade") == ""
}

// wantsHTML reports whether a response of the node should be a page.
func wantsHTML(r *http.Request) bool {
	return slices.ContainsFunc(r.Header.Values("Accept"), func(accept string) bool { return strings.Contains(accept, "text/html") })
}
