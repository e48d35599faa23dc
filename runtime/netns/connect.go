package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// connect connects the socket fd to an address in its network namespace, and owns fd: if
// it fails, it closes it. The wait blocks no thread and ends with ctx.
func connect(ctx context.Context, fd int, to netip.AddrPort) (net.Conn, error) {
	file := os.NewFile(uintptr(fd), "sandbox")
	defer file.Close() // the connection has its own descriptor
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use the sandbox's socket: %w", err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := file.SetWriteDeadline(deadline); err != nil {
			return nil, fmt.Errorf("set a deadline on the sandbox's socket: %w", err)
		}
	}
	var address unix.Sockaddr = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	if to.Addr().Is4() {
		address = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	stop := context.AfterFunc(ctx, func() { _ = file.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()

	var result error
	err = raw.Write(func(fd uintptr) (done bool) {
		// Until the attempt has ended, connect(2) reports that it is in progress. The poller
		// may wake it for the state of the socket before the attempt.
		result = unix.Connect(int(fd), address)
		return result != unix.EINPROGRESS && result != unix.EALREADY
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		<-ctx.Done() // the poller's clock may be a little ahead of ctx's
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("wait for the connection: %w", err)
	case result != nil:
		return nil, os.NewSyscallError("connect", result)
	}
	conn, err := net.FileConn(file) // sets TCP_NODELAY and keep-alives
	if err != nil {
		return nil, fmt.Errorf("use the sandbox's socket: %w", err)
	}
	return conn, nil
}
