package server

import (
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

// The process writes more between two reads of its log than one of them returns.
func TestSearchEndsAlthoughTheLogGrows(t *testing.T) {
	const enough = 100 // reads
	l, output := &processLog{}, []byte(strings.Repeat("y\n", 4*ringRecord))
	l.add(guest.FrameStdout, output)
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the wait ends before its search: what was written until then is searched
	reads := 0
	c := newLogCondition(ctx, l, regexp.MustCompile("^never$"))
	c.read = func(from logPosition, b []byte) logPart {
		part := l.read(from, b)
		if reads++; reads < enough {
			l.add(guest.FrameStdout, output)
		}
		return part
	}
	if met, _, _ := c.holds(watchedProcess{}, &guest.WaitResult{}); met {
		t.Error("a line matches")
	}
	if reads >= enough {
		t.Error("the search has followed the log")
	}
	if c.next.at < int64(len(output)) {
		t.Errorf("the search has ended at %d of %d bytes", c.next.at, len(output))
	}
}
