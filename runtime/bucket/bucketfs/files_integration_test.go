//go:build integration

package bucketfs

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/s3test"
	"github.com/doze-run/doze/testkit"
)

func TestObjectIsReadableAsFile(t *testing.T) {
	r := newRig(t)
	large := random(10<<20 + 17)
	r.put("small", "hello")
	r.put("empty", "")
	r.put("a/b/large", large)
	r.wantFile("small", "hello")
	r.wantFile("empty", "")
	r.wantFile("a/b/large", large)
	r.wantNames("", "a/", "empty", "small")
	r.wantNames("a", "b/")
	r.wantNames("a/b", "large")
	info, err := os.Stat(r.path("small"))
	testkit.NoError(t, "stat", err)
	if info.Size() != 5 || info.Mode() != 0o644 {
		t.Errorf("size %d, mode %v", info.Size(), info.Mode())
	}
	_, err = os.Stat(r.path("missing"))
	r.wantErrno("stat missing", err, syscall.ENOENT)
}

func TestClosedFileIsInBucket(t *testing.T) {
	r := newRig(t)
	large := random(40<<20 + 3)
	r.write("small", "hello")
	r.wantObject("small", "hello")
	r.write("empty", "")
	r.wantObject("empty", "")
	r.write("large", large)
	r.wantObject("large", large)
	r.wantFile("large", large)
	testkit.NoError(t, "mkdir", os.Mkdir(r.path("dir"), 0o755))
	r.write("dir/file", "in dir")
	r.wantObject("dir/file", "in dir")
	r.wantNames("", "dir/", "empty", "large", "small")
	r.write("small", "changed")
	r.wantObject("small", "changed")
}

func TestSyncedFileIsInBucket(t *testing.T) {
	r := newRig(t)
	f, err := os.Create(r.path("file"))
	testkit.NoError(t, "create", err)
	defer f.Close()
	r.wantNames("", "file")
	r.wantNoObject("file")
	_, err = f.WriteString("synced")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "sync", f.Sync())
	r.wantObject("file", "synced")
	_, err = f.WriteString(", more")
	testkit.NoError(t, "write", err)
	r.wantFile("file", "synced, more")
	r.wantObject("file", "synced")
	testkit.NoError(t, "close", f.Close())
	r.wantObject("file", "synced, more")
}

func TestWriteChangesPartOfObject(t *testing.T) {
	r := newRig(t)
	r.put("file", "0123456789")
	f, err := os.OpenFile(r.path("file"), os.O_RDWR, 0)
	testkit.NoError(t, "open", err)
	_, err = f.WriteAt([]byte("ab"), 4)
	testkit.NoError(t, "write", err)
	b := make([]byte, 10)
	_, err = f.ReadAt(b, 0)
	testkit.NoError(t, "read", err)
	r.equalAt("content", b, []byte("0123ab6789"))
	testkit.NoError(t, "close", f.Close())
	r.wantObject("file", "0123ab6789")
}

func TestAppend(t *testing.T) {
	r := newRig(t)
	r.put("file", "0123")
	f, err := os.OpenFile(r.path("file"), os.O_WRONLY|os.O_APPEND, 0)
	testkit.NoError(t, "open", err)
	_, err = f.WriteString("45")
	testkit.NoError(t, "write", err)
	_, err = f.WriteString("67")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "close", f.Close())
	r.wantObject("file", "01234567")
}

func TestTruncate(t *testing.T) {
	r := newRig(t)
	r.put("file", "0123456789")
	testkit.NoError(t, "truncate", os.Truncate(r.path("file"), 4))
	r.wantObject("file", "0123")
	testkit.NoError(t, "extend", os.Truncate(r.path("file"), 6))
	r.wantObject("file", "0123\x00\x00")
	testkit.NoError(t, "truncate to 0", os.Truncate(r.path("file"), 0))
	r.wantObject("file", "")
	f, err := os.Create(r.path("file"))
	testkit.NoError(t, "create", err)
	_, err = f.WriteString("abcdef")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "truncate handle", f.Truncate(2))
	testkit.NoError(t, "close", f.Close())
	r.wantObject("file", "ab")
}

func TestUnlink(t *testing.T) {
	r := newRig(t)
	r.put("dir/file", "data")
	testkit.NoError(t, "remove", os.Remove(r.path("dir/file")))
	r.wantNoObject("dir/file")
	r.wantNames("dir")
	testkit.NoError(t, "rmdir", os.Remove(r.path("dir")))
	r.wantNames("")
}

func TestUnlinkedOpenFileStaysReadable(t *testing.T) {
	r := newRig(t)
	f, err := os.Create(r.path("file"))
	testkit.NoError(t, "create", err)
	defer f.Close()
	_, err = f.WriteString("data")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "remove", os.Remove(r.path("file")))
	r.wantNames("")
	b := make([]byte, 4)
	_, err = f.ReadAt(b, 0)
	testkit.NoError(t, "read", err)
	r.equalAt("content", b, []byte("data"))
	testkit.NoError(t, "close", f.Close())
	r.wantNoObject("file")
}

func TestFolders(t *testing.T) {
	r := newRig(t)
	testkit.NoError(t, "mkdir", os.Mkdir(r.path("dir"), 0o755))
	r.wantErrno("mkdir again", os.Mkdir(r.path("dir"), 0o755), syscall.EEXIST)
	r.wantNames("", "dir/")
	r.write("dir/file", "data")
	r.wantErrno("rmdir", unix.Rmdir(r.path("dir")), syscall.ENOTEMPTY)
	r.wantErrno("rename", os.Rename(r.path("dir"), r.path("other")), syscall.EXDEV)
	testkit.NoError(t, "remove all", os.RemoveAll(r.path("dir")))
	r.wantNames("")
}

func TestRename(t *testing.T) {
	r := newRig(t)
	r.put("a", "old a")
	r.put("b", "old b")
	testkit.NoError(t, "rename", os.Rename(r.path("a"), r.path("b")))
	r.wantNoObject("a")
	r.wantObject("b", "old a")
	r.wantFile("b", "old a")
	r.wantNames("", "b")
	r.put("c", "old c")
	err := unix.Renameat2(unix.AT_FDCWD, r.path("b"), unix.AT_FDCWD, r.path("c"), unix.RENAME_NOREPLACE)
	r.wantErrno("rename without replacement", err, syscall.EEXIST)
	r.wantObject("c", "old c")
}

func TestRenameOfFileThatIsOpenForWriting(t *testing.T) {
	r := newRig(t)
	f, err := os.Create(r.path("a"))
	testkit.NoError(t, "create", err)
	_, err = f.WriteString("first")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "rename", os.Rename(r.path("a"), r.path("b")))
	r.wantObject("b", "first")
	_, err = f.WriteString(", second")
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "close", f.Close())
	r.wantObject("b", "first, second")
	r.wantNoObject("a")
	r.wantNames("", "b")
}

// Requests to write the file arrive while the object store has both names. Linux delays them itself, with a lock of the
// inode, so this test does not use the kernel.
func TestRenameLosesNoConcurrentWrite(t *testing.T) {
	r := newRig(t)
	r.put("a", "old")
	r.wantFile("a", "old")
	m, written := r.server.mount, make(chan error, 1)
	r.s3.Fail(func(req *http.Request) s3test.Fault {
		if req.Method != http.MethodDelete {
			return s3test.Fault{}
		}
		m.mu.Lock()
		id := m.byKey[nodeKey{prefix + "a", false}].id
		m.mu.Unlock()
		var opened fuse.OpenOut
		err := failure(m.Open(nil, &fuse.OpenIn{InHeader: fuse.InHeader{NodeId: id}, Flags: syscall.O_WRONLY}, &opened))
		go func() {
			_, code := m.Write(nil, &fuse.WriteIn{Fh: opened.Fh}, []byte("new"))
			err = errors.Join(err, failure(code), failure(m.Flush(nil, &fuse.FlushIn{Fh: opened.Fh})))
			m.Release(nil, &fuse.ReleaseIn{Fh: opened.Fh})
			written <- err
		}()
		select { // the write waits for the rename, or is too early
		case err := <-written:
			written <- err
		case <-time.After(time.Second):
		}
		return s3test.Fault{}
	})
	testkit.NoError(t, "rename", os.Rename(r.path("a"), r.path("b")))
	testkit.NoError(t, "write", testkit.Receive(t, "the end of the write", written))
	r.wantNoObject("a")
	r.wantObject("b", "new")
}

func failure(code fuse.Status) error {
	if code.Ok() {
		return nil
	}
	return syscall.Errno(code)
}

func TestRetiredFileSystemServesOnlyOpenFiles(t *testing.T) {
	r := newRig(t)
	r.put("file", "content")
	f, err := os.OpenFile(r.path("file"), os.O_RDWR, 0)
	testkit.NoError(t, "open", err)
	folder, err := os.Open(r.dir)
	testkit.NoError(t, "open folder", err)
	defer folder.Close()
	path, err := unix.Open(r.path("file"), unix.O_PATH|unix.O_CLOEXEC, 0)
	testkit.NoError(t, "open path", err)
	defer unix.Close(path)
	link := fmt.Sprint("/proc/self/fd/", path)
	r.server.Retire()
	for call, act := range map[string]func() error{
		"open":   func() error { _, err := os.Open(r.path("file")); return err },
		"create": func() error { return os.WriteFile(r.path("new"), nil, 0o644) },
		"remove": func() error { return os.Remove(r.path("file")) },
		"list":   func() error { _, err := os.ReadDir(r.dir); return err },
		"open below an open folder": func() error {
			_, err := unix.Openat(int(folder.Fd()), "file", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			return err
		},
		"open of an open path":     func() error { _, err := os.OpenFile(link, os.O_RDWR, 0); return err },
		"truncate of an open path": func() error { return os.Truncate(link, 1) },
	} {
		r.wantErrno(call, act(), syscall.ENOTCONN)
	}
	if end, err := f.Seek(0, unix.SEEK_HOLE); err != nil || end != int64(len("content")) { // lseek is a request, which the kernel replaces
		t.Errorf("seek in an open file: %d, %v", end, err)
	}
	testkit.NoError(t, "truncate an open file", f.Truncate(4))
	_, err = f.WriteAt([]byte("C"), 0)
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "close", f.Close())
	r.wantObject("file", "Cont")
}
