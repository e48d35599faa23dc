package caddymodule

import (
	"context"
	"log"
	"log/slog"
	"net/http"
	"slices"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/doze-run/doze/redact"
)

// captureStandardLog sends to log what libraries write through the standard logger,
// without what they quote. Caddy redirects the standard logger too, as it is written.
func captureStandardLog(to *slog.Logger) {
	log.SetFlags(0)
	log.SetPrefix("")
	log.SetOutput(redact.NewLibrary(to, slog.LevelWarn))
}

// skipAccessLog keeps a request out of Caddy's access logs, which show hosts with
// tokens, queries and headers. The node logs API calls itself.
func skipAccessLog(r *http.Request) { caddyhttp.SetVar(r.Context(), caddyhttp.LogSkipVar, true) }

// logTarget is where the node logs: to the newest configuration's logger. The
// node outlives configurations, whose loggers end with them.
type logTarget struct{ atomic.Pointer[slog.Handler] }

func (t *logTarget) set(h slog.Handler) { t.Store(&h) }

// logHandler repeats what was derived from it on the target of the moment.
type logHandler struct {
	target *logTarget
	derive []func(slog.Handler) slog.Handler
}

func (h logHandler) now() slog.Handler {
	now := *h.target.Load()
	for _, derive := range h.derive {
		now = derive(now)
	}
	return now
}

// Enabled implements slog.Handler.
func (h logHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return (*h.target.Load()).Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (h logHandler) Handle(ctx context.Context, r slog.Record) error { return h.now().Handle(ctx, r) }

// WithAttrs implements slog.Handler.
func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.with(func(to slog.Handler) slog.Handler { return to.WithAttrs(attrs) })
}

// WithGroup implements slog.Handler.
func (h logHandler) WithGroup(name string) slog.Handler {
	return h.with(func(to slog.Handler) slog.Handler { return to.WithGroup(name) })
}

func (h logHandler) with(derive func(slog.Handler) slog.Handler) slog.Handler {
	return logHandler{target: h.target, derive: append(slices.Clip(h.derive), derive)}
}
