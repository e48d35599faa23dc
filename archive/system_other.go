//go:build !linux

package archive

import (
	"io/fs"
	"os"
	"path/filepath"
)

const openFlags = 0

// isLocal refuses the backslashes, drives and devices of Windows that lead elsewhere.
func isLocal(name string) bool { return filepath.IsLocal(name) }

// statOf knows only the permissions here: files with several names are packed once for each, and
// owners are not.
func statOf(info fs.FileInfo) stat { return stat{mode: int64(info.Mode().Perm())} }

// realPath returns the path of the open folder that name led to. It is for a
// client, whose folder only its own user can change.
func realPath(_ *os.Root, name string) (string, error) {
	name, err := filepath.Abs(name)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(name)
}
