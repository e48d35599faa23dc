package server

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

// The log always has more lines than were searched.
func TestSearchOfALogThatGrowsFasterEndsWithItsWait(t *testing.T) {
	l, stop, output := &processLog{}, make(chan struct{}), []byte(strings.Repeat("y\n", ringRecord/2))
	l.add(guest.FrameStdout, output)
	var writer sync.WaitGroup
	writer.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				l.add(guest.FrameStdout, output)
			}
		}
	})
	defer writer.Wait()
	defer close(stop)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	c := &logCondition{ctx: ctx, log: l, expression: regexp.MustCompile("^(y?){200}never$")}
	ended := make(chan bool, 1)
	go func() {
		met, _, _ := c.holds(watchedProcess{}, &guest.WaitResult{})
		ended <- met
	}()
	if testkit.Receive(t, "the search ends", ended) {
		t.Error("a line matches")
	}
}
