package testkit

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// Poll is unix.Poll, which signals do not interrupt: Go's runtime sends them to preempt goroutines, and poll(2) is never
// restarted.
func Poll(events []unix.PollFd, timeout time.Duration) (int, error) {
	for deadline := time.Now().Add(timeout); ; {
		n, err := unix.Poll(events, max(0, int(time.Until(deadline).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
