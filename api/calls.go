package api

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/doze-run/doze/requestid"
)

// Lines of API calls in the log: calls without a valid token, most of them refused, have a
// budget of their own, so that a flood of one kind hides no calls of another.
const (
	callsPerSecond, callsBurst     = 100, 2000
	refusedPerSecond, refusedBurst = 1, 60
)

// call is one request to the API. It is the only value that the API adds to the context of
// the request: huma passes nothing else to handlers.
type call struct {
	id     string // X-Request-Id
	start  time.Time
	method string
	w      http.ResponseWriter
	owner  string        // empty without a valid token or signature
	signed bool          // the request has a signature in place of a token
	routed *http.Request // with the route that the mux matched; nil before that
	// operation is the OpenAPI operation id of the route.
	operation string
	onDone    []func()
}

type callKey struct{}

// callOf returns the call that ctx belongs to.
func callOf(ctx context.Context) *call { return ctx.Value(callKey{}).(*call) }

// ownerOf returns the authenticated owner of the request that ctx belongs to.
func ownerOf(ctx context.Context) string { return callOf(ctx).owner }

// onDone calls release when the response to the request that ctx belongs to has been
// written. Until then, a client that does not read it keeps it in memory.
func onDone(ctx context.Context, release func()) {
	c := callOf(ctx)
	c.onDone = append(c.onDone, release)
}

func newCall(w http.ResponseWriter, r *http.Request) *call {
	c := &call{id: requestid.Of(r), start: time.Now(), method: r.Method, w: w}
	w.Header().Set(requestid.Header, c.id)
	return c
}

// withContext returns the request with the call in its context.
func (c *call) withContext(r *http.Request) *http.Request {
	c.routed = r.WithContext(context.WithValue(r.Context(), callKey{}, c))
	return c.routed
}

// done releases the resources of the call.
func (c *call) done() {
	for _, release := range c.onDone {
		release()
	}
}

// route is the pattern of the route, such as /api/v1/sandbox/{id}; empty without one.
func (c *call) route() string {
	if c.routed == nil {
		return ""
	}
	_, path, _ := strings.Cut(c.routed.Pattern, " ")
	return path
}

// sandbox is the id or name by which the client referred to the sandbox.
func (c *call) sandbox() string {
	if c.routed == nil {
		return ""
	}
	return clip(c.routed.PathValue("id"))
}

// record counts and logs a call that has ended.
func (a *API) record(c *call, w *timedWriter) {
	took := time.Since(c.start)
	route, status := c.route(), w.statusSent()
	a.cfg.Metrics.observeCall(c.method, route, status, took)
	limit := a.callLines
	if c.owner == "" {
		limit = a.refusedLines
	}
	suppressed, ok := limit.Allow()
	if !ok {
		return
	}
	attrs := []slog.Attr{
		slog.String("method", clip(c.method)), slog.String("route", route), slog.Int("status", status),
		slog.Float64("duration_ms", float64(took.Microseconds())/1000), slog.String("request_id", c.id),
	}
	if c.owner != "" {
		attrs = append(attrs, slog.String("owner", c.owner))
	}
	if sandbox := c.sandbox(); sandbox != "" {
		attrs = append(attrs, slog.String("sandbox", sandbox))
	}
	a.cfg.Log.LogAttrs(context.Background(), slog.LevelInfo, "api call ended", append(attrs, suppressed...)...)
}
