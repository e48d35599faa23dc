package bucketfs

import (
	"encoding/binary"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"
)

func TestRetiredFileSystemChangesSizesOfOpenFilesOnly(t *testing.T) {
	for name, c := range map[string]struct {
		valid uint32
		want  bool
	}{
		"truncate":  {fuse.FATTR_SIZE, false},
		"ftruncate": {fuse.FATTR_SIZE | fuse.FATTR_FH, true},
		"times":     {fuse.FATTR_ATIME | fuse.FATTR_MTIME, true},
	} {
		request := make([]byte, setValidAt+4)
		binary.NativeEndian.PutUint32(request[setValidAt:], c.valid)
		if got := isOfOpenFile(opSetattr, request); got != c.want {
			t.Errorf("%s: got %t, want %t", name, got, c.want)
		}
	}
	if isOfOpenFile(opSetattr, make([]byte, inHeader)) {
		t.Error("a request without attributes is an open file's")
	}
}
