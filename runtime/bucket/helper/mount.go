package helper

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/bucket/bucketfs"
)

const (
	device = "/dev/fuse"
	// subtype distinguishes the mounts of this helper, whose type is fuse.doze-bucket, from others in the sandbox.
	subtype = "doze-bucket"
	// unmountAttempts bounds the attempts while the sandbox renames the folders above a mount.
	unmountAttempts = 10
	// maxSource is the kernel's limit of a value of fsconfig(2) in bytes.
	maxSource = 255
)

var errMoved = errors.New("the mount has another path now")

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

// attach attaches a mount at a folder of the sandbox. It replaces other mounts of this helper, or of an earlier one, at
// this path.
func (p *process) attach(mount *os.File, path string) error {
	return p.inMountNamespace(func() error {
		folder, err := openFolder(path)
		if err != nil {
			return &folderError{path, err} // before the sandbox loses another mount
		}
		unix.Close(folder)
		if err := p.unmount(func(m *mountinfo.Info) bool { return m.Mountpoint == path }); err != nil {
			return err
		}
		if folder, err = openFolder(path); err != nil {
			return &folderError{path, err}
		}
		defer unix.Close(folder)
		const paths = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH
		return os.NewSyscallError("move_mount", unix.MoveMount(int(mount.Fd()), "", folder, "", paths))
	})
}

// detach detaches the mounts of this helper, and of earlier ones, that match.
func (p *process) detach(match func(*mountinfo.Info) bool) error {
	return p.inMountNamespace(func() error { return p.unmount(match) })
}

// unmount is detach in the mount namespace of the process. The sandbox may rename the folders above a mount, and
// replace them by symbolic links, at any time. So it takes the present path of a mount, and unmounts what it has opened
// there only if that is the same mount.
func (p *process) unmount(match func(*mountinfo.Info) bool) error {
	var failed error
	for range unmountAttempts {
		mounts, err := p.mounts(match)
		if err != nil || len(mounts) == 0 {
			return err
		}
		failed = nil
		for _, m := range slices.Backward(mounts) { // the upper ones first
			if err := unmountOne(m); err != nil {
				failed = errors.Join(failed, fmt.Errorf("unmount %s: %w", m.Mountpoint, err))
			}
		}
		if failed == nil {
			return nil
		}
	}
	return failed
}

func unmountOne(m *mountinfo.Info) error {
	folder, err := openFolder(m.Mountpoint)
	if err != nil {
		return err
	}
	defer unix.Close(folder)
	var stat unix.Statx_t
	if err := unix.Statx(folder, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &stat); err != nil {
		return os.NewSyscallError("statx", err)
	}
	if stat.Mnt_id != uint64(m.ID) {
		return errMoved
	}
	return os.NewSyscallError("umount", unix.Unmount(strconv.Itoa(folder), unix.MNT_DETACH)) // a link, see inMountNamespace
}

// openFolder opens a folder, or the mount on top of it, for its path only.
func openFolder(path string) (int, error) {
	return unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
}

// folderError means that the path cannot be a mount point.
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
