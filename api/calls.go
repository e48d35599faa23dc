package api

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/requestid"
)

// Lines of API calls in the log: refused ones without a valid token have a budget of
// their own, so that a flood of one kind hides no calls of another.
const (
	callsPerSecond, callsBurst     = 100, 2000
	refusedPerSecond, refusedBurst = 1, 60
)

// lineLimit bounds lines in the log and counts the others.
type lineLimit struct {
	limiter    *rate.Limiter
	suppressed atomic.Uint64
}

func newLineLimit(perSecond rate.Limit, burst int) *lineLimit {
	return &lineLimit{limiter: rate.NewLimiter(perSecond, burst)}
}

// call is one request to the API, for the log and the metrics.
type call struct {
	id     string // X-Request-Id
	start  time.Time
	method string
	owner  string        // empty without a valid token
	routed *http.Request // as the mux matched it; nil without a route
}

type requestIDKey struct{}

// requestIDOf returns the id of the request that ctx belongs to.
func requestIDOf(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

func newCall(w http.ResponseWriter, r *http.Request) *call {
	c := &call{id: requestid.Of(r), start: time.Now(), method: r.Method}
	w.Header().Set(requestid.Header, c.id)
	return c
}

// route is the pattern of the route, such as /api/v1/sandbox/{id}; empty without one.
func (c *call) route() string {
	if c.routed == nil {
		return ""
	}
	_, path, _ := strings.Cut(c.routed.Pattern, " ")
	return path
}

// sandbox is the id or name that the client named the sandbox by.
func (c *call) sandbox() string {
	if c.routed == nil || !strings.HasPrefix(c.route(), Prefix+"/sandbox/") {
		return ""
	}
	return clip(c.routed.PathValue("id"))
}

// record counts and logs a call that has ended.
func (a *API) record(c *call, w *timedWriter) {
	took := time.Since(c.start)
	route, status := c.route(), w.statusSent()
	a.metrics.observeCall(c.method, route, status, took)
	limit := a.callLines
	if c.owner == "" {
		limit = a.refusedLines
	}
	if !limit.limiter.Allow() {
		limit.suppressed.Add(1)
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
	if n := limit.suppressed.Swap(0); n > 0 {
		attrs = append(attrs, slog.Uint64("suppressed", n))
	}
	a.log.LogAttrs(context.Background(), slog.LevelInfo, "api call ended", attrs...)
}
