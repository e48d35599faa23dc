package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/doze-run/doze/runtime/netns/wire"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ErrAttached: the sandbox has its network device, and somebody holds the other end.
// If that is this process, it closes that end first.
var ErrAttached = errors.New("its network device is there and in use")

// TUN makes the network device of the sandbox whose first process has this pid, as
// package link describes it, and returns its other end: each Read takes one IP packet
// that the sandbox sent, each Write delivers one to it. The device ends when that is
// closed, or with the process that holds it; a node that starts again just makes
// another one. It does not end with the Client.
//
// Errors wrap ErrAttached, and syscall.ESRCH when the process is gone.
func (c *Client) TUN(ctx context.Context, id sandbox.ID, pid int) (*os.File, error) {
	fd, err := c.inside(ctx, id, pid, wire.Request{Op: wire.OpTUN})
	if errors.Is(err, syscall.EBUSY) {
		err = fmt.Errorf("%w: %w", ErrAttached, err)
	}
	if err != nil {
		return nil, fmt.Errorf("attaching %s to the network: %w", id, err)
	}
	return os.NewFile(uintptr(fd), "tun of "+string(id)), nil
}
