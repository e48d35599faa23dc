package tree

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attributes sets the attributes of the folders that a pass has created or changed.
func (p *pass) attributes(f folder, n *node) error {
	for _, child := range n.children {
		if !child.stamp.isFolder() || child.same {
			continue
		}
		from, err := openFolder(f.source, child.name)
		if err != nil {
			if err := p.failed(child, err); err != nil {
				return err
			}
			continue
		}
		to, err := openFolder(f.target, child.name)
		if err != nil {
			unix.Close(from)
			return fmt.Errorf("open the copy of %q: %w", child.name, err)
		}
		inner := folder{source: from, target: to}
		err = p.attributes(inner, child)
		inner.close()
		if err != nil {
			return err
		}
	}
	if !n.touched {
		return nil
	}
	if err := setOpen(f.target, f.source, n.stamp); err != nil {
		return p.failed(n, err)
	}
	return nil
}

// setOpen sets owner, mode, extended attributes and times of the open file or folder to. A file is
// new, a folder may have another owner from the first pass.
func setOpen(to, from int, st Stamp) error {
	if st.isFolder() || st.uid != 0 || st.gid != 0 {
		if err := unix.Fchown(to, int(st.uid), int(st.gid)); err != nil {
			return fmt.Errorf("set the owner: %w", err)
		}
	}
	if err := unix.Fchmod(to, st.mode&0o7777); err != nil { // after the owner, whose change clears set-user-ID
		return fmt.Errorf("set the mode: %w", err)
	}
	if err := copyAttributes(descriptor(to), descriptor(from)); err != nil {
		return err
	}
	return setTimes(to, st)
}

// setTimes sets the time of the change of an open file. futimens(3) is utimensat(2) without a
// path, which package unix does not offer.
func setTimes(fd int, st Stamp) error {
	times := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, st.modified}
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("set the times: %w", errno)
	}
	return nil
}

// symlink copies a symbolic link.
func symlink(f folder, n *node) error {
	target := make([]byte, n.stamp.size+1)
	size, err := unix.Readlinkat(f.source, n.name, target)
	if err == unix.EINVAL { // no longer a link
		return errReplaced
	}
	if err != nil {
		return err
	}
	if int64(size) != n.stamp.size {
		return errReplaced
	}
	if err := unix.Symlinkat(string(target[:size]), f.target, n.name); err != nil {
		return err
	}
	return named(f, n)
}

// named sets the attributes of an entry that cannot be opened, in the copy's folder.
func named(f folder, n *node) error {
	st := n.stamp
	if st.uid != 0 || st.gid != 0 {
		if err := unix.Fchownat(f.target, n.name, int(st.uid), int(st.gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("set the owner: %w", err)
		}
	}
	if st.kind() != unix.S_IFLNK {
		if err := unix.Fchmodat(f.target, n.name, st.mode&0o7777, 0); err != nil { // not through a link: the copy is the node's
			return fmt.Errorf("set the mode: %w", err)
		}
	}
	// The calls by path follow no link in their last component, and none before it.
	if err := copyAttributes(inFolder(f.target, n.name), inFolder(f.source, n.name)); err != nil {
		return err
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, st.modified}
	if err := unix.UtimesNanoAt(f.target, n.name, times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the times: %w", err)
	}
	return nil
}

func inFolder(fd int, name string) pathname {
	return pathname("/proc/self/fd/" + strconv.Itoa(fd) + "/" + name)
}

// attributed is an entry with extended attributes.
type attributed interface {
	list(names []byte) (int, error)
	get(name string, value []byte) (int, error)
	set(name string, value []byte) error
	remove(name string) error
}

// descriptor is an open file or folder.
type descriptor int

func (fd descriptor) list(names []byte) (int, error) { return unix.Flistxattr(int(fd), names) }
func (fd descriptor) get(name string, value []byte) (int, error) {
	return unix.Fgetxattr(int(fd), name, value)
}
func (fd descriptor) set(name string, value []byte) error {
	return unix.Fsetxattr(int(fd), name, value, 0)
}
func (fd descriptor) remove(name string) error { return unix.Fremovexattr(int(fd), name) }

// pathname is an entry that cannot be opened.
type pathname string

func (p pathname) list(names []byte) (int, error) { return unix.Llistxattr(string(p), names) }
func (p pathname) get(name string, value []byte) (int, error) {
	return unix.Lgetxattr(string(p), name, value)
}
func (p pathname) set(name string, value []byte) error {
	return unix.Lsetxattr(string(p), name, value, 0)
}
func (p pathname) remove(name string) error { return unix.Lremovexattr(string(p), name) }

// labelOfSELinux is set by the kernel, by its policy for the place of a file.
const labelOfSELinux = "security.selinux"

// copyAttributes makes the extended attributes of an entry, access control lists among them, the
// same as another's. It may have others already: a folder from the first pass, and what is created
// in such a folder the access control list that it inherits.
func copyAttributes(to, from attributed) error {
	wanted, err := attributesOf(from)
	if err != nil {
		return err
	}
	for _, name := range wanted {
		value, err := sized(nil, func(value []byte) (int, error) { return from.get(name, value) })
		if err == unix.ENODATA {
			return errReplaced
		}
		if err == nil {
			err = to.set(name, value)
		}
		if err != nil {
			return fmt.Errorf("copy the extended attribute %s: %w", name, err)
		}
	}
	present, err := attributesOf(to)
	if err != nil {
		return err
	}
	for _, name := range present {
		if slices.Contains(wanted, name) {
			continue
		}
		if err := to.remove(name); err != nil {
			return fmt.Errorf("remove the extended attribute %s: %w", name, err)
		}
	}
	return nil
}

// attributesOf returns the names of the extended attributes of an entry.
func attributesOf(e attributed) (names []string, err error) {
	var buffer [1024]byte
	list, err := sized(buffer[:], e.list)
	if err == unix.ENOTSUP {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the extended attributes: %w", err)
	}
	for name := range bytes.SplitSeq(list, []byte{0}) {
		if len(name) > 0 && string(name) != labelOfSELinux {
			names = append(names, string(name))
		}
	}
	return names, nil
}

// sized calls read with a buffer that is large enough.
func sized(buffer []byte, read func([]byte) (int, error)) ([]byte, error) {
	for {
		if len(buffer) > 0 {
			n, err := read(buffer)
			if err != unix.ERANGE {
				return buffer[:max(n, 0)], err
			}
		}
		n, err := read(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		buffer = make([]byte, n)
	}
}
