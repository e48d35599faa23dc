package server

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// listen makes a Unix socket that everybody may connect to, in place of what
// had its name before. The detour through /proc/self/fd allows folders whose
// path is longer than the 108 bytes of a socket's address.
func listen(folder, name string) (net.Listener, error) {
	dir, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("opening the run folder: %w", err)
	}
	defer dir.Close()
	path := filepath.Join(folder, name)
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("removing a stale socket: %w", err)
	}
	addr := &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)}
	l, err := net.ListenUnix("unix", addr)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // the name in addr means something else by then
	if err := os.Chmod(path, 0o666); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// outsideOnly drops connections from processes in the server's PID namespace.
// The kernel notes the peer's identity when it connects and translates it for
// the reader: a process that has no number here is outside of the sandbox.
type outsideOnly struct{ net.Listener }

func (l outsideOnly) Accept() (net.Conn, error) {
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

// limited accepts no more than cap(open) connections at once.
type limited struct {
	net.Listener
	open   chan struct{}
	closed chan struct{}
	once   *sync.Once
}

func limit(l net.Listener, n int) limited {
	return limited{l, make(chan struct{}, n), make(chan struct{}), new(sync.Once)}
}

func (l limited) Accept() (net.Conn, error) {
	select {
	case l.open <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	conn, err := l.Listener.Accept()
	if err != nil {
		<-l.open
		return nil, err
	}
	return &limitedConn{Conn: conn, leave: sync.OnceFunc(func() { <-l.open })}, nil
}

func (l limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	leave func()
}

func (c *limitedConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}
