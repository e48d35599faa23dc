package audit

import (
	"context"
	"log/slog"
	"slices"
)

// line writes an entry to the node's log, unless the sandbox has reached its limit of
// lines.
func (l *Log) line(e *Entry) {
	level := slog.LevelInfo
	if e.Verdict == Deny || e.Verdict == Error {
		level = slog.LevelWarn
	}
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) {
		return
	}
	suppressed, ok := l.limitsOf(e.Sandbox)[level].Allow()
	if !ok {
		l.metrics.suppressed.Inc()
		return
	}
	attrs := e.attrs(l.name(e.Sandbox))
	l.log.LogAttrs(ctx, level, "egress", append(attrs, suppressed...)...)
}

// lastLine logs the number of suppressed lines that no later line has reported, and forgets
// the limits of the sandbox.
func (l *Log) lastLine(sandbox string) {
	limits := l.limitsOf(sandbox)
	l.mu.Lock()
	delete(l.limits, sandbox)
	l.mu.Unlock()
	if n := limits[slog.LevelInfo].Suppressed() + limits[slog.LevelWarn].Suppressed(); n > 0 {
		l.log.Info("egress of sandbox ended", "sandbox", sandbox, "suppressed", n)
	}
}

// attrs returns the entry's attributes as in its JSON, without empty ones, and the
// sandbox's name.
func (e *Entry) attrs(name string) []slog.Attr {
	address := ""
	if e.Address.IsValid() {
		address = e.Address.String()
	}
	return slices.DeleteFunc([]slog.Attr{
		slog.String("sandbox", e.Sandbox),
		slog.String("sandbox_name", name),
		slog.Int64("seq", int64(e.Seq)),
		slog.String("flow", e.Flow),
		slog.String("kind", string(e.Kind)),
		slog.String("verdict", string(e.Verdict)),
		slog.String("host", e.Host),
		slog.String("address", address),
		slog.Int64("port", int64(e.Port)),
		slog.String("method", e.Method),
		slog.String("path", e.Path),
		slog.String("rule", e.Rule),
		slog.String("reason", e.Reason),
		list("policies", e.Policies),
		list("secrets", e.Secrets),
		list("notes", e.Notes),
		slog.Int("status", e.Status),
		slog.Int64("bytes_out", e.BytesOut),
		slog.Int64("bytes_in", e.BytesIn),
		slog.Float64("duration_ms", float64(e.Duration)),
	}, func(a slog.Attr) bool {
		v := a.Value
		return v.Equal(slog.Value{}) || v.Equal(slog.StringValue("")) || v.Equal(slog.Int64Value(0)) || v.Equal(slog.Float64Value(0))
	})
}

func list[T any](key string, values []T) slog.Attr {
	if len(values) == 0 {
		return slog.Attr{}
	}
	return slog.Any(key, values)
}
