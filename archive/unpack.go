package archive

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	// maxEntries bounds the time, maxFolders and maxFolderNames (in bytes of paths)
	// the memory, because modes and times of folders are set at the end.
	maxEntries     = 2_000_000
	maxFolders     = 200_000
	maxFolderNames = 32 << 20
	// maxTail is how many bytes may follow the end of an archive: tar pads.
	maxTail = 1 << 20
)

// UnpackOptions of Unpack. The zero value refuses everything that is unsafe.
type UnpackOptions struct {
	// Trusted is for an archive of this program's own Pack: owners, special mode
	// bits and links to anywhere are restored too.
	Trusted bool
	// Gzip accepts compressed archives too. They can fill a disk with little data.
	Gzip bool
	// Reserved is the path of a folder that is not written to: ErrReserved.
	Reserved string
	// FolderMode are permissions that each folder of the archive gets in addition to its own.
	FolderMode fs.FileMode
	// File, if set, is the name under which the first file of the archive is unpacked,
	// all of it or nothing, in place of any other file or link; the rest is ignored.
	File string
	// Skip, if set, is called with the name of each link that leads out of the
	// folder, and of each device, socket and pipe, which is then left out. If it
	// is nil, such an archive is refused.
	Skip func(name, reason string)
	// Content, if set, wraps the content of each file, to count it.
	Content func(io.Reader) io.Reader
}

// Result counts what was unpacked.
type Result struct {
	Files int   // entries of every kind
	Bytes int64 // of contents
}

// Unpack unpacks a tar stream into the folder root. It goes through os.Root for
// everything, so nothing outside of the folder is touched, whatever links are or
// get there. Entries before an error stay unpacked.
func Unpack(ctx context.Context, root *os.Root, r io.Reader, o UnpackOptions) (Result, error) {
	u := &unpacker{UnpackOptions: o, root: root}
	err := u.run(ctx, r)
	return u.result, wrap(err)
}

type unpacker struct {
	UnpackOptions
	root    *os.Root
	base    string // real path of root
	entries int
	result  Result

	// The folder of the last entry, open, because entries of a folder mostly
	// follow each other.
	dir     *os.Root
	dirName string
	dirPath string // real, relative to base

	folders []folderEntry // whose modes and times are still to be set
	names   int           // bytes of their names
}

type folderEntry struct {
	name string
	mode fs.FileMode
	time time.Time
}

func (u *unpacker) run(ctx context.Context, r io.Reader) (err error) {
	defer u.closeFolder()
	if u.base, err = realPath(u.root, u.root.Name()); err != nil {
		return err
	}
	if u.Gzip {
		in := bufio.NewReaderSize(r, 32<<10)
		r = in
		if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
			if r, err = gzip.NewReader(in); err != nil {
				return err
			}
		} else if err != nil && err != io.EOF {
			return err
		}
	}
	entries := tar.NewReader(r)
	for ; ; u.entries++ {
		h, err := entries.Next()
		if err == io.EOF {
			break
		}
		switch {
		case err != nil:
			return err
		case u.entries == maxEntries:
			return refuse(ErrTooLarge, "the archive has more than %d entries", maxEntries)
		case ctx.Err() != nil:
			return ctx.Err()
		case isSparse(h):
			return refuse(ErrInvalid, "entry %.200q is a sparse file; pack it without --sparse", h.Name)
		case u.File == "":
			err = u.entry(h, entries)
		case h.Typeflag == tar.TypeReg:
			u.dir = u.root
			return u.replace(u.File, h, entries)
		}
		if err != nil {
			return err
		}
	}
	if u.File != "" {
		return refuse(ErrInvalid, "the archive has no file")
	}
	// Read on: the checksum of gzip comes last.
	n, err := io.Copy(io.Discard, io.LimitReader(r, maxTail+1))
	if err == nil && n > maxTail {
		err = refuse(ErrInvalid, "more than %d bytes follow the end of the archive", maxTail)
	}
	if err != nil {
		return err
	}
	return u.finish()
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // a comment, such as git's commit
	}
	name, err := entryName(h.Name)
	if err != nil {
		return err
	}
	if name == "." {
		return nil // the folder itself, which keeps its mode
	}
	if err := u.enter(path.Dir(name)); err != nil {
		return err
	}
	base := path.Base(name)
	if u.Reserved != "" && Within(filepath.Join(u.base, u.dirPath, base), u.Reserved) {
		return refuse(ErrReserved, "entry %.200q is in the reserved folder %s", name, u.Reserved)
	}
	switch {
	case h.Typeflag == tar.TypeReg:
		err = u.file(base, h, content)
	case h.Typeflag == tar.TypeDir:
		err = u.folder(name, base, h)
	case h.Typeflag == tar.TypeSymlink && !u.Trusted && !isLocalLink(u.dirPath, h.Linkname):
		return u.skip(ErrUnsafe, name, fmt.Sprintf("is a symbolic link to %.200q, which leads out of the folder", h.Linkname))
	case h.Typeflag == tar.TypeSymlink:
		err = u.symlink(base, h)
	case h.Typeflag == tar.TypeLink:
		err = u.hardLink(name, base, h)
	default:
		return u.skip(ErrInvalid, name, "is a device, a pipe or another special file; only files, folders and links can be unpacked")
	}
	if err == nil {
		u.result.Files++
	}
	return err
}

// skip leaves out an entry, or refuses it with an error of that kind.
func (u *unpacker) skip(kind error, name, reason string) error {
	if u.Skip == nil {
		return refuse(kind, "entry %.200q %s", name, reason)
	}
	u.Skip(name, reason)
	return nil
}

// isSparse reports whether the entry is a sparse file, which could fill a disk
// with little data.
func isSparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

// enter opens the folder in which the next entry is, making it if needed.
func (u *unpacker) enter(name string) error {
	if u.dir != nil && u.dirName == name {
		return nil
	}
	u.closeFolder()
	dir, err := u.root.OpenRoot(name)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.root.MkdirAll(name, 0o755); err != nil {
			return err
		}
		dir, err = u.root.OpenRoot(name)
	}
	if err != nil {
		if there, statErr := u.root.Stat(name); statErr == nil && !there.IsDir() {
			err = &fs.PathError{Op: "unpack", Path: name, Err: syscall.ENOTDIR}
		}
		return err
	}
	rel, err := u.relative(dir, name)
	if err != nil {
		dir.Close()
		return err
	}
	u.dir, u.dirName, u.dirPath = dir, name, rel
	return nil
}

func (u *unpacker) closeFolder() {
	if u.dir != nil && u.dir != u.root {
		u.dir.Close()
	}
	u.dir = nil
}

// relative returns the real path of an open folder, relative to base.
func (u *unpacker) relative(dir *os.Root, name string) (string, error) {
	real, err := realPath(dir, filepath.Join(u.base, name))
	if err != nil {
		return "", err
	}
	rel, err := filepath.Rel(u.base, real)
	if err != nil || !filepath.IsLocal(rel) {
		return "", fmt.Errorf("folder %q was moved away during the unpacking", name)
	}
	return rel, nil
}

const createFlags = os.O_WRONLY | os.O_CREATE | os.O_EXCL

// file writes a regular file. It never writes into an existing file, which may
// be a link, or have other names elsewhere.
func (u *unpacker) file(base string, h *tar.Header, content io.Reader) error {
	f, err := u.dir.OpenFile(base, createFlags, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return u.replace(base, h, content)
	}
	if err != nil {
		return err
	}
	return u.fill(f, base, h, content)
}

// replace writes a regular file under another name, which no other archive that
// is unpacked to the folder uses, and then puts it in its place.
func (u *unpacker) replace(base string, h *tar.Header, content io.Reader) error {
	if err := u.checkNoFolder(base); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	name := ".doze-" + rand.Text()
	f, err := u.dir.OpenFile(name, createFlags, 0o600)
	if err != nil {
		return err
	}
	if err := u.fill(f, name, h, content); err != nil {
		return err
	}
	if err := u.dir.Rename(name, base); err != nil {
		u.dir.Remove(name)
		return err
	}
	return nil
}

// fill writes a new file and closes it. When it fails, it removes the file.
func (u *unpacker) fill(f *os.File, name string, h *tar.Header, from io.Reader) (err error) {
	defer func() {
		if err != nil {
			f.Close()
			u.dir.Remove(name)
		}
	}()
	n, err := Copy(f, content(u.Content, from))
	u.result.Bytes += n
	if err != nil {
		return err
	}
	if err := u.own(name, h); err != nil {
		return err
	}
	if err := f.Chmod(u.mode(h)); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return setTime(u.dir, name, h.ModTime)
}

func (u *unpacker) folder(name, base string, h *tar.Header) error {
	err := u.dir.Mkdir(base, 0o755)
	if errors.Is(err, fs.ErrExist) {
		var there fs.FileInfo
		if there, err = u.dir.Lstat(base); err == nil && !there.IsDir() {
			// A link to a folder within is as good; its target keeps its mode.
			if there, err = u.root.Stat(name); err == nil && !there.IsDir() {
				err = &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOTDIR}
			}
			return err
		}
		if err == nil {
			// Its final mode is set at the end. Until then entries are written to
			// it, for which all users but root need permission.
			err = u.dir.Chmod(base, there.Mode().Perm()|0o700)
		}
	}
	if err != nil {
		return err
	}
	if err := u.own(base, h); err != nil {
		return err
	}
	f := folderEntry{path.Join(u.dirPath, base), u.mode(h) | u.FolderMode, h.ModTime}
	if u.names += len(f.name); len(u.folders) == maxFolders || u.names > maxFolderNames {
		return refuse(ErrTooLarge, "the archive has more than %d folders, or their paths more than %d bytes together", maxFolders, maxFolderNames)
	}
	u.folders = append(u.folders, f)
	return nil
}

func (u *unpacker) symlink(base string, h *tar.Header) error {
	if err := u.clear(base); err != nil {
		return err
	}
	if err := u.dir.Symlink(h.Linkname, base); err != nil {
		return err
	}
	return u.own(base, h)
}

func (u *unpacker) hardLink(name, base string, h *tar.Header) error {
	target, err := entryName(h.Linkname)
	if err != nil {
		return err
	}
	from, err := u.root.Lstat(target)
	if err != nil {
		return err
	}
	if !from.Mode().IsRegular() {
		return refuse(ErrInvalid, "entry %.200q is a hard link to %.200q, which is not a regular file", name, target)
	}
	if there, err := u.dir.Lstat(base); err == nil && os.SameFile(there, from) {
		return nil
	}
	if err := u.clear(base); err != nil {
		return err
	}
	return u.root.Link(target, path.Join(u.dirPath, base))
}

// clear removes the file or link that a new link replaces.
func (u *unpacker) clear(base string) error {
	switch err := u.checkNoFolder(base); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	return u.dir.Remove(base)
}

func (u *unpacker) checkNoFolder(base string) error {
	there, err := u.dir.Lstat(base)
	if err == nil && there.IsDir() {
		return &fs.PathError{Op: "unpack", Path: path.Join(u.dirPath, base), Err: syscall.EISDIR}
	}
	return err
}

// finish sets modes and times of folders, the inner ones first, after everything
// is written.
func (u *unpacker) finish() error {
	for i := len(u.folders) - 1; i >= 0; i-- {
		f := u.folders[i]
		if err := setTime(u.root, f.name, f.time); err != nil {
			return err
		}
		if err := u.root.Chmod(f.name, f.mode); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) mode(h *tar.Header) fs.FileMode {
	mode := h.FileInfo().Mode()
	if u.Trusted {
		return mode & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	}
	return mode.Perm()
}

func (u *unpacker) own(base string, h *tar.Header) error {
	if !u.Trusted {
		return nil
	}
	return u.dir.Lchown(base, h.Uid, h.Gid)
}

func setTime(root *os.Root, name string, t time.Time) error {
	if t.IsZero() || t.Unix() == 0 {
		return nil // not recorded
	}
	return root.Chtimes(name, t, t)
}
