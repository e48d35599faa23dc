package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/doze-run/doze/runtime/netns/wire"
	"github.com/doze-run/doze/runtime/sandbox"
)

// ErrAttached: the sandbox has its network device, and somebody holds the other end.
// If that is this process, it closes that end first.
var ErrAttached = errors.New("its network device is there and in use")

// TUN makes the network of the sandbox whose first process has this pid, as package
// link describes it. Each Read of the device takes one IP packet that the sandbox sent,
// each Write delivers one to it; the listener takes the connections whose first packet
// was written back. The device ends when it is closed, or with the process that holds
// it; a node that starts again just makes another one. Neither ends with the Client.
//
// Errors wrap ErrAttached, and syscall.ESRCH when the process is gone.
func (c *Client) TUN(ctx context.Context, id sandbox.ID, pid int) (device *os.File, listener *net.TCPListener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("attach %s to the network: %w", id, err)
		}
	}()
	fd, err := c.inside(ctx, id, pid, wire.Request{Op: wire.OpTUN})
	if errors.Is(err, syscall.EBUSY) {
		err = fmt.Errorf("%w: %w", ErrAttached, err)
	}
	if err != nil {
		return nil, nil, err
	}
	device = os.NewFile(uintptr(fd), "tun of "+string(id))
	if listener, err = c.listener(ctx, id, pid); err != nil {
		device.Close()
		return nil, nil, err
	}
	return device, listener, nil
}

func (c *Client) listener(ctx context.Context, id sandbox.ID, pid int) (*net.TCPListener, error) {
	fd, err := c.inside(ctx, id, pid, wire.Request{Op: wire.OpListener})
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "listener of "+string(id))
	defer file.Close() // the listener has a descriptor of its own
	l, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}
