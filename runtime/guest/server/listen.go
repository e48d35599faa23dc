package server

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/doze-run/doze/runtime/peercred"
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
type nodeOnly struct{ net.Listener }

func (l nodeOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if peer, err := peercred.Of(conn.(*net.UnixConn)); err == nil && peer.Pid == 0 {
			return conn, nil
		}
		conn.Close()
	}
}
