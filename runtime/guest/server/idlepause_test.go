package server

import (
	"testing"
	"time"
)

// A server that listens is found after at most twice the time that it took to start, or a
// second later, and a sandbox that stays idle is polled ever less.
func TestIdlePortsArePolledLess(t *testing.T) {
	var at, last time.Duration
	polls := 0
	for at < time.Hour {
		pause := idlePause(at)
		if most := max(at, firstPause); pause > most || pause > max(steadyPause, at/laterShare) || pause < last {
			t.Fatalf("after %s the pause is %s, before it was %s", at, pause, last)
		}
		at += pause
		last = pause
		polls++
	}
	if most := 350; last != maxPause || polls > most {
		t.Errorf("%d polls in an hour, at most %d are allowed; the last pause is %s", polls, most, last)
	}
}
