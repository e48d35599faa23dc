package policy

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// maxLine is how much of a line that a policy writes is kept.
	maxLine = 1 << 10
	// maxTail is how much of what an instance wrote goes into the Detail of a
	// denial: the message of a panic, and the first frames of its trace.
	maxTail = 2 << 10
	// logLines of a policy are logged in each logWindow: the log is for the author
	// who looks for a mistake, and must not fill the disk under load.
	logLines  = 20
	logWindow = 10 * time.Second
)

// logger passes on what a policy says, but not more than is bearable.
type logger struct {
	log *slog.Logger

	mu      sync.Mutex
	began   time.Time
	lines   int
	dropped int
}

func (l *logger) line(level slog.Level, text string) {
	l.mu.Lock()
	now := time.Now()
	if now.Sub(l.began) >= logWindow {
		l.began, l.lines = now, 0
	}
	if l.lines++; l.lines > logLines {
		l.dropped++
		l.mu.Unlock()
		return
	}
	dropped := l.dropped
	l.dropped = 0
	l.mu.Unlock()
	attributes := []slog.Attr{slog.String("text", text)}
	if dropped > 0 {
		attributes = append(attributes, slog.Int("lines_dropped_before", dropped))
	}
	l.log.LogAttrs(context.Background(), level, "policy says", attributes...)
}

// output is what one instance writes to stdout and stderr.
type output struct {
	logger *logger
	line   []byte
	tail   []byte // of the current exchange
}

func (o *output) write(p []byte) {
	if room := maxTail - len(o.tail); room > 0 {
		o.tail = append(o.tail, p[:min(room, len(p))]...)
	}
	for _, c := range p {
		switch {
		case c == '\n':
			o.flush()
		case len(o.line) < maxLine:
			o.line = append(o.line, c)
		}
	}
}

func (o *output) flush() {
	if len(o.line) > 0 {
		o.logger.line(slog.LevelInfo, printable(string(o.line), maxLine))
		o.line = o.line[:0]
	}
}

// printable makes one line of what a policy says.
func printable(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
	s = strings.TrimSpace(s)
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
