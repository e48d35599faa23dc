package loglimit_test

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/doze-run/doze/loglimit"
	"github.com/doze-run/doze/testkit"
)

func TestLinesBeyondTheLimitAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := loglimit.New(1, 2)
		for range 2 {
			if suppressed, ok := l.Allow(); !ok || suppressed != nil {
				t.Errorf("within the burst: %v, %v", suppressed, ok)
			}
		}
		for range 3 {
			if _, ok := l.Allow(); ok {
				t.Error("a line beyond the burst is allowed")
			}
		}
		time.Sleep(time.Second)
		suppressed, _ := l.Allow()
		testkit.Diff(t, "the attributes of the next line", suppressed, []slog.Attr{slog.Uint64("suppressed", 3)})
		l.Allow()
		if n := l.Suppressed(); n != 1 {
			t.Errorf("%d are suppressed since, want 1", n)
		}
	})
}
