package bucketfs

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// signalGrace is how long a request goes on after a signal that does not end the program.
	signalGrace = 5 * time.Second
	// signalPoll is the interval at which an interrupted request is checked for signals.
	signalPoll = 100 * time.Millisecond
)

// operation returns the context of a FUSE request. It ends with the connection, and with cause errInterrupted when a
// signal ends the request.
//
// The kernel interrupts the requests of a thread that gets a signal, and also of a sandbox that is being frozen. Programs
// do not expect EINTR of files, and after a wake nothing explains it. So a freeze ends no request: it waits for the
// response, and fails if that takes too long. A killed program ends immediately. Other signals end a request after
// signalGrace, so that a program with a handler of SIGINT can be ended while the object store does not respond.
func (m *mount) operation(interrupt <-chan struct{}, header *fuse.InHeader) (context.Context, context.CancelFunc) {
	return m.interruptible(interrupt, header.Pid, func(signals uint64, since time.Duration) bool {
		return isKilled(signals) || signals != 0 && since >= signalGrace
	})
}

// interruptible returns a context that ends with the connection, and with cause errInterrupted when ends returns true
// for the pending signals of an interrupted thread, and the time since the interrupt.
func (m *mount) interruptible(interrupt <-chan struct{}, thread uint32, ends func(signals uint64, since time.Duration) bool) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(m.ctx)
	go func() { // ends with ctx
		select {
		case <-interrupt:
		case <-ctx.Done():
			return
		}
		start, ticker := time.Now(), time.NewTicker(signalPoll)
		defer ticker.Stop()
		for !ends(pendingSignals(thread), time.Since(start)) {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
		}
		cancel(errInterrupted)
	}()
	return ctx, func() { cancel(context.Canceled) }
}

// isKilled reports whether the signals end the program: the kernel adds SIGKILL to a fatal signal.
func isKilled(signals uint64) bool { return signals&(1<<(unix.SIGKILL-1)) != 0 }

// pendingSignals returns the signals that a thread of the sandbox has not handled yet and does not block, as a mask. If
// it cannot read them, it returns SIGINT.
func pendingSignals(thread uint32) uint64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	if err != nil {
		return 1 << (unix.SIGINT - 1)
	}
	masks := map[string]uint64{}
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(":\t"))
		if mask, err := strconv.ParseUint(string(value), 16, 64); err == nil {
			masks[string(name)] = mask
		}
	}
	return (masks["SigPnd"] | masks["ShdPnd"]) &^ masks["SigBlk"]
}
