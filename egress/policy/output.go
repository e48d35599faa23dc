package policy

import (
	"context"
	"log/slog"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/loglimit"
)

const (
	// maxLine bounds a line that a policy writes, in bytes. The rest is dropped.
	maxLine = 1 << 10
	// maxTail bounds the part of an instance's output that goes into the Detail of a
	// denial, in bytes: the message of a panic, and the first frames of its trace.
	maxTail = 2 << 10
	// logBurst and logRate bound the lines of a policy in the node's log: the log helps an
	// author to find a mistake, and must not fill the disk under load.
	logBurst = 20
	logRate  = 2 // per second
)

// logger forwards the lines that a policy writes: all to sink, for the owner, and those
// within limit to the node's log.
type logger struct {
	log   *slog.Logger
	sink  func(policylog.Line) // may be nil
	limit *loglimit.Limit
}

// enabled reports whether lines of a level are forwarded.
func (l *logger) enabled(level slog.Level) bool {
	return l.sink != nil || l.log.Enabled(context.Background(), level)
}

// line forwards a line. c is the exchange in which it was written, or nil.
func (l *logger) line(level slog.Level, text string, c *Chain) {
	line := policylog.Line{Level: policylog.Level(strings.ToLower(level.String())), Text: text}
	if c != nil {
		line.Flow, line.Sandbox, line.SandboxName = c.Flow, c.Sandbox.ID, c.Sandbox.Name
	}
	if l.sink != nil {
		l.sink(line)
	}
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	attributes, ok := l.limit.Allow()
	if !ok {
		return
	}
	attributes = append(attributes, slog.String("text", text))
	if c != nil {
		attributes = append(attributes, slog.String("sandbox", line.Sandbox), slog.String("flow", line.Flow))
	}
	l.log.LogAttrs(context.Background(), level, "policy logged", attributes...)
}

// output collects the lines that one instance logs or writes to stdout and stderr.
type output struct {
	logger *logger
	line   []byte
	tail   []byte // of the current exchange
	failed string // the latest line logged as an error in the current exchange
}

// remember stores the first maxTail bytes of an exchange's output.
func (o *output) remember(p []byte) {
	o.tail = append(o.tail, p[:min(len(p), maxTail-len(o.tail))]...)
}

// log forwards a line that the guest logged, and remembers it.
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

// flush forwards an unfinished line.
func (o *output) flush(c *Chain) {
	if len(o.line) > 0 {
		o.logger.line(slog.LevelInfo, printable(string(o.line), maxLine), c)
		o.line = o.line[:0]
	}
}

// reason returns the line that best explains why the guest failed, or "" if there is
// no output.
func (o *output) reason() string {
	if o.failed != "" {
		return o.failed
	}
	return firstLine(string(o.tail))
}

// printable converts a text of a policy to a single line of at most limit bytes.
func printable(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "\uFFFD"))
	if s = strings.TrimSpace(s); len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
