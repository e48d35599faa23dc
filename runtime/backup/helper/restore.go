package helper

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

const (
	// Limits of a window of files. A window is fetched from the object store while the previous one is
	// written. The cache of the repository has space for the packs of several windows.
	windowBytes   = 64 << 20
	windowFiles   = 4096
	windowFolders = 256 // their descriptors are open
	writers       = 4
	// maxList limits the list of a folder, in bytes of JSON. A million entries take 300 MB.
	maxList = 512 << 20
)

// restore creates the folder request.Target with the disk of a backup.
func (r *repository) restore(ctx context.Context, request wire.Request, node *peer) (wire.Result, error) {
	defer r.discardContents()
	manifests, err := r.find(ctx, map[string]string{backupTag: request.IDs[0]})
	if err != nil {
		return wire.Result{}, err
	}
	if len(manifests) == 0 {
		return wire.Result{}, &wire.Error{Code: wire.NotFound, Message: "no backup has the id " + request.IDs[0]}
	}
	backup := manifests[0]
	var record wire.Backup
	if err := json.Unmarshal([]byte(backup.Description), &record); err != nil {
		return wire.Result{}, damaged(err)
	}
	p := startProgress(ctx, node)
	p.expect(record.Usage)
	defer p.conclude()
	w := writer{ctx: ctx, source: r, progress: p, details: map[string]*detail{}}
	if err := w.run(backup.RootEntry, request.Target); err != nil {
		return wire.Result{}, err
	}
	usage, err := tree.Measure(ctx, request.Target, tree.Usage{})
	return wire.Result{Usage: wire.Usage(usage)}, err
}

// contradictory returns the error for a backup whose entries contradict each other, such as two with one name.
func contradictory(err error) error {
	for _, errno := range []unix.Errno{unix.EEXIST, unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EINVAL} {
		if errors.Is(err, errno) {
			return damaged(err)
		}
	}
	return err
}

// writer writes a backup to a folder.
type writer struct {
	ctx      context.Context
	source   repo.Repository
	progress *progress
	details  map[string]*detail // by path
	links    []*detail
	buffers  sync.Pool
}

// folder is a folder to write. Its descriptor is open while uses is not 0.
type folder struct {
	entry *snapshot.DirEntry
	name  string
	path  string // with encoded names
	inner []*folder

	mu   sync.Mutex
	fd   int
	uses int
}

func (w *writer) run(root *snapshot.DirEntry, target string) (err error) {
	defer func() { err = contradictory(err) }()
	if root == nil {
		return damaged(errors.New("the backup has no root"))
	}
	var disk *snapshot.DirEntry
	entries, err := w.entries(root)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch e.Name {
		case diskName:
			disk = e
		case detailsName:
			if err := w.readDetails(e); err != nil {
				return err
			}
		}
	}
	if disk == nil {
		return damaged(errors.New("the backup has no folder " + diskName))
	}
	if err := os.Mkdir(target, 0o700); err != nil {
		return err
	}
	fd, err := unix.Open(target, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	top := &folder{entry: disk, fd: fd, uses: 1}
	if err := w.files(top); err != nil {
		return err
	}
	if err := w.special(fd); err != nil {
		return err
	}
	return w.folderAttributes(top, fd)
}

// entries returns the entries of a folder in the repository.
func (w *writer) entries(e *snapshot.DirEntry) ([]*snapshot.DirEntry, error) {
	r, err := w.source.OpenObject(w.ctx, e.ObjectID)
	if err != nil {
		return nil, w.unreadable(e, err)
	}
	defer r.Close()
	var manifest snapshot.DirManifest
	if err := json.NewDecoder(io.LimitReader(r, maxList)).Decode(&manifest); err != nil {
		return nil, w.unreadable(e, err)
	}
	if slices.Contains(manifest.Entries, nil) {
		return nil, damaged(fmt.Errorf("the list of the folder %q has an empty entry", e.Name))
	}
	return manifest.Entries, nil
}

// unreadable describes an entry that cannot be read from the repository.
func (w *writer) unreadable(e *snapshot.DirEntry, err error) error {
	return unreadable(w.ctx, strconv.Quote(e.Name), err)
}

func (w *writer) readDetails(e *snapshot.DirEntry) error {
	if e.FileSize > maxDetails+1<<20 {
		return damaged(errors.New("the details of the backup are too large"))
	}
	r, err := w.source.OpenObject(w.ctx, e.ObjectID)
	if err != nil {
		return w.unreadable(e, err)
	}
	defer r.Close()
	limited := &io.LimitedReader{R: r, N: e.FileSize + 1}
	for lines := json.NewDecoder(limited); ; {
		d := &detail{}
		err := lines.Decode(d)
		if err == io.EOF && limited.N == 1 {
			return nil
		}
		if err != nil {
			return w.unreadable(e, err)
		}
		switch {
		case d.Link != "":
			w.links = append(w.links, d)
		default:
			w.details[d.Path] = d
		}
	}
}

// window is a batch of files that are fetched and written together.
type window struct {
	files   []file
	objects []object.ID
	bytes   int64
	folders int
}

// file is a file or a symbolic link to write.
type file struct {
	folder *folder
	entry  *snapshot.DirEntry
}

// files writes folders, files and symbolic links. It fetches each window while it writes the previous one.
func (w *writer) files(top *folder) error {
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	fetched := make(chan *window, 1)
	walked := make(chan error, 1)
	go func() {
		defer close(fetched)
		walk := walk{w: w, ctx: ctx, out: fetched, window: &window{}}
		err := walk.folder(top, 0)
		if err == nil {
			err = walk.send()
		}
		walked <- err
	}()
	var failed error
	for batch := range fetched {
		if failed == nil {
			if failed = w.window(batch); failed != nil {
				cancel()
			}
		}
		for _, f := range batch.files {
			f.folder.release()
		}
	}
	err := <-walked
	if failed != nil {
		return failed
	}
	return err
}

// walk reads the folders of a backup, creates them, and sends windows of their files.
type walk struct {
	w      *writer
	ctx    context.Context
	out    chan<- *window
	window *window
}

func (k *walk) folder(f *folder, depth int) error {
	defer f.release()
	if depth > maxDepth {
		return damaged(tree.ErrTooDeep)
	}
	if err := k.ctx.Err(); err != nil {
		return err
	}
	entries, err := k.w.entries(f.entry)
	if err != nil {
		return err
	}
	k.window.folders++
	for _, e := range entries {
		switch e.Type {
		case snapshot.EntryTypeFile, snapshot.EntryTypeSymlink:
			f.use()
			k.window.files = append(k.window.files, file{f, e})
			k.window.objects = append(k.window.objects, e.ObjectID)
			k.window.bytes += e.FileSize
			if k.window.bytes >= windowBytes || len(k.window.files) >= windowFiles || k.window.folders >= windowFolders {
				if err := k.send(); err != nil {
					return err
				}
			}
		case snapshot.EntryTypeDirectory:
			inner, err := k.w.create(f, e)
			if err != nil {
				return err
			}
			if err := k.folder(inner, depth+1); err != nil {
				return err
			}
		default:
			return damaged(fmt.Errorf("%q has the unknown type %q", e.Name, e.Type))
		}
	}
	k.w.progress.add(0)
	return nil
}

// send prefetches the files of the window, and sends the window to out.
func (k *walk) send() error {
	batch := k.window
	k.window = &window{}
	if len(batch.objects) > 1 {
		// Reading the content reports a failure.
		_, _ = k.w.source.PrefetchObjects(k.ctx, batch.objects, "")
	}
	k.out <- batch // files receives until the channel is closed
	return k.ctx.Err()
}

// create creates the folder e in another one, and opens it.
func (w *writer) create(in *folder, e *snapshot.DirEntry) (*folder, error) {
	name, err := decodeName(e.Name)
	if err != nil {
		return nil, err
	}
	f := &folder{entry: e, name: name, path: path.Join(in.path, e.Name), uses: 1}
	if err := unix.Mkdirat(in.fd, name, 0o700); err != nil {
		return nil, fmt.Errorf("create the folder %q: %w", f.path, err)
	}
	if f.fd, err = openFolder(in.fd, name); err != nil {
		return nil, fmt.Errorf("open the folder %q: %w", f.path, err)
	}
	in.inner = append(in.inner, f)
	return f, nil
}

func openFolder(parent int, name string) (int, error) {
	return unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func (f *folder) use() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.uses++
}

func (f *folder) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.uses--; f.uses == 0 && f.name != "" { // run closes the root
		unix.Close(f.fd)
	}
}

// window writes the files of a window.
func (w *writer) window(batch *window) error {
	var all tree.Group
	var err error
	slots := make(chan struct{}, writers-1)
	for _, f := range batch.files {
		err = all.Run(slots, func() error {
			if err := w.ctx.Err(); err != nil {
				return err
			}
			return w.writeFile(f)
		})
		if err != nil {
			break
		}
	}
	return cmp.Or(err, all.Wait())
}

func (w *writer) writeFile(f file) error {
	name, err := decodeName(f.entry.Name)
	if err != nil {
		return err
	}
	at := path.Join(f.folder.path, f.entry.Name)
	d := w.details[at]
	if d == nil {
		d = &detail{}
	}
	content, err := w.source.OpenObject(w.ctx, f.entry.ObjectID)
	if err != nil {
		return w.unreadable(f.entry, err)
	}
	defer content.Close()
	if f.entry.Type == snapshot.EntryTypeSymlink {
		err = w.symlink(f, name, d, content)
	} else {
		err = w.regular(f, name, d, content)
	}
	if err != nil {
		return fmt.Errorf("restore %q: %w", at, err)
	}
	w.progress.entries.Add(1)
	return nil
}

func (w *writer) symlink(f file, name string, d *detail, content io.Reader) error {
	target, err := io.ReadAll(io.LimitReader(content, unix.PathMax))
	if err != nil {
		return w.unreadable(f.entry, err)
	}
	if err := unix.Symlinkat(string(target), f.folder.fd, name); err != nil {
		return err
	}
	return attributes{f.folder.fd, name}.set(f.entry.UserID, f.entry.GroupID, unix.S_IFLNK, modified(f.entry, d), d)
}

func (w *writer) regular(f file, name string, d *detail, content io.Reader) error {
	fd, err := unix.Openat(f.folder.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(fd), name)
	defer out.Close()
	size := f.entry.FileSize
	extents := []tree.Extent{{Length: size}}
	if d.Size > 0 {
		size, extents = d.Size, d.Extents
		if err := out.Truncate(size); err != nil {
			return err
		}
	}
	buffer, _ := w.buffers.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
		*buffer = make([]byte, copyBuffer)
	}
	defer w.buffers.Put(buffer)
	var total int64
	for _, x := range extents {
		n, err := w.copy(f.entry, io.NewOffsetWriter(out, x.Offset), io.LimitReader(content, x.Length), *buffer)
		if err != nil {
			return err
		}
		total += n
	}
	if total != f.entry.FileSize || total != contentLength(extents) {
		return damaged(fmt.Errorf("the content has %d bytes, not %d", total, f.entry.FileSize))
	}
	return ofOpen(fd).set(f.entry.UserID, f.entry.GroupID, permissionsOf(os.FileMode(f.entry.Permissions)), modified(f.entry, d), d)
}

// copy copies content from the repository to a file, updates the progress, and returns the number of bytes.
func (w *writer) copy(e *snapshot.DirEntry, to io.Writer, from io.Reader, buffer []byte) (total int64, err error) {
	for {
		n, rerr := from.Read(buffer)
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return total, err
			}
			total += int64(n)
			w.progress.bytes.Add(int64(n))
		}
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, w.unreadable(e, rerr)
		}
	}
}

// modified returns the time of the last modification of an entry.
func modified(e *snapshot.DirEntry, d *detail) unix.Timespec {
	if d.Modified != nil {
		return *d.Modified
	}
	return unix.NsecToTimespec(e.ModTime.ToTime().UnixNano())
}

// special creates the entries that only the details describe. root is the descriptor of the disk's root.
func (w *writer) special(root int) error {
	for at, d := range w.details {
		if d.Node == nil {
			continue
		}
		err := inFolder(root, at, func(fd int, name string) error {
			if err := unix.Mknodat(fd, name, d.Node.Mode, int(d.Node.Device)); err != nil {
				return err
			}
			return attributes{fd, name}.set(d.Node.UID, d.Node.GID, d.Node.Mode, d.Node.Modified, d)
		})
		if err != nil {
			return fmt.Errorf("restore %q: %w", at, err)
		}
		w.progress.add(0)
	}
	for _, d := range w.links {
		err := inFolder(root, d.Link, func(from int, first string) error {
			return inFolder(root, d.Path, func(to int, name string) error { return unix.Linkat(from, first, to, name, 0) })
		})
		if err != nil {
			return fmt.Errorf("link %q to %q: %w", d.Path, d.Link, err)
		}
		w.progress.add(0)
	}
	return nil
}

// inFolder calls f with the descriptor of the folder that contains at, and the decoded last name of at. The path at
// is relative to root and has encoded names. The descriptor is valid until f returns.
func inFolder(root int, at string, f func(fd int, name string) error) error {
	dir, last := path.Split(at)
	name, err := decodeName(last)
	if err != nil {
		return err
	}
	fd := root
	defer func() {
		if fd != root {
			unix.Close(fd)
		}
	}()
	for part := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if part == "" {
			continue
		}
		part, err := decodeName(part)
		if err != nil {
			return err
		}
		inner, err := openFolder(fd, part)
		if err != nil {
			return err
		}
		if fd != root {
			unix.Close(fd)
		}
		fd = inner
	}
	return f(fd, name)
}

// folderAttributes sets the attributes of a folder and of all folders in it. All entries must exist, because
// creating an entry changes the time of its folder.
func (w *writer) folderAttributes(f *folder, fd int) error {
	for _, inner := range f.inner {
		innerFD, err := openFolder(fd, inner.name)
		if err == nil {
			err = w.folderAttributes(inner, innerFD)
			unix.Close(innerFD)
		}
		if err != nil {
			return err
		}
	}
	d := w.details[f.path]
	if d == nil {
		d = &detail{}
	}
	if d.Opaque {
		if err := unix.Fsetxattr(fd, "user.overlay.opaque", []byte("y"), 0); err != nil {
			return fmt.Errorf("restore %q: set the overlay attribute: %w", f.path, err)
		}
	}
	err := ofOpen(fd).set(f.entry.UserID, f.entry.GroupID, permissionsOf(os.FileMode(f.entry.Permissions)), modified(f.entry, d), d)
	if err != nil {
		return fmt.Errorf("restore the folder %q: %w", f.path, err)
	}
	return nil
}

// attributes sets the attributes of the open file or folder fd or, if name is not empty, of the entry with that
// name in the folder fd.
type attributes struct {
	fd   int
	name string
}

// ofOpen returns attributes for an open file or folder.
func ofOpen(fd int) attributes { return attributes{fd: fd} }

// set sets the owner, mode, extended attributes and time of the last modification, in this order: a change of
// the owner clears setuid bits and capabilities.
func (a attributes) set(uid, gid, mode uint32, modified unix.Timespec, d *detail) error {
	at := "/proc/self/fd/" + strconv.Itoa(a.fd)
	flags := 0
	if a.name != "" {
		at += "/" + a.name
		flags = unix.AT_SYMLINK_NOFOLLOW
	}
	var err error
	if a.name == "" {
		err = unix.Fchown(a.fd, int(uid), int(gid))
	} else {
		err = unix.Fchownat(a.fd, a.name, int(uid), int(gid), flags)
	}
	if err != nil {
		return fmt.Errorf("set the owner: %w", err)
	}
	switch {
	case mode&unix.S_IFMT == unix.S_IFLNK:
	case a.name == "":
		err = unix.Fchmod(a.fd, mode&0o7777)
	default:
		err = unix.Fchmodat(a.fd, a.name, mode&0o7777, 0)
	}
	if err != nil {
		return fmt.Errorf("set the mode: %w", err)
	}
	for name, value := range d.Attributes {
		if a.name == "" {
			err = unix.Fsetxattr(a.fd, name, value, 0)
		} else {
			err = unix.Lsetxattr(at, name, value, 0)
		}
		if err != nil {
			return fmt.Errorf("set the extended attribute %s: %w", name, err)
		}
	}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, at, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, modified}, flags); err != nil {
		return fmt.Errorf("set the times: %w", err)
	}
	return nil
}
