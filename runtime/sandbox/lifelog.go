package sandbox

import (
	"context"
	"log/slog"
)

// lifeMessages are the messages in the node's log by event.
var lifeMessages = map[EventType]string{
	EventCreated:    "sandbox created",
	EventWoke:       "sandbox woke",
	EventSlept:      "sandbox slept",
	EventStopped:    "sandbox stopped",
	EventDestroyed:  "sandbox destroyed",
	EventWakeFailed: "sandbox failed to wake",
}

// Visitors cause wakes, and failing wakes: each sandbox may log a burst of lifeBurst lines,
// and one a second after that.
const (
	lifeBurst     = 60
	lifePerSecond = 1
)

// lifeLine returns the line of the node's log for an event of b, if it has one.
func (b *liveSandbox) lifeLine(ev Event) (slog.Record, bool) {
	message, ok := lifeMessages[ev.Type]
	if !ok {
		return slog.Record{}, false
	}
	b.m.metrics.events.WithLabelValues(string(ev.Type)).Inc()
	suppressed, ok := b.lines.Allow()
	if !ok {
		return slog.Record{}, false
	}
	level := slog.LevelInfo
	if ev.Type == EventWakeFailed {
		level = slog.LevelWarn
	}
	sb := b.view.Load()
	line := slog.NewRecord(ev.Time, level, message, 0)
	line.AddAttrs(slog.String("sandbox", string(b.id)), slog.String("sandbox_name", sb.Name), slog.String("owner", sb.Owner))
	for _, attr := range []slog.Attr{
		slog.String("kind", string(ev.Kind)), slog.String("cause", string(ev.Cause)), slog.String("reason", string(ev.Reason)), slog.String("detail", ev.Detail), slog.String("error", ev.Error),
	} {
		if attr.Value.String() != "" {
			line.AddAttrs(attr)
		}
	}
	if ev.DurationMS != 0 {
		line.AddAttrs(slog.Float64("duration_ms", ev.DurationMS))
	}
	line.AddAttrs(suppressed...)
	return line, true
}

// logLines writes lines to the node's log.
func logLines(log *slog.Logger, lines []slog.Record) {
	ctx := context.Background()
	for _, line := range lines {
		if log.Enabled(ctx, line.Level) {
			_ = log.Handler().Handle(ctx, line) // a log that fails has nowhere to report it
		}
	}
}
