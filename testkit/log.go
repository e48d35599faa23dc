package testkit

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// Log stores what a program under test logs, and adds it to the test's output.
// It is an io.Writer for any number of goroutines.
type Log struct {
	t      testing.TB
	output io.Writer // its own, which a fuzz target must not request

	mu    sync.Mutex
	text  bytes.Buffer
	ended bool // the test, whose output then refuses writes
}

// NewLog returns an empty Log.
func NewLog(t testing.TB) *Log {
	l := &Log{t: t, output: t.Output()}
	t.Cleanup(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.ended = true
	})
	return l
}

// Write implements io.Writer.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		_, _ = l.output.Write(b)
	}
	return l.text.Write(b)
}

// Logger returns a logger of all levels that writes lines of key=value pairs.
func (l *Log) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// String returns everything that was logged.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Contains reports whether a text was logged.
func (l *Log) Contains(text string) bool { return strings.Contains(l.String(), text) }

// Await waits until a text is logged and ends the test after Patience.
func (l *Log) Await(text string) {
	l.t.Helper()
	Eventually(l.t, "the log contains "+text, func() bool { return l.Contains(text) })
}
