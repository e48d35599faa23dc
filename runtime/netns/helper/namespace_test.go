package helper

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// Go's runtime interrupts threads by signals, to preempt them.
func TestASignalDoesNotEndTheCheckOfAProcess(t *testing.T) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	thread := unix.Gettid()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { // until stop
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Tgkill(os.Getpid(), thread, unix.SIGURG) // the runtime's own
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	for range 100_000 {
		if !(&namespace{pidfd: fd}).alive() {
			t.Fatal("a running process is reported as ended")
		}
	}
}
