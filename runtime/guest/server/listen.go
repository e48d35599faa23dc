package server

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// listen makes a Unix socket that any user may connect to, and replaces an existing file with
// its name. The detour through /proc/self/fd allows folders whose path is longer than the
// 108 bytes of a socket's address.
func listen(folder, name string) (net.Listener, error) {
	dir, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("open the run folder: %w", err)
	}
	defer dir.Close()
	path := filepath.Join(folder, name)
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("remove a stale socket: %w", err)
	}
	addr := &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // the name in addr means something else by then
	if err := os.Chmod(path, 0o666); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// nodeOnly drops connections from processes in the server's PID namespace.
// The kernel notes the peer's identity when it connects and translates it for
// the reader: a process that has no number here is outside of the sandbox.
type nodeOnly struct{ net.Listener }

func (l nodeOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if pid, err := peerPID(conn); err == nil && pid == 0 {
			return conn, nil
		}
		conn.Close()
	}
}

func peerPID(conn net.Conn) (int32, error) {
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, errors.New("not a Unix socket")
	}
	raw, err := unixConn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if err := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if err != nil {
		return 0, err
	}
	return cred.Pid, nil
}
