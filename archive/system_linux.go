package archive

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// openFlags open what may have become a link or a pipe since it was listed.
const openFlags = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// isLocal has nothing to add to what entryName checks.
func isLocal(string) bool { return true }

func statOf(info fs.FileInfo) stat {
	st := info.Sys().(*syscall.Stat_t)
	return stat{inode: inode{st.Dev, st.Ino}, mode: int64(st.Mode & 0o7777), names: uint64(st.Nlink), uid: int(st.Uid), gid: int(st.Gid)}
}

// realPath asks the kernel for the path of an open folder, so that renames and
// links that others make meanwhile do not matter. It ignores the name.
func realPath(folder *os.Root, _ string) (string, error) {
	f, err := folder.Open(".")
	if err != nil {
		return "", err
	}
	defer f.Close()
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}
