package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dialRetry is how soon a full backlog is tried again: the guest accepts in
// microseconds unless something in the sandbox floods the socket.
const dialRetry = time.Millisecond

// dialSocket connects to the Unix socket at path. The sandbox can write to the
// folder of the socket, so the path may lead to anything: a symbolic link (to
// another socket of the host, say) is refused, and so is any other kind of file. The
// detour through /proc/self/fd also lifts the limit of 108 bytes on the path. The
// pauses between attempts come from after, which is time.After.
func dialSocket(ctx context.Context, path string, after func(time.Duration) <-chan time.Time) (net.Conn, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("%s is not a socket", path)
	}
	var d net.Dialer
	for {
		conn, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d", fd))
		if !errors.Is(err, syscall.EAGAIN) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-after(dialRetry):
		}
	}
}
