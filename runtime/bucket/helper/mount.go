package helper

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
)

const (
	device = "/dev/fuse"
	// subtype distinguishes the mounts of this helper, whose type is fuse.doze-bucket, from others in the sandbox.
	subtype = "doze-bucket"
	// maxSource is the kernel's limit of a value of fsconfig(2) in bytes.
	maxSource = 255
)

// create creates a mount that is not attached, for an open /dev/fuse. source is what mount(8) shows in the sandbox.
// The kernel accepts the descriptor only in the user namespace in which it was opened.
func create(dev *os.File, source string, readOnly bool) (*os.File, error) {
	fd, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fd)
	source = source[:min(len(source), maxSource)]
	options := append(bucketfs.MountOptions(), "source="+source, "subtype="+subtype, fmt.Sprintf("fd=%d", dev.Fd()),
		fmt.Sprintf("rootmode=%o", unix.S_IFDIR), fmt.Sprintf("user_id=%d", os.Geteuid()), fmt.Sprintf("group_id=%d", os.Getegid()))
	for _, option := range options {
		key, value, text := strings.Cut(option, "=")
		if text {
			err = unix.FsconfigSetString(fd, key, value)
		} else {
			err = unix.FsconfigSetFlag(fd, key)
		}
		if err != nil {
			return nil, fmt.Errorf("set %s of the mount: %w", key, err)
		}
	}
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	attributes := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOATIME
	if readOnly {
		attributes |= unix.MOUNT_ATTR_RDONLY
	}
	mount, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, attributes)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(mount), "mount"), nil
}

// attach attaches a mount at a folder of the mount namespace of a process. It replaces other mounts of this
// helper, or of an earlier one, at this path.
func attach(mount *os.File, pid int, path string) error {
	stale, err := mountsAt(pid, path)
	if err != nil {
		return err
	}
	return inMountNamespace(pid, func() error {
		for range stale {
			if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
				return fmt.Errorf("unmount %s: %w", path, err)
			}
		}
		folder, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_NO_SYMLINKS,
		})
		if err != nil {
			return &folderError{path, err}
		}
		defer unix.Close(folder)
		const paths = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
		return os.NewSyscallError("move_mount", unix.MoveMount(int(mount.Fd()), "", folder, "", paths))
	})
}

// detach detaches the mounts of this helper, or of an earlier one, at a path. Open files remain usable.
func detach(pid int, path string) error {
	mounts, err := mountsAt(pid, path)
	if err != nil || len(mounts) == 0 {
		return err
	}
	return inMountNamespace(pid, func() error {
		for range mounts {
			if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
				return fmt.Errorf("unmount %s: %w", path, err)
			}
		}
		return nil
	})
}

// folderError: the path cannot be a mount point.
type folderError struct {
	path string
	err  error
}

func (e *folderError) Error() string {
	switch {
	case errors.Is(e.err, unix.ELOOP):
		return fmt.Sprintf("%s has a symbolic link", e.path)
	case errors.Is(e.err, unix.ENOTDIR):
		return fmt.Sprintf("%s is not a folder", e.path)
	}
	return fmt.Sprintf("open %s: %v", e.path, e.err)
}

func (e *folderError) Unwrap() error { return e.err }

// mountsAt returns the mounts of this helper, and of earlier ones, that are on top at a path of the mount namespace
// of a process.
func mountsAt(pid int, path string) ([]*mountinfo.Info, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	if err != nil {
		return nil, err
	}
	for i, m := range slices.Backward(mounts) {
		if m.FSType != "fuse."+subtype {
			return mounts[i+1:], nil
		}
	}
	return mounts, nil
}

// inMountNamespace calls f in the mount namespace of a process, with the root of that namespace as root and
// working folder.
func inMountNamespace(pid int, f func() error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer namespace.Close()
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
			return f()
		}()
	}()
	return <-done
}
