package helper

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/testkit"
)

// storedFolder is a repository with one backup, of storedDisk. An earlier version wrote it, with Kopia 0.21.1: later versions must
// restore it. To add the repository of another version, change the name, and run this test with -update.
const storedFolder = "testdata/repository-1"

// storedDisk returns the layer of the disk in the stored repository.
func storedDisk(t *testing.T) string {
	t.Helper()
	layer := t.TempDir()
	in := func(name string) string { return filepath.Join(layer, name) }
	sparse := bytes.Repeat([]byte("s"), 64<<10)
	err := errors.Join(
		os.Chmod(layer, 0o755), unix.Lsetxattr(layer, "user.note", []byte("root"), 0),
		os.Mkdir(in("folder"), 0o750), os.WriteFile(in("folder/file"), []byte("content"), 0o640),
		unix.Lsetxattr(in("folder/file"), "user.note", []byte("\x00\xff"), 0), os.Link(in("folder/file"), in("link")),
		os.Symlink("folder/nowhere", in("symlink")), os.WriteFile(in("\xff name"), []byte("not UTF-8"), 0o600),
		os.WriteFile(in("sparse"), nil, 0o600), os.Truncate(in("sparse"), 1<<20),
	)
	testkit.NoError(t, "make the disk", err)
	file, err := os.OpenFile(in("sparse"), os.O_WRONLY, 0)
	testkit.NoError(t, "open", err)
	_, err = file.WriteAt(sparse, 256<<10)
	testkit.NoError(t, "write", errors.Join(err, file.Close()))
	for i, name := range []string{"folder/file", "symlink", "\xff name", "sparse", "folder", ""} {
		setTime(t, in(name), time.Unix(981173106+int64(i), 789))
	}
	return layer
}

func TestStoredRepositoryIsRestored(t *testing.T) {
	layer := storedDisk(t)
	r := newRig(t)
	_, err := os.Stat(storedFolder)
	if testkit.Update() && errors.Is(err, fs.ErrNotExist) {
		r.backUp("stored", []string{layer}, nil)
		testkit.NoError(t, "store the repository", os.CopyFS(storedFolder, os.DirFS(r.blobs)))
	}
	r = newRig(t)
	testkit.NoError(t, "copy the repository", os.CopyFS(r.blobs, os.DirFS(storedFolder)))
	opened, err := r.open(wire.Request{Operation: wire.List})
	testkit.NoError(t, "open", err)
	backups, err := opened.list(testkit.Context(t), "owner")
	if err != nil || len(backups) != 1 || string(backups[0].Record) != `{"id":"stored"}` || backups[0].Usage.Entries != 7 {
		t.Fatalf("the backups are %+v, %v", backups, err)
	}
	if os.Getuid() != 0 {
		return // the files belong to root
	}
	target, _, err := r.restore("stored")
	testkit.NoError(t, "restore", err)
	testkit.Diff(t, "the restored disk", diskOf(t, []string{target}, nil), diskOf(t, []string{layer}, nil))
	r.backUp("another", []string{layer}, nil)
}
