// Package loglimit bounds the lines that clients can cause in the log, and counts the
// lines that it suppresses.
package loglimit

import (
	"log/slog"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// Limit allows a burst of lines and then a number each second. It is safe for concurrent
// use.
type Limit struct {
	limiter    *rate.Limiter
	suppressed atomic.Uint64
}

// New returns a Limit.
func New(perSecond rate.Limit, burst int) *Limit {
	return &Limit{limiter: rate.NewLimiter(perSecond, burst)}
}

// Allow reports whether a line may be written now. The line gets the attribute
// "suppressed", with the number of lines since the last one, unless that is 0.
func (l *Limit) Allow() (suppressed []slog.Attr, ok bool) {
	if !l.limiter.Allow() {
		l.suppressed.Add(1)
		return nil, false
	}
	if n := l.Suppressed(); n > 0 {
		suppressed = []slog.Attr{slog.Uint64("suppressed", n)}
	}
	return suppressed, true
}

// Suppressed returns the number of lines suppressed since the last one, for a line that
// is written in any case.
func (l *Limit) Suppressed() uint64 { return l.suppressed.Swap(0) }
