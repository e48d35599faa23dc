package audit

import (
	"context"
	"log/slog"
)

// line writes an entry to the node's log, unless the sandbox has reached its limit of
// lines.
func (l *Log) line(e *Entry) {
	level := slog.LevelInfo
	if e.Verdict == Deny || e.Verdict == Error {
		level = slog.LevelWarn
	}
	ctx := context.Background()
	if !l.cfg.Log.Enabled(ctx, level) {
		return
	}
	limits := l.limitsOf(e.Sandbox)
	limit := limits.harmless
	if level == slog.LevelWarn {
		limit = limits.refused
	}
	suppressed, ok := limit.Allow()
	if !ok {
		l.metrics.suppressed.Inc()
		return
	}
	attrs := e.attrs(l.cfg.Name(e.Sandbox))
	l.cfg.Log.LogAttrs(ctx, level, "egress", append(attrs, suppressed...)...)
}

// lastLine logs the number of suppressed lines that no later line has reported, and forgets
// the limits of the sandbox.
func (l *Log) lastLine(sandbox string) {
	limits := l.limitsOf(sandbox)
	l.mu.Lock()
	delete(l.limits, sandbox)
	l.mu.Unlock()
	if n := limits.harmless.Suppressed() + limits.refused.Suppressed(); n > 0 {
		l.cfg.Log.Info("egress of sandbox ended", "sandbox", sandbox, "suppressed", n)
	}
}

// attrs returns the entry's attributes as in its JSON, without empty ones, and the
// sandbox's name.
func (e *Entry) attrs(name string) []slog.Attr {
	attrs := make([]slog.Attr, 0, 24)
	text := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	number := func(key string, value int64) {
		if value != 0 {
			attrs = append(attrs, slog.Int64(key, value))
		}
	}
	text("sandbox", e.Sandbox)
	text("sandbox_name", name)
	number("seq", int64(e.Seq))
	text("flow", e.Flow)
	text("kind", string(e.Kind))
	text("verdict", string(e.Verdict))
	text("host", e.Host)
	if e.Address.IsValid() {
		text("address", e.Address.String())
	}
	number("port", int64(e.Port))
	text("method", e.Method)
	text("path", e.Path)
	text("rule", e.Rule)
	text("reason", e.Reason)
	if len(e.Policies) > 0 {
		attrs = append(attrs, slog.Any("policies", e.Policies))
	}
	if len(e.Secrets) > 0 {
		attrs = append(attrs, slog.Any("secrets", e.Secrets))
	}
	if len(e.Notes) > 0 {
		attrs = append(attrs, slog.Any("notes", e.Notes))
	}
	number("status", int64(e.Status))
	number("bytes_out", e.BytesOut)
	number("bytes_in", e.BytesIn)
	if e.Duration != 0 {
		attrs = append(attrs, slog.Float64("duration_ms", float64(e.Duration)))
	}
	return attrs
}
