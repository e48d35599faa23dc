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
	// logLines of a policy are logged in each logWindow: the log is for an author
	// that searches for a mistake, and must not fill the disk under load.
	logLines  = 20
	logWindow = 10 * time.Second
)

// Line is what a policy wrote: with the host's function log, or a line of its output.
type Line struct {
	Level slog.Level
	Text  string // printable, in one line of at most 1 KiB
	// Of the exchange in which it was written; empty while an instance starts.
	Flow        string
	Sandbox     string // its id
	SandboxName string
}

// logger passes on what a policy writes: to its owner all, to the node's log no more
// than is bearable.
type logger struct {
	log  *slog.Logger
	sink func(Line) // may be nil

	mu      sync.Mutex
	began   time.Time
	lines   int
	dropped int
}

// enabled reports whether lines of a level go anywhere.
func (l *logger) enabled(level slog.Level) bool {
	return l.sink != nil || l.log.Enabled(context.Background(), level)
}

// line passes on a line that was written in an exchange, or nil.
func (l *logger) line(level slog.Level, text string, c *Chain) {
	line := Line{Level: level, Text: text}
	if c != nil {
		line.Flow, line.Sandbox, line.SandboxName = c.Flow, c.Sandbox.ID, c.Sandbox.Name
	}
	if l.sink != nil {
		l.sink(line)
	}
	if !l.log.Enabled(context.Background(), level) {
		return
	}
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
	if c != nil {
		attributes = append(attributes, slog.String("sandbox", line.Sandbox), slog.String("flow", line.Flow))
	}
	if dropped > 0 {
		attributes = append(attributes, slog.Int("lines_dropped_before", dropped))
	}
	l.log.LogAttrs(context.Background(), level, "policy says", attributes...)
}

// output is what one instance writes to stdout and stderr, or logs.
type output struct {
	logger *logger
	line   []byte
	tail   []byte // of the current exchange
	failed string // the latest line that was logged as an error, in the current exchange
}

// remember takes the beginning of what an exchange writes.
func (o *output) remember(p []byte) {
	if room := maxTail - len(o.tail); room > 0 {
		o.tail = append(o.tail, p[:min(room, len(p))]...)
	}
}

// log takes a line that was logged.
func (o *output) log(level slog.Level, text string, c *Chain) {
	o.remember([]byte(text + "\n"))
	if level == slog.LevelError {
		o.failed = text
	}
	o.logger.line(level, text, c)
}

func (o *output) write(p []byte, c *Chain) {
	o.remember(p)
	for _, b := range p {
		switch {
		case b == '\n':
			o.flush(c)
		case len(o.line) < maxLine:
			o.line = append(o.line, b)
		}
	}
}

// flush passes on a line that has no end yet.
func (o *output) flush(c *Chain) {
	if len(o.line) > 0 {
		o.logger.line(slog.LevelInfo, printable(string(o.line), maxLine), c)
		o.line = o.line[:0]
	}
}

// reason is what explains best why the guest failed; empty: nothing does.
func (o *output) reason() string {
	if o.failed != "" {
		return o.failed
	}
	return firstLine(string(o.tail))
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
