package helper

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/wire"
)

// Probe sends a descriptor of this process's user namespace over control, in a response with
// seq 0.
func Probe(control int) error {
	ns, err := unix.Open("/proc/self/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the user namespace: %w", err)
	}
	if err := send(control, wire.Response{}, ns); err != nil {
		return fmt.Errorf("send the user namespace: %w", err)
	}
	return nil
}
