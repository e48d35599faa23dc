package server

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// maxHardLinks is how many files with several names a packer remembers, and
// maxLinkNames how many bytes of their names. What comes after is packed once
// for each of its names.
const (
	maxHardLinks = 100_000
	maxLinkNames = 16 << 20
)

func (s *Server) getArchive(w http.ResponseWriter, r *http.Request) error {
	from, err := s.path(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	if from, err = filepath.EvalSymlinks(from); err != nil {
		return s.pathError(err)
	}
	info, err := os.Stat(from)
	if err != nil {
		return s.pathError(err)
	}
	name := ""
	switch {
	case info.IsDir():
		if _, err := os.ReadDir(from); err != nil {
			return s.pathError(err)
		}
	case info.Mode().IsRegular():
		name = info.Name()
	default:
		return refuse(guest.CodeInvalid, "%s is neither a folder nor a regular file", s.shown(from))
	}
	w.Header().Set("Content-Type", "application/x-tar")
	if err := pack(r.Context(), w, from, name, false); err != nil {
		s.log.Warn("archive broken off", "path", from, "error", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}

// pack writes what is at from as a tar stream, under the name; without one, only
// what is in it. Links are not followed. It leaves out devices, sockets, pipes
// and what is mounted inside; with strict these are errors. What vanishes
// meanwhile is left out too. An error leaves the stream without its end.
func pack(ctx context.Context, w io.Writer, from, name string, strict bool) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	p := &packer{ctx: ctx, tar: tar.NewWriter(w), device: statOf(info).Dev, strict: strict, links: map[inode]string{}}
	if err := p.add(from, name, info); err != nil {
		return err
	}
	return p.tar.Close()
}

type packer struct {
	ctx    context.Context
	tar    *tar.Writer
	device uint64 // of the file system that is packed
	strict bool
	links  map[inode]string // names of files that have several
	names  int              // bytes of these
}

type inode struct{ device, number uint64 }

func statOf(info fs.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }

func (p *packer) add(from, name string, info fs.FileInfo) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	switch info.Mode().Type() {
	case 0:
		return p.file(from, name)
	case fs.ModeDir:
		return p.folder(from, name, info)
	case fs.ModeSymlink:
		target, err := os.Readlink(from)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		h := p.header(name, info, tar.TypeSymlink)
		h.Linkname = target
		return p.tar.WriteHeader(h)
	}
	if p.strict {
		return refuse(guest.CodeInvalid, "%s is neither a file, nor a folder, nor a link", from)
	}
	return nil
}

func (p *packer) folder(from, name string, info fs.FileInfo) error {
	var entries []fs.DirEntry
	if statOf(info).Dev == p.device {
		var err error
		entries, err = os.ReadDir(from)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
	} else if p.strict {
		return refuse(guest.CodeInvalid, "%s is mounted there and cannot be moved", from)
	}
	if name != "" {
		if err := p.tar.WriteHeader(p.header(name+"/", info, tar.TypeDir)); err != nil {
			return err
		}
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := p.add(filepath.Join(from, entry.Name()), path.Join(name, entry.Name()), info); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(from, name string) error {
	f, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := checkRegular(from, info); err != nil {
		return err
	}
	h := p.header(name, info, tar.TypeReg)
	if st := statOf(info); st.Nlink > 1 {
		key := inode{st.Dev, st.Ino}
		if first, ok := p.links[key]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return p.tar.WriteHeader(h)
		}
		if len(p.links) < maxHardLinks && p.names+len(name) <= maxLinkNames {
			p.links[key] = name
			p.names += len(name)
		}
	}
	h.Size = info.Size()
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	n, err := copyAll(p.tar, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s shrank while it was read", from)
	}
	return err
}

func (p *packer) header(name string, info fs.FileInfo, kind byte) *tar.Header {
	st := statOf(info)
	h := &tar.Header{
		Typeflag: kind, Name: name, ModTime: info.ModTime(),
		Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
	}
	if p.strict {
		h.Format = tar.FormatPAX // exact times
	}
	return h
}
