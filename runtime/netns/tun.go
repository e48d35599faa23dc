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

// ErrAttached: the sandbox has its network device, and a process has its other end open. If
// that is this process, it has to close that end first.
var ErrAttached = errors.New("its network device exists and is in use")

// TUN creates the network of the sandbox whose first process has this pid, as package link
// describes it. Each Read of the device returns one IP packet that the sandbox sent, each
// Write delivers one to it. The listener accepts the connections whose first packet was
// written back to the device. The caller closes both. The kernel removes the device when it
// is closed, or when this process ends; a restarted node creates another one. Both outlive
// the Client.
//
// Errors wrap ErrAttached, and syscall.ESRCH if the sandbox's process has ended.
func (c *Client) TUN(ctx context.Context, id sandbox.ID, pid int) (device *os.File, listener *net.TCPListener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("attach %s to the network: %w", id, err)
		}
	}()
	fd, err := c.request(ctx, id, pid, wire.OpTUN)
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
	fd, err := c.request(ctx, id, pid, wire.OpListener)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "listener of "+string(id))
	defer file.Close() // the listener has its own descriptor
	l, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}
