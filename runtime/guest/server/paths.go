package server

import (
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

const (
	// own is doze's folder in the sandbox: never written to for a client.
	own = "/.doze"
	// maxPath is the kernel's limit on a path.
	maxPath = 4096
	// maxLinks is how many symbolic links are followed to the end of a path,
	// as many as the kernel would.
	maxLinks = 40
)

// path is where a request's path is in the file system.
func (s *Server) path(name string) (string, error) {
	switch {
	case name == "":
		return "", refuse(guest.CodeInvalid, "path is empty")
	case len(name) >= maxPath:
		return "", refuse(guest.CodeInvalid, "path has %d bytes, fewer than %d are allowed", len(name), maxPath)
	case strings.IndexByte(name, 0) >= 0:
		return "", refuse(guest.CodeInvalid, "path holds a zero byte")
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(s.cfg.Workdir, name)
	}
	return filepath.Join(s.cfg.Root, filepath.Clean(name)), nil
}

// shown is what clients call the file at path.
func (s *Server) shown(path string) string {
	if s.cfg.Root == "/" {
		return path
	}
	return filepath.Join("/", strings.TrimPrefix(path, s.cfg.Root))
}

// writable returns the path of a request that is going to change the file,
// unless it belongs to doze. With follow, a symbolic link at its end is followed.
func (s *Server) writable(name string, follow bool) (string, error) {
	path, err := s.path(name)
	if err != nil {
		return "", err
	}
	if follow {
		if path, err = followLinks(path); err != nil {
			return "", err
		}
	}
	real := filepath.Join(realPath(filepath.Dir(path)), filepath.Base(path))
	if archive.Within(real, s.own()) {
		return "", errReserved
	}
	return path, nil
}

func (s *Server) own() string { return filepath.Join(s.cfg.Root, own) }

// followLinks follows symbolic links at the end of a path. Their target need not exist.
func followLinks(path string) (string, error) {
	for range maxLinks {
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil // no link, or nothing there
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(realPath(filepath.Dir(path)), target)
		}
		path = filepath.Clean(target)
	}
	return "", refuse(guest.CodeInvalid, "%s: too many symbolic links", path)
}

// realPath resolves the symbolic links in that part of a path which exists.
func realPath(path string) string {
	for rest := ""; ; path = filepath.Dir(path) {
		if real, err := filepath.EvalSymlinks(path); err == nil {
			return filepath.Join(real, rest)
		}
		if path == "/" || path == "." {
			return filepath.Join(path, rest)
		}
		rest = filepath.Join(filepath.Base(path), rest)
	}
}

// describe is a file as clients see it.
func (s *Server) describe(path string, info fs.FileInfo) guest.FileInfo {
	out := guest.FileInfo{
		Name: filepath.Base(path), Path: s.shown(path), Type: "other", Size: info.Size(),
		Mode: guest.FormatMode(info.Mode()), ModifiedAt: info.ModTime(),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		out.UID, out.GID = st.Uid, st.Gid
	}
	switch info.Mode().Type() {
	case 0:
		out.Type = "file"
	case fs.ModeDir:
		out.Type = "directory"
	case fs.ModeSymlink:
		out.Type = "symlink"
		out.Target, _ = os.Readlink(path)
	}
	return out
}

// describePath describes what is at path now.
func (s *Server) describePath(path string) (guest.FileInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return guest.FileInfo{}, err
	}
	return s.describe(path, info), nil
}

// modeOf reads the permission bits of a request; 0 means that it has none.
func modeOf(r *http.Request) (fs.FileMode, error) {
	text := r.URL.Query().Get("mode")
	if text == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(text, 8, 32)
	if err != nil || mode > 0o777 {
		return 0, refuse(guest.CodeInvalid, "mode %.20q is unusable; it is octal, from \"0000\" to \"0777\"", text)
	}
	return fs.FileMode(mode), nil
}
