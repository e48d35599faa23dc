package helper

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/cgroup"
	"github.com/doze-run/doze/runtime/netns/wire"
)

// namespace is the open network namespace of one sandbox.
type namespace struct {
	pidfd int // of the sandbox's first process
	netns int
}

// alive reports whether the process of the namespace still runs. After its end, its pid may
// belong to another process.
func (n *namespace) alive() bool {
	fds := []unix.PollFd{{Fd: int32(n.pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR { // a signal interrupts even a poll that does not wait
			return err == nil && n == 0
		}
	}
}

func (n *namespace) close() {
	unix.Close(n.netns)
	unix.Close(n.pidfd)
}

// open opens the network namespace of process r.PID if it is a sandbox's: it is not the
// host's, it belongs to a user namespace below the helper's own, and the process is in the
// cgroup r.Cgroup, if that is set. The caller closes it.
//
// Between opening the pidfd and the check that the process still runs, all facts about the
// process are read, so they are about one process even if its pid is reused.
func (s *server) open(r wire.Request) (_ *namespace, err error) {
	if r.PID == 0 || r.PID > 1<<30 {
		return nil, refuse("invalid pid %d", r.PID)
	}
	n := &namespace{pidfd: -1, netns: -1}
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	if n.pidfd, err = unix.PidfdOpen(int(r.PID), 0); err != nil {
		return nil, fmt.Errorf("process %d: %w", r.PID, err)
	}
	proc := "/proc/" + strconv.Itoa(int(r.PID))
	if n.netns, err = unix.Open(proc+"/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("open the network namespace of process %d: %w", r.PID, err)
	}
	if r.Cgroup != "" {
		cgroups, err := os.ReadFile(proc + "/cgroup")
		if err != nil {
			return nil, fmt.Errorf("read the cgroup of process %d: %w", r.PID, err)
		}
		if !cgroup.Contains(r.Cgroup, cgroups) {
			return nil, refuse("process %d is not in %s", r.PID, r.Cgroup)
		}
	}
	if !n.alive() {
		return nil, fmt.Errorf("process %d: %w", r.PID, unix.ESRCH)
	}
	ns, err := inodeOf(n.netns)
	if err != nil {
		return nil, err
	}
	if ns == s.host {
		return nil, refuse("process %d is in the host's network namespace", r.PID)
	}
	below, err := s.ownsBelow(n.netns)
	if err != nil {
		return nil, fmt.Errorf("find the owner of the network namespace of process %d: %w", r.PID, err)
	}
	if !below {
		return nil, wire.Response{Status: wire.StatusForeign,
			Text: fmt.Sprintf("the network namespace of process %d does not belong to a user namespace below Podman's", r.PID)}
	}
	return n, nil
}

// ownsBelow reports whether the user namespace that owns the namespace netns is a descendant
// of the helper's own. The helper's own does not count: processes in it have the helper's
// privileges and are not in a sandbox.
func (s *server) ownsBelow(netns int) (bool, error) {
	const deepest = 33 // the kernel allows 32 levels of user namespaces
	ns, err := unix.IoctlRetInt(netns, unix.NS_GET_USERNS)
	if err == unix.EPERM {
		return false, nil // its owner is outside the helper's own
	}
	if err != nil {
		return false, err
	}
	for level := range deepest {
		here, err := inodeOf(ns)
		parent := -1
		if err == nil && here != s.user {
			parent, err = unix.IoctlRetInt(ns, unix.NS_GET_PARENT)
		}
		unix.Close(ns)
		switch {
		case err == unix.EPERM:
			return false, nil
		case err != nil || here == s.user:
			return level > 0, err
		}
		ns = parent
	}
	unix.Close(ns)
	return false, nil
}

// inode identifies a namespace.
type inode struct{ dev, ino uint64 }

func inodeOf(fd int) (inode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return inode{}, fmt.Errorf("identify a namespace: %w", err)
	}
	return inode{uint64(st.Dev), st.Ino}, nil
}
