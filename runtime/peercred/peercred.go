// Package peercred identifies the process at the other end of a Unix socket.
package peercred

import (
	"net"

	"golang.org/x/sys/unix"
)

// Of returns the credentials that the peer had when it connected; of a dialed connection, the
// ones that the listener had when it began to listen. The kernel translates the pid for the
// PID namespace of this process: it is 0 for a process outside.
func Of(conn *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	if controlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); controlErr != nil {
		return nil, controlErr
	}
	return cred, err
}
