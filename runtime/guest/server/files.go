package server

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// maxUnsized bounds what is read of a file that does not say its size.
const maxUnsized = 4 << 20

func (s *Server) stat(r *http.Request) (any, error) {
	path, err := s.path(r.URL.Query().Get("path"))
	if err != nil {
		return nil, err
	}
	return s.describePath(path)
}

// creating returns a handler that creates a file or folder with the mode and the body of the
// request, and describes it.
func (s *Server) creating(create func(path string, mode fs.FileMode, body io.Reader) error) jsonHandler {
	return func(r *http.Request) (any, error) {
		mode, err := modeOf(r)
		if err != nil {
			return nil, err
		}
		path, err := s.writable(r.URL.Query().Get("path"), true)
		if err != nil {
			return nil, err
		}
		if err := create(path, mode, r.Body); err != nil {
			return nil, err
		}
		return s.describePath(path)
	}
}

// replaceFile writes body to a file next to path and renames it to path, with the mode and
// owner of the replaced file. After an error nothing has changed except for new folders.
func replaceFile(path string, mode fs.FileMode, body io.Reader) (err error) {
	old, err := os.Lstat(path)
	switch {
	case err == nil && old.IsDir():
		return &fs.PathError{Op: "write", Path: path, Err: syscall.EISDIR}
	case err == nil && !old.Mode().IsRegular():
		return refuse(guest.CodeInvalid, "%s is neither a regular file nor a link to one", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err != nil:
		old = nil
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".doze-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			temp.Close()
			os.Remove(temp.Name())
		}
	}()
	if _, err := archive.Copy(temp, body); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return refuse(guest.CodeInvalid, "the upload of %s ended early; the file is as it was", filepath.Base(path))
		}
		return err
	}
	setOwner(temp, old)
	switch {
	case mode != 0:
	case old != nil:
		mode = old.Mode().Perm()
	default:
		mode = 0o644
	}
	if err := temp.Chmod(mode); err != nil {
		return err
	}
	err = os.Rename(temp.Name(), path)
	if errors.Is(err, syscall.EBUSY) {
		if err = overwrite(path, mode, temp); err == nil {
			os.Remove(temp.Name())
		}
	}
	if err != nil {
		return err
	}
	return temp.Close()
}

// overwrite writes content into the file at path. That is not atomic, but all
// that can be done to a file which is a mount, as engines make of /etc/hosts.
func overwrite(path string, mode fs.FileMode, content *os.File) error {
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	_, err = archive.Copy(f, content)
	return errors.Join(err, f.Chmod(mode), f.Close())
}

// setOwner gives f the owner of the file that it replaces, if this process may:
// a sandbox may have given up the capability for that.
func setOwner(f *os.File, old fs.FileInfo) {
	if old == nil {
		return
	}
	st, ok := old.Sys().(*syscall.Stat_t)
	if ok && (int(st.Uid) != os.Geteuid() || int(st.Gid) != os.Getegid()) {
		f.Chown(int(st.Uid), int(st.Gid))
	}
}

func (s *Server) readFile(w http.ResponseWriter, r *http.Request) error {
	path, err := s.path(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	f, info, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	var content io.ReadSeeker = f
	whole := info.Size()
	if info.Size() <= pageSize {
		b, err := readSmall(f, info.Size())
		if err != nil {
			return err
		}
		content, whole = bytes.NewReader(b), int64(len(b))
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	modified := info.ModTime()
	if whole == info.Size() {
		h.Set("ETag", fmt.Sprintf(`"%x-%x-%x"`, info.Sys().(*syscall.Stat_t).Ino, modified.UnixNano(), whole))
	} else {
		modified = time.Time{} // the content changes without it
	}
	http.ServeContent(w, r, "", modified, content)
	return nil
}

// pageSize is the size that every file of /sys reports. Files of /proc report 0.
var pageSize = int64(os.Getpagesize())

// readSmall reads a file that says to have so many bytes, which it has not if it
// is one of the kernel's.
func readSmall(f io.Reader, size int64) ([]byte, error) {
	if size > 0 {
		return io.ReadAll(io.LimitReader(f, size))
	}
	b, err := io.ReadAll(io.LimitReader(f, maxUnsized+1))
	if err == nil && len(b) > maxUnsized {
		err = refuse(guest.CodeTooLarge, "the file does not say its size and has more than %d bytes", maxUnsized)
	}
	return b, err
}

// openRegular opens a regular file. It never blocks on a pipe or touches a device.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, err
	}
	if err := checkRegular(path, info); err != nil {
		return nil, nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	if info, err = f.Stat(); err == nil {
		err = checkRegular(path, info)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

func checkRegular(path string, info fs.FileInfo) error {
	switch {
	case info.IsDir():
		return &fs.PathError{Op: "read", Path: path, Err: syscall.EISDIR}
	case !info.Mode().IsRegular():
		return refuse(guest.CodeInvalid, "%s is not a regular file", path)
	}
	return nil
}

func (s *Server) remove(r *http.Request) (any, error) {
	path, err := s.writable(r.URL.Query().Get("path"), false)
	if err != nil {
		return nil, err
	}
	if path == s.cfg.Root {
		return nil, refuse(guest.CodeNotPermitted, "/ cannot be removed")
	}
	if _, err := os.Lstat(path); err != nil {
		return nil, err
	}
	remove := os.Remove
	if r.URL.Query().Get("recursive") == "true" {
		remove = os.RemoveAll
	}
	return struct{}{}, remove(path)
}

// makeFolder makes a folder of exactly this mode, unless there is one.
func makeFolder(path string, mode fs.FileMode, _ io.Reader) error {
	if mode == 0 {
		mode = 0o755
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	err := os.Mkdir(path, mode)
	if err == nil {
		return os.Chmod(path, mode)
	}
	if info, statErr := os.Stat(path); statErr == nil && info.IsDir() {
		return nil
	}
	return err
}

func (s *Server) move(r *http.Request) (any, error) {
	from, err := s.writable(r.URL.Query().Get("from"), false)
	if err != nil {
		return nil, err
	}
	to, err := s.writable(r.URL.Query().Get("to"), false)
	if err != nil {
		return nil, err
	}
	if err := movePath(r.Context(), from, to); err != nil {
		return nil, err
	}
	return s.describePath(to)
}
