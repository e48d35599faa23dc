package helper

import (
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/bucket/wire"
	"github.com/doze-run/doze/runtime/cgroup"
)

// process is the first process of a sandbox. Everything that its methods read is this process's, also if its pid is
// reused meanwhile, because an open folder of /proc belongs to one process.
type process struct {
	pid int
	dir int // /proc/PID
}

// openProcess returns the process of a mount if it is in the sandbox's cgroup. The caller closes it.
func openProcess(m wire.Mount) (*process, error) {
	dir, err := unix.Open(fmt.Sprintf("/proc/%d", m.PID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", m.PID, err)
	}
	p := &process{m.PID, dir}
	if err := p.checkCgroup(m.Cgroup); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *process) close() { unix.Close(p.dir) }

// checkCgroup returns an error if the process is not in a cgroup or below it. An empty one is not checked.
func (p *process) checkCgroup(want string) error {
	if want == "" {
		return nil
	}
	f, err := p.open("cgroup")
	if err != nil {
		return err
	}
	defer f.Close()
	cgroups, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("read the cgroup of process %d: %w", p.pid, err)
	}
	if !cgroup.Contains(want, cgroups) {
		return fmt.Errorf("process %d is not in %s", p.pid, want)
	}
	return nil
}

// open opens a file of /proc/PID.
func (p *process) open(name string) (*os.File, error) {
	fd, err := unix.Openat(p.dir, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s of process %d: %w", name, p.pid, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// mounts returns the mounts of this helper, and of earlier ones, in the mount namespace of the process, that
// match.
func (p *process) mounts(match func(*mountinfo.Info) bool) ([]*mountinfo.Info, error) {
	f, err := p.open("mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "fuse."+subtype || !match(m), false
	})
}

// inMountNamespace calls f in the mount namespace of the process, with the root of that namespace as root. The working
// folder has the descriptors of this process as links, such as 3.
func (p *process) inMountNamespace(f func() error) error {
	namespace, err := p.open("ns/mnt")
	if err != nil {
		return err
	}
	defer namespace.Close()
	descriptors, err := os.Open("/proc/self/fd") // the sandbox's /proc does not have this process
	if err != nil {
		return err
	}
	defer descriptors.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with this goroutine
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return os.NewSyscallError("unshare", err)
			}
			if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
				return os.NewSyscallError("setns", err)
			}
			if err := unix.Fchdir(int(descriptors.Fd())); err != nil {
				return os.NewSyscallError("fchdir", err)
			}
			return f()
		}()
	}()
	return <-done
}
