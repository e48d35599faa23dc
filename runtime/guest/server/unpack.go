package server

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
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// maxArchiveEntries bounds the work, maxArchiveFolders and maxArchiveNames (in
	// bytes, of folders) the memory, because modes and times of folders are set at
	// the end. More is CodeTooLarge.
	maxArchiveEntries = 2_000_000
	maxArchiveFolders = 200_000
	maxArchiveNames   = 32 << 20
	// maxArchiveTail is what may follow the end of an archive: tar pads.
	maxArchiveTail = 1 << 20
)

func (s *Server) putArchive(w http.ResponseWriter, r *http.Request) error {
	folder, err := s.writable(r.URL.Query().Get("path"), true)
	if err != nil {
		return err
	}
	if err := makeFolder(folder, 0); err != nil {
		return s.pathError(err)
	}
	res, err := unpack(r.Context(), folder, s.own(), r.Body, false)
	if err != nil {
		return s.pathError(err)
	}
	return answer(w, res)
}

// unpack unpacks a tar stream, gzipped or not, into folder. All that it does
// goes through an os.Root, so nothing outside of folder is touched, whatever
// links are or get there; nor what is in reserved. Entries that try are refused,
// and so are symbolic links that lead out of folder. With trusted the stream is
// our own: owners, special modes and links anywhere are restored too.
func unpack(ctx context.Context, folder, reserved string, body io.Reader, trusted bool) (guest.ArchiveResult, error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return guest.ArchiveResult{}, err
	}
	defer root.Close()
	u := &unpacker{root: root, reserved: reserved, trusted: trusted}
	defer u.leave()
	if u.base, err = whereIs(root); err != nil {
		return u.result, err
	}
	if err := u.unpack(ctx, body); err != nil {
		return u.result, archiveError(err)
	}
	return u.result, u.finish()
}

// archiveError names what is wrong with an archive; other errors stay.
func archiveError(err error) error {
	switch {
	case escapes(err):
		return refuse(guest.CodeUnsafeArchive, "a link leads out of the folder: %v", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(guest.CodeInvalid, "the archive ends early; what was complete before is unpacked")
	case errors.Is(err, tar.ErrHeader), errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		return refuse(guest.CodeInvalid, "this is neither a sound tar nor a sound tar.gz: %v", err)
	}
	return err
}

type unpacker struct {
	root     *os.Root
	base     string // real path of root
	reserved string
	trusted  bool
	result   guest.ArchiveResult

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

func (u *unpacker) unpack(ctx context.Context, body io.Reader) error {
	in := bufio.NewReaderSize(body, 32<<10)
	var from io.Reader = in
	if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		if from, err = gzip.NewReader(in); err != nil {
			return err
		}
	} else if err != nil && err != io.EOF {
		return err
	}
	entries := tar.NewReader(from)
	for n := 0; ; n++ {
		h, err := entries.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if n == maxArchiveEntries {
			return refuse(guest.CodeTooLarge, "the archive has more than %d entries", maxArchiveEntries)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := u.entry(h, entries); err != nil {
			return err
		}
	}
	// Read on: the checksum of gzip comes last.
	n, err := io.Copy(io.Discard, io.LimitReader(from, maxArchiveTail+1))
	if err == nil && n > maxArchiveTail {
		err = refuse(guest.CodeInvalid, "something follows the end of the archive")
	}
	return err
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
	if u.reserved != "" && within(filepath.Join(u.base, u.dirPath, base), u.reserved) {
		return refuse(guest.CodeNotPermitted, "%s: %s belongs to doze", name, own)
	}
	switch {
	case isSparse(h):
		return refuse(guest.CodeInvalid, "%s is a sparse file; pack it without --sparse", name)
	case h.Typeflag == tar.TypeReg:
		err = u.file(base, h, content)
	case h.Typeflag == tar.TypeDir:
		err = u.folder(name, base, h)
	case h.Typeflag == tar.TypeSymlink:
		err = u.symlink(name, base, h)
	case h.Typeflag == tar.TypeLink:
		err = u.hardLink(name, base, h)
	default:
		return refuse(guest.CodeInvalid, "%s is a device, a pipe or another special file; only files, folders and links can be unpacked", name)
	}
	if err == nil {
		u.result.Files++
	}
	return err
}

// entryName checks a name in an archive and returns it clean.
func entryName(name string) (string, error) {
	switch {
	case len(name) >= maxPath:
		return "", refuse(guest.CodeInvalid, "an entry's name has %d bytes, fewer than %d are allowed", len(name), maxPath)
	case name == "" || strings.IndexByte(name, 0) >= 0:
		return "", refuse(guest.CodeInvalid, "an entry's name is unusable")
	case strings.HasPrefix(name, "/"):
		return "", refuse(guest.CodeUnsafeArchive, "entry %.200q has an absolute path", name)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", refuse(guest.CodeUnsafeArchive, "entry %.200q leads out of the folder", name)
		}
	}
	return path.Clean(name), nil
}

func isSparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// enter opens the folder in which the next entry is, making it if needed.
func (u *unpacker) enter(name string) error {
	if u.dir != nil && u.dirName == name {
		return nil
	}
	u.leave()
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
	real, err := whereIs(dir)
	if err != nil {
		dir.Close()
		return err
	}
	rel, err := filepath.Rel(u.base, real)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		dir.Close()
		return fmt.Errorf("%s was moved while it was unpacked to", name)
	}
	u.dir, u.dirName, u.dirPath = dir, name, rel
	return nil
}

func (u *unpacker) leave() {
	if u.dir != nil {
		u.dir.Close()
		u.dir = nil
	}
}

// whereIs asks the kernel for the real path of an open folder.
func whereIs(root *os.Root) (string, error) {
	f, err := root.Open(".")
	if err != nil {
		return "", err
	}
	defer f.Close()
	return os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}

// file writes a regular file. It never writes into what is there: that may be a
// link, or have other names elsewhere.
func (u *unpacker) file(base string, h *tar.Header, content io.Reader) (err error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	name := base
	f, err := u.dir.OpenFile(name, flags, 0o600)
	if errors.Is(err, fs.ErrExist) {
		if err := u.checkNoFolder(base); err != nil {
			return err
		}
		// Until it takes the place of the other. The name is nobody else's:
		// archives may be unpacked to one folder at the same time.
		name = ".doze-" + rand.Text()
		f, err = u.dir.OpenFile(name, flags, 0o600)
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			u.dir.Remove(name)
		}
	}()
	n, err := copyAll(f, content)
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
	if err := setTime(u.dir, name, h.ModTime); err != nil {
		return err
	}
	if name != base {
		return u.dir.Rename(name, base)
	}
	return nil
}

func (u *unpacker) folder(name, base string, h *tar.Header) error {
	err := u.dir.Mkdir(base, 0o755)
	if errors.Is(err, fs.ErrExist) {
		there, err := u.dir.Lstat(base)
		if err != nil {
			return err
		}
		if !there.IsDir() {
			// A link to a folder within is as good; its target keeps its mode.
			if target, err := u.root.Stat(name); err != nil {
				return err
			} else if !target.IsDir() {
				return &fs.PathError{Op: "mkdir", Path: name, Err: syscall.ENOTDIR}
			}
			return nil
		}
		// Its final mode comes at the end; until then it takes entries. Root
		// needs no leave for that, others do.
		if err := u.dir.Chmod(base, there.Mode().Perm()|0o700); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	if err := u.own(base, h); err != nil {
		return err
	}
	f := folderEntry{path.Join(u.dirPath, base), u.mode(h), h.ModTime}
	if u.names += len(f.name); len(u.folders) == maxArchiveFolders || u.names > maxArchiveNames {
		return refuse(guest.CodeTooLarge, "the archive has more than %d folders, or their paths more than %d bytes together", maxArchiveFolders, maxArchiveNames)
	}
	u.folders = append(u.folders, f)
	return nil
}

func (u *unpacker) symlink(name, base string, h *tar.Header) error {
	if !u.trusted && !staysIn(u.dirPath, h.Linkname) {
		return refuse(guest.CodeUnsafeArchive, "%s is a symbolic link to %.200q, which leads out of the folder", name, h.Linkname)
	}
	if err := u.clear(base); err != nil {
		return err
	}
	if err := u.dir.Symlink(h.Linkname, base); err != nil {
		return err
	}
	return u.own(base, h)
}

// staysIn says whether a symbolic link in dir, a real path relative to the root,
// stays below the root. It may go up first and then down; going up again could
// start from wherever another link leads.
func staysIn(dir, target string) bool {
	if target == "" || path.IsAbs(target) {
		return false
	}
	depth := 0
	if dir != "." {
		depth = strings.Count(dir, "/") + 1
	}
	down := false
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; down || depth < 0 {
				return false
			}
		default:
			down = true
		}
	}
	return true
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
		return refuse(guest.CodeInvalid, "%s is a hard link to %q, which is no regular file", name, target)
	}
	if there, err := u.dir.Lstat(base); err == nil && os.SameFile(there, from) {
		return nil
	}
	if err := u.clear(base); err != nil {
		return err
	}
	return u.root.Link(target, path.Join(u.dirPath, base))
}

// clear removes a file or link that is where a link shall be.
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

// finish sets modes and times of folders, the inner ones first, now that nothing
// is written to them any more.
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
	if u.trusted {
		return mode & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
	}
	return mode.Perm()
}

func (u *unpacker) own(base string, h *tar.Header) error {
	if !u.trusted {
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
