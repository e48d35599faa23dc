package bucketfs

import (
	"strings"
	"syscall"
	"unicode/utf8"
)

const (
	// maxName is the maximum length of a name in bytes, as on other file systems of Linux.
	maxName = 255
	// maxKey is the maximum length of a key in bytes, S3's limit.
	maxKey = 1024
)

// checkName returns an errno if name cannot be a component of a key.
func checkName(name string) syscall.Errno {
	switch {
	case len(name) > maxName:
		return syscall.ENAMETOOLONG
	case name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00"):
		return syscall.EINVAL
	case !utf8.ValidString(name):
		return syscall.EILSEQ
	}
	return 0
}

// child returns the key of a file in a folder. The folder's own key would have a "/" more.
func child(folder, name string) (string, syscall.Errno) {
	if errno := checkName(name); errno != 0 {
		return "", errno
	}
	if len(folder)+len(name)+1 > maxKey {
		return "", syscall.ENAMETOOLONG
	}
	return folder + name, 0
}

// childName returns the name in a folder that a listed key or common prefix stands for, and false
// if it does not stand for any: the folder's marker, keys of other folders, names that a file system
// cannot represent.
func childName(folder, key string) (string, bool) {
	name, ok := strings.CutPrefix(strings.TrimSuffix(key, "/"), folder)
	return name, ok && len(key) <= maxKey && checkName(name) == 0
}

// parentOf returns the key of the folder that contains a key.
func parentOf(key string) string {
	return key[:strings.LastIndexByte(strings.TrimSuffix(key, "/"), '/')+1]
}
