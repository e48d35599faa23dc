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
	stop := context.AfterFunc(ctx, func() { _ = file.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()

	begun := false
	var result error
	err = raw.Write(func(fd uintptr) (done bool) {
		if !begun {
			begun = true
			result = unix.Connect(int(fd), socketOf(to))
			return !errors.Is(result, unix.EINPROGRESS)
		}
		done, result = connected(int(fd))
		return done
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

// connected reports whether a connection attempt has ended, and with which error. The
// poller may wake it for the state of the socket before the attempt.
func connected(fd int) (done bool, err error) {
	errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return true, err
	}
	if errno != 0 {
		return true, unix.Errno(errno)
	}
	if _, err := unix.Getpeername(fd); errors.Is(err, unix.ENOTCONN) {
		return false, nil
	}
	return true, nil
}

func socketOf(to netip.AddrPort) unix.Sockaddr {
	if to.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
}
