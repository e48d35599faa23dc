package server

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// maxUnsized bounds what is read of a file that does not say its size.
const maxUnsized = 4 << 20

func (s *Server) stat(r *http.Request) (any, error) {
	q := r.URL.Query()
	path, err := s.path(q.Get("path"))
	if err != nil {
		return nil, err
	}
	stat := os.Lstat
	if q.Get("follow") == "true" {
		stat = os.Stat
	}
	info, err := stat(path)
	if err != nil {
		return nil, err
	}
	hash := q.Get("digest") == "true"
	if !info.Mode().IsRegular() {
		if hash {
			return nil, refuse(guest.CodeInvalid, "%s is not a regular file, so it has no digest; follow=true follows a symbolic link", s.shown(path))
		}
		return s.describe(path, info), nil
	}
	f, _, err := openRegular(path)
	if errors.Is(err, fs.ErrPermission) && !hash {
		return s.describe(path, info), nil // without an ETag
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return s.describeOpen(r.Context(), path, f, hash)
}

// describeOpen describes an open file, with its entity tag and with hash its digest. The tag
// is weak if the file changes meanwhile.
func (s *Server) describeOpen(ctx context.Context, path string, f *os.File, hash bool) (any, error) {
	tag, _, err := settledTag(ctx, f)
	if err != nil {
		return nil, err
	}
	var sum []byte
	if hash {
		if sum, err = hashFile(ctx, f); err != nil {
			return nil, err
		}
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	out := s.describe(path, info)
	out.ETag, out.SHA256 = tag, hex.EncodeToString(sum)
	if hash && strings.HasPrefix(tag, `"`) && tag != etagOfInfo(info) {
		out.ETag = "W/" + tag
	}
	return out, nil
}

func (s *Server) mkdir(r *http.Request) (any, error) {
	mode, err := modeOf(r)
	if err != nil {
		return nil, err
	}
	path, err := s.writable(r.URL.Query().Get("path"), true)
	if err != nil {
		return nil, err
	}
	if err := makeFolder(path, mode); err != nil {
		return nil, err
	}
	return s.describePath(path)
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
	tag, _, err := settledTag(r.Context(), f)
	if err != nil {
		return err
	}
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
	if tag != "" && whole == info.Size() {
		h.Set("ETag", tag)
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
	unlock, err := s.lockMatching(r, path)
	if err != nil {
		return nil, err
	}
	defer unlock()
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
func makeFolder(path string, mode fs.FileMode) error {
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
	unlock, err := s.lockMatching(r, from)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := movePath(r.Context(), from, to); err != nil {
		return nil, err
	}
	return s.describePath(to)
}
