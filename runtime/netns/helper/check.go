package helper

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
)

// Check makes what a sandbox's network is made of, in a network namespace of its own,
// which ends with the calling thread. It says what the host lacks.
func Check() error {
	runtime.LockOSThread() // never unlocked
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	device, err := tun.Make()
	if err != nil {
		return err
	}
	defer unix.Close(device)
	listener, err := tun.Listen()
	if err != nil {
		return err
	}
	return unix.Close(listener)
}
