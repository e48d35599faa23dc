package helper

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/tun"
)

// Check creates the network of a sandbox in a new network namespace, which ends with the
// calling thread. Its error describes what the host lacks.
func Check() error {
	runtime.LockOSThread() // never unlocked
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("create a network namespace: %w", err)
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
