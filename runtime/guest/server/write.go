package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"hash/maphash"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// entry is a name in an open directory. Programs that replace a directory of its path by a
// symbolic link, while it is written, do not lead the write elsewhere.
type entry struct {
	dir  *os.File
	name string
	path string
}

// openEntry opens the directory of a file that is going to be written, and makes missing
// ones with create. A symbolic link at the end of the path is followed. Nothing in the
// reserved directory can be written.
func openEntry(path string, create bool, reserved string) (*entry, error) {
	for range maxLinks {
		e := &entry{name: filepath.Base(path), path: path}
		real := ""
		var err error
		if e.dir, real, err = openFolder(filepath.Dir(path), create, reserved); err != nil {
			return nil, err
		}
		if isIn(filepath.Join(real, e.name), reserved) {
			e.dir.Close()
			return nil, errReserved
		}
		target, isLink := e.readLink()
		if !isLink {
			return e, nil
		}
		e.dir.Close()
		if !filepath.IsAbs(target) {
			target = filepath.Join(real, target)
		}
		path = filepath.Clean(target)
	}
	return nil, refuse(guest.CodeInvalid, "%s: too many symbolic links", path)
}

// openFolder opens a directory to name files in it, and returns its real path.
func openFolder(path string, create bool, reserved string) (dir *os.File, real string, err error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOENT && create {
		if isIn(realPath(path), reserved) {
			return nil, "", errReserved
		}
		if err := os.MkdirAll(path, 0o755); err != nil {
			return nil, "", err
		}
		fd, err = unix.Open(path, flags, 0)
	}
	if err != nil {
		return nil, "", &fs.PathError{Op: "open", Path: path, Err: err}
	}
	dir = os.NewFile(uintptr(fd), path)
	if real, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err != nil {
		dir.Close()
		return nil, "", err
	}
	return dir, real, nil
}

// isIn reports whether path is folder or in it. No path is in an empty one.
func isIn(path, folder string) bool { return folder != "" && archive.Within(path, folder) }

// errReserved refuses a change of doze's own folder.
var errReserved = refuse(guest.CodeNotPermitted, "%s belongs to doze", own)

func (e *entry) fd() int { return int(e.dir.Fd()) }

func (e *entry) fail(op string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: e.path, Err: err}
}

// readLink returns the target of a symbolic link; false for anything else.
func (e *entry) readLink() (string, bool) {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(e.fd(), e.name, buf)
	return string(buf[:max(n, 0)]), err == nil
}

// stat returns the status of the regular file, or nil if it does not exist. It refuses
// everything else.
func (e *entry) stat() (*unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(e.fd(), e.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch kind := st.Mode & unix.S_IFMT; {
	case err == unix.ENOENT:
		return nil, nil
	case err != nil:
		return nil, e.fail("stat", err)
	case kind == unix.S_IFDIR:
		return nil, e.fail("write", syscall.EISDIR)
	case kind != unix.S_IFREG:
		return nil, refuse(guest.CodeInvalid, "%s is neither a regular file nor a link to one", e.path)
	}
	return &st, nil
}

// open opens the file itself. It never waits for the other end of a pipe.
func (e *entry) open(flags int, mode uint32) (*os.File, error) {
	return e.openName(e.name, flags|unix.O_NONBLOCK, mode)
}

func (e *entry) openName(name string, flags int, mode uint32) (*os.File, error) {
	fd, err := unix.Openat(e.fd(), name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
	if err != nil {
		return nil, e.fail("open", err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(filepath.Dir(e.path), name)), nil
}

// hash returns the SHA-256 of the file.
func (e *entry) hash(ctx context.Context) ([]byte, error) {
	f, err := e.open(unix.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return hashFile(ctx, f)
}

// write is one write of a file.
type write struct {
	*entry
	conditions
	mode   fs.FileMode // 0: of the existing file, or 0644
	sha256 []byte      // of the body; nil: any
	// Of a range: its offset, the length of the body, and the size of the file after the
	// write, or -1 where it does not change except by growing.
	partial              bool
	offset, length, size int64
}

// parseWrite returns the write that a request describes, with its entry open.
func (s *Server) parseWrite(r *http.Request) (*write, error) {
	q := r.URL.Query()
	w := &write{conditions: conditions{createNew: q.Get("create_new") == "true"}}
	var err error
	if w.mode, err = modeOf(r); err != nil {
		return nil, err
	}
	if w.ifMatch, err = parseTags("If-Match", r.Header.Get("If-Match")); err != nil {
		return nil, err
	}
	if w.ifNoneMatch, err = parseTags("If-None-Match", r.Header.Get("If-None-Match")); err != nil {
		return nil, err
	}
	if text := q.Get("sha256"); text != "" {
		if w.sha256, err = hex.DecodeString(text); err != nil || len(w.sha256) != sha256.Size {
			return nil, refuse(guest.CodeInvalid, "sha256 %.100q is not %d hexadecimal digits", text, 2*sha256.Size)
		}
	}
	if err := w.parseRange(q); err != nil {
		return nil, err
	}
	path, err := s.path(q.Get("path"))
	if err != nil {
		return nil, err
	}
	w.entry, err = openEntry(path, len(w.ifMatch) == 0, s.own())
	if len(w.ifMatch) > 0 && errors.Is(err, fs.ErrNotExist) {
		return nil, refuse(guest.CodeChanged, "%s does not exist, and If-Match requires it", path)
	}
	return w, err
}

func (w *write) parseRange(q url.Values) error {
	if w.partial = q.Has("offset"); !w.partial {
		return nil
	}
	for name, field := range map[string]*int64{"offset": &w.offset, "length": &w.length, "size": &w.size} {
		n, err := strconv.ParseInt(q.Get(name), 10, 64)
		if err != nil || n < 0 && name != "size" || n > guest.MaxFileSize {
			return refuse(guest.CodeInvalid, "%s %.40q is not a number up to %d", name, q.Get(name), int64(guest.MaxFileSize))
		}
		*field = n
	}
	return nil
}

// writeFile writes the body of a request to a file, whole or not at all; but an I/O error can leave
// a part of a range, or of a file that is a mount, which are written in place.
func (s *Server) writeFile(r *http.Request) (any, error) {
	w, err := s.parseWrite(r)
	if err != nil {
		return nil, err
	}
	defer w.dir.Close()
	if err := w.checkNow(r.Context()); err != nil {
		return nil, err // before the body is read
	}
	temp, err := w.receive(r.Body)
	if err != nil {
		return nil, err
	}
	defer temp.remove()
	unlock, err := s.writes.lock(r.Context(), w.entry)
	if err != nil {
		return nil, err
	}
	defer unlock()
	st, err := w.stat()
	if err != nil {
		return nil, err
	}
	if err := w.evaluate(r.Context(), w.entry, st); err != nil {
		return nil, err
	}
	written, err := w.commit(temp, st)
	if err != nil {
		return nil, err
	}
	defer written.Close()
	return s.describeWritten(w.path, written)
}

// replaceFile writes content to the file at path as writeFile does.
func replaceFile(path string, content io.Reader) error {
	e, err := openEntry(path, true, "")
	if err != nil {
		return err
	}
	defer e.dir.Close()
	w := &write{entry: e}
	st, err := w.stat()
	if err != nil {
		return err
	}
	temp, err := w.receive(content)
	if err != nil {
		return err
	}
	defer temp.remove()
	written, err := w.commit(temp, st)
	if err != nil {
		return err
	}
	return written.Close()
}

// lockMatching refuses a request whose If-Match the file at path does not match, and locks the
// file until the caller has removed or renamed it. Without If-Match it does neither.
func (s *Server) lockMatching(r *http.Request, path string) (unlock func(), err error) {
	tags, err := parseTags("If-Match", r.Header.Get("If-Match"))
	if err != nil || len(tags) == 0 {
		return func() {}, err
	}
	dir, _, err := openFolder(filepath.Dir(path), false, "")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	e := &entry{dir: dir, name: filepath.Base(path), path: path}
	if _, isLink := e.readLink(); isLink {
		return nil, refuse(guest.CodeInvalid, "%s is a symbolic link, and has no ETag; omit If-Match", path)
	}
	if unlock, err = s.writes.lock(r.Context(), e); err != nil {
		return nil, err
	}
	st, err := e.stat()
	if err == nil {
		err = (&conditions{ifMatch: tags}).evaluate(r.Context(), e, st)
	}
	if err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

func (w *write) checkNow(ctx context.Context) error {
	st, err := w.stat()
	if err != nil {
		return err
	}
	return w.evaluate(ctx, w.entry, st)
}

// describeWritten describes a file that was written at path.
func (s *Server) describeWritten(path string, f *os.File) (any, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	out := s.describe(path, info)
	out.ETag = etagOfInfo(info)
	return out, nil
}

// tempFile is a file that has not its final name yet, or none.
type tempFile struct {
	*os.File
	entry *entry
	name  string // empty: it was renamed or removed
}

func (t *tempFile) remove() {
	if t.name != "" {
		unix.Unlinkat(t.entry.fd(), t.name, 0)
	}
	t.Close()
}

// receive writes the body to a new file in the directory of the entry, and verifies it.
func (w *write) receive(body io.Reader) (_ *tempFile, err error) {
	name := ".doze-" + rand.Text()
	f, err := w.openName(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	temp := &tempFile{f, w.entry, name}
	defer func() {
		if err != nil {
			temp.remove()
		}
	}()
	var sum hash.Hash
	if w.sha256 != nil {
		sum = sha256.New()
		body = io.TeeReader(body, sum)
	}
	n, err := archive.Copy(temp, body)
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, refuse(guest.CodeInvalid, "the upload of %s ended early; the file is as it was", w.name)
	case err != nil:
		return nil, err
	case w.partial && n != w.length:
		return nil, refuse(guest.CodeInvalid, "the body has %d bytes, and its Content-Range %d; the file is as it was", n, w.length)
	case sum != nil && string(sum.Sum(nil)) != string(w.sha256):
		return nil, refuse(guest.CodeDigest, "the SHA-256 of the %d bytes that arrived is %x, not %x; the file is as it was", n, sum.Sum(nil), w.sha256)
	}
	return temp, nil
}

// commit makes the received body the file, or a range of it, and returns the open file. st is
// the present file, or nil.
func (w *write) commit(temp *tempFile, st *unix.Stat_t) (*os.File, error) {
	if w.partial {
		return w.overwriteRange(temp, st)
	}
	setOwner(temp.File, st)
	mode := w.modeAfter(st)
	if err := temp.Chmod(mode); err != nil {
		return nil, err
	}
	markWritten(temp.File)
	flags := uint(0)
	if w.onlyNew() {
		flags = unix.RENAME_NOREPLACE // programs in the sandbox do not use our locks
	}
	switch err := unix.Renameat2(w.fd(), temp.name, w.fd(), w.name, flags); {
	case err == unix.EBUSY:
		return w.overwrite(temp, mode)
	case err == unix.EEXIST && !w.createNew:
		return nil, refuse(guest.CodeChanged, "%s exists, and If-None-Match refuses that", w.path)
	case err != nil:
		return nil, w.fail("rename", err)
	}
	temp.name = ""
	return temp.File, nil
}

func (w *write) modeAfter(st *unix.Stat_t) fs.FileMode {
	switch {
	case w.mode != 0:
		return w.mode
	case st != nil:
		return fs.FileMode(st.Mode).Perm()
	}
	return 0o644
}

// overwrite writes content into the file itself. That is not atomic, but all that can be done
// to a file which is a mount, as engines make of /etc/hosts.
func (w *write) overwrite(content *tempFile, mode fs.FileMode) (*os.File, error) {
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	f, err := w.open(unix.O_WRONLY|unix.O_TRUNC, 0)
	if err != nil {
		return nil, err
	}
	_, err = archive.Copy(f, content)
	if err = errors.Join(err, f.Chmod(mode)); err != nil {
		f.Close()
		return nil, err
	}
	markWritten(f)
	return f, nil
}

// overwriteRange writes content into a range of the file. The space is reserved before: a
// full disk changes nothing.
func (w *write) overwriteRange(content *tempFile, st *unix.Stat_t) (f *os.File, err error) {
	flags := unix.O_RDWR
	if st == nil {
		flags |= unix.O_CREAT | unix.O_EXCL
	}
	if f, err = w.open(flags, uint32(w.modeAfter(st))); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
			if st == nil {
				unix.Unlinkat(w.fd(), w.name, 0)
			}
		}
	}()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, cmp.Or[error](err, refuse(guest.CodeInvalid, "%s is not a regular file", w.path))
	}
	if w.length > 0 {
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, w.offset, w.length)
		if err != nil && err != unix.EOPNOTSUPP && err != unix.ENOSYS {
			return nil, w.fail("allocate", err)
		}
	}
	if _, err = content.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	if _, err = f.Seek(w.offset, io.SeekStart); err != nil {
		return nil, err
	}
	if _, err = f.ReadFrom(io.LimitReader(content.File, w.length)); err != nil {
		return nil, err
	}
	if w.size >= 0 {
		if err = f.Truncate(w.size); err != nil {
			return nil, err
		}
	}
	if w.mode != 0 || st == nil {
		if err = f.Chmod(w.modeAfter(st)); err != nil {
			return nil, err
		}
	}
	markWritten(f)
	return f, nil
}

// setOwner gives f the owner of the file that it replaces, if this process may: a sandbox
// may have given up the capability for that.
func setOwner(f *os.File, old *unix.Stat_t) {
	if old != nil && (int(old.Uid) != os.Geteuid() || int(old.Gid) != os.Getegid()) {
		f.Chown(int(old.Uid), int(old.Gid))
	}
}

// fileLocks serialize the commits of writes to one file, so that a condition still holds when
// the file is replaced. Two files may share a lock.
type fileLocks struct {
	seed  maphash.Seed
	locks [64]chan struct{}
}

func newFileLocks() *fileLocks {
	l := &fileLocks{seed: maphash.MakeSeed()}
	for i := range l.locks {
		l.locks[i] = make(chan struct{}, 1)
	}
	return l
}

// lock waits for the lock of the entry's file, whatever path leads to it.
func (l *fileLocks) lock(ctx context.Context, e *entry) (unlock func(), err error) {
	var st unix.Stat_t
	if err := unix.Fstat(e.fd(), &st); err != nil {
		return nil, e.fail("stat", err)
	}
	key := struct {
		dev, ino uint64
		name     string
	}{st.Dev, st.Ino, e.name}
	lock := l.locks[maphash.Comparable(l.seed, key)%uint64(len(l.locks))]
	select {
	case lock <- struct{}{}:
		return func() { <-lock }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
