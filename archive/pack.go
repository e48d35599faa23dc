package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
)

// maxHardLinks is how many files with several names Pack remembers, and
// maxLinkNames how many bytes of their names. Further ones are packed once for
// each of their names.
const (
	maxHardLinks = 100_000
	maxLinkNames = 16 << 20
)

// PackOptions of Pack. The zero value packs what a client may have: without
// owners, and without what Unpack would refuse.
type PackOptions struct {
	// Links packs symbolic links that lead out of the folder too.
	Links bool
	// SameFilesystem leaves out the contents of folders where another file system
	// is mounted.
	SameFilesystem bool
	// Owners keeps the numbers of users and groups. Without it, root owns all.
	Owners bool
	// ExactTimes keeps fractions of a second, at the cost of 1 KiB per entry.
	ExactTimes bool
	// Strict fails with ErrSpecial where something would be left out.
	Strict bool
	// Skip, if set, is called with the path of everything that is left out, and
	// the reason.
	Skip func(path, reason string)
	// Content, if set, wraps the content of each file, to count it.
	Content func(io.Reader) io.Reader
}

// Pack writes the file, link or folder at the path from as a tar stream, under
// the name; with an empty name, only what the folder contains. Links are not
// followed. Devices, sockets and pipes are left out, and so is what vanishes
// meanwhile. An error leaves the stream without its end.
func Pack(ctx context.Context, w io.Writer, from, name string, o PackOptions) error {
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	p := newPacker(ctx, w, info, o)
	if err := p.add(from, name, info); err != nil {
		return err
	}
	return p.tar.Close()
}

type packer struct {
	PackOptions
	ctx    context.Context
	tar    *tar.Writer
	device uint64           // of the file system that is packed
	links  map[inode]string // names of files that have several
	names  int              // bytes of these
}

func newPacker(ctx context.Context, w io.Writer, root fs.FileInfo, o PackOptions) *packer {
	return &packer{PackOptions: o, ctx: ctx, tar: tar.NewWriter(w), device: statOf(root).device, links: map[inode]string{}}
}

// stat is what the system knows of a file beyond fs.FileInfo. Zero: unknown.
type stat struct {
	inode
	mode     int64  // permissions and, where the system has them, the special bits, as in tar
	names    uint64 // hard links
	uid, gid int
}

type inode struct{ device, number uint64 }

// skip leaves out what is at from.
func (p *packer) skip(from, reason string) error {
	if p.Strict {
		return refuse(ErrSpecial, "%s %s", from, reason)
	}
	if p.Skip != nil {
		p.Skip(from, reason)
	}
	return nil
}

func (p *packer) add(from, name string, info fs.FileInfo) error {
	err := p.ctx.Err()
	if err != nil {
		return err
	}
	switch info.Mode().Type() {
	case 0:
		err = p.file(from, name)
	case fs.ModeDir:
		err = p.folder(from, name, info)
	case fs.ModeSymlink:
		err = p.link(from, name, info)
	default:
		return p.skip(from, notPlain)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // vanished
	}
	return err
}

const notPlain = "is neither a file, a folder nor a link"

func (p *packer) link(from, name string, info fs.FileInfo) error {
	target, err := os.Readlink(from)
	if err != nil {
		return err
	}
	if !p.Links && !isLocalLink(path.Dir(name), target) {
		return p.skip(from, "links to "+target+", out of the folder")
	}
	h := p.header(name, info, tar.TypeSymlink)
	h.Linkname = filepath.ToSlash(target)
	return p.tar.WriteHeader(h)
}

func (p *packer) folder(from, name string, info fs.FileInfo) error {
	var entries []fs.DirEntry
	var err error
	if !p.SameFilesystem || statOf(info).device == p.device {
		entries, err = os.ReadDir(from)
	} else {
		err = p.skip(from, "is on another file system")
	}
	if err != nil {
		return err
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
	f, err := os.OpenFile(from, os.O_RDONLY|openFlags, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return p.skip(from, notPlain)
	}
	h := p.header(name, info, tar.TypeReg)
	if st := statOf(info); st.names > 1 {
		if first, ok := p.links[st.inode]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return p.tar.WriteHeader(h)
		}
		if len(p.links) < maxHardLinks && p.names+len(name) <= maxLinkNames {
			p.links[st.inode] = name
			p.names += len(name)
		}
	}
	h.Size = info.Size()
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	n, err := Copy(p.tar, content(p.Content, io.LimitReader(f, h.Size)))
	if err == nil && n < h.Size {
		err = fmt.Errorf("%s shrank while it was read", from)
	}
	return err
}

// content is a file's content, wrapped if wanted.
func content(wrap func(io.Reader) io.Reader, r io.Reader) io.Reader {
	if wrap == nil {
		return r
	}
	return wrap(r)
}

func (p *packer) header(name string, info fs.FileInfo, kind byte) *tar.Header {
	st := statOf(info)
	h := &tar.Header{Typeflag: kind, Name: name, ModTime: info.ModTime(), Mode: st.mode}
	if p.Owners {
		h.Uid, h.Gid = st.uid, st.gid
	}
	if p.ExactTimes {
		h.Format = tar.FormatPAX
	}
	return h
}
