package server

import (
	"syscall"
	"time"
)

// endAll ends every process of the PID namespace but this one, which is its
// PID 1: SIGTERM, and SIGKILL to what is left after grace. The reaper waits for
// them meanwhile.
func endAll(grace time.Duration) {
	syscall.Kill(-1, syscall.SIGTERM)
	syscall.Kill(-1, syscall.SIGCONT) // a stopped process notices SIGTERM only then
	if alone(grace) {
		return
	}
	syscall.Kill(-1, syscall.SIGKILL)
	alone(killLimit)
}

// alone waits until no other process is left.
func alone(limit time.Duration) bool {
	tick := time.NewTicker(pollPause)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); <-tick.C {
		if syscall.Kill(-1, 0) == syscall.ESRCH {
			return true
		}
	}
	return false
}
