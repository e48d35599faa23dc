package helper

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync"
	"time"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/snapshotfs"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

const (
	compressor = "zstd-fastest"
	// readers is how many files are read at the same time.
	readers = 8
	// maxDepth limits the levels of folders.
	maxDepth = 1000
	// maxPaths limits the paths in memory, in bytes, for links and for folders each. A restore has the paths
	// of all folders in memory, too.
	maxPaths = 256 << 20
	// maxOpen limits the entries in memory, which take 300 bytes each.
	maxOpen = 2 << 20
	// maxZeros limits the holes of a file that are read as zeros, in bytes.
	maxZeros = 1 << 30
	// maxLinks limits the files with several hard links. Their paths are in memory.
	maxLinks = 1 << 20
	// checkpoint is the interval at which the index of uploaded content is written. After a crash, the
	// next backup does not upload indexed content again.
	checkpoint = time.Minute
	copyBuffer = 128 << 10
)

// backUp stores the disk that request.Layers form above the image, or the paths of the request.
func (r *repository) backUp(ctx context.Context, request wire.Request, m *messages) (wire.Result, error) {
	disk, err := openSelected(request)
	if err != nil {
		return wire.Result{}, err
	}
	defer disk.Close()
	scan := scanner{ctx: ctx, links: map[inode]string{}}
	if err := scan.run(disk); err != nil {
		return wire.Result{}, err
	}
	disk.of.matching.Store(0)
	p := startProgress(ctx, m, scan.usage)
	defer p.conclude()
	result := wire.Result{Usage: scan.usage}
	before := r.store.sent.Load()
	err = r.write(ctx, func(ctx context.Context, w repo.DirectRepositoryWriter) error {
		uploading, cancel := context.WithCancel(ctx)
		defer cancel()
		u := uploader{ctx: uploading, w: w, links: scan.links, progress: p, slots: make(chan struct{}, readers-1)}
		flushed := make(chan error, 1)
		go func() { flushed <- flushRegularly(uploading, w, cancel) }()
		root, err := u.root(disk, &scan, request.Time)
		cancel()
		if err = errors.Join(<-flushed, err); err != nil {
			return err
		}
		if err := w.Flush(ctx); err != nil { // so that the record counts all uploaded bytes
			return err
		}
		result.Stored, result.Duration = r.store.sent.Load()-before, time.Since(request.Time)
		record, err := json.Marshal(wire.Backup{Usage: result.Usage, Stored: result.Stored, Duration: result.Duration, Record: request.Record})
		if err != nil {
			return err
		}
		_, err = snapshot.SaveSnapshot(ctx, w, &snapshot.Manifest{
			Source:      snapshot.SourceInfo{Host: "doze", UserName: request.Owner, Path: "/" + request.Sandbox},
			Description: string(record), RootEntry: root,
			StartTime: fs.UTCTimestampFromTime(request.Time), EndTime: fs.UTCTimestampFromTime(time.Now()),
			Tags: map[string]string{ownerTag: request.Owner, backupTag: request.IDs[0]},
		})
		return err
	})
	return result, err
}

// flushRegularly flushes the writer at every checkpoint until ctx ends. If a flush fails, it calls cancel and
// returns the error.
func flushRegularly(ctx context.Context, w repo.RepositoryWriter, cancel context.CancelFunc) error {
	again := time.NewTicker(checkpoint)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		}
		if err := w.Flush(ctx); err != nil && ctx.Err() == nil {
			cancel()
			return err
		}
	}
}

// inode of a file in a layer.
type inode struct {
	layer int
	ino   uint64
}

func inodeOf(e *tree.Entry) inode { return inode{e.Layer, e.Stat.Ino} }

// scanner counts the entries and bytes of a disk, and collects the details that Kopia does not store.
type scanner struct {
	ctx     context.Context
	usage   wire.Usage
	links   map[inode]string // first paths of files with several hard links
	linked  int              // bytes of these paths
	folders int              // bytes of the paths of all folders
	open    int              // entries of the folder that is read, and of all folders above it
	details bytes.Buffer
}

func (s *scanner) run(disk *selected) error {
	st, err := disk.Stat()
	if err != nil {
		return err
	}
	d := detail{Opaque: disk.Opaque()}
	if d.Attributes, err = disk.RootAttributes(); err != nil {
		return err
	}
	s.usage.Entries++
	if err := s.add(&d, st.Mtim); err != nil {
		return err
	}
	return s.folder(disk, "", 0)
}

// add appends d to the details unless d is empty. d includes the time modified if Kopia cannot store that time.
func (s *scanner) add(d *detail, modified unix.Timespec) error {
	if !storable(modified) && d.Node == nil {
		d.Modified = &modified
	}
	if d.empty() {
		return nil
	}
	if err := json.NewEncoder(&s.details).Encode(d); err != nil {
		return err
	}
	if s.details.Len() > maxDetails {
		return unsupported(d.Path, fmt.Sprintf("cannot be backed up: extended attributes, links and special files take more than %d MiB", maxDetails>>20))
	}
	return nil
}

func (s *scanner) folder(f *selected, at string, depth int) error {
	if depth > maxDepth {
		return unsupported(at, fmt.Sprintf("cannot be backed up: %v", tree.ErrTooDeep))
	}
	entries, err := f.Entries()
	if errors.Is(err, tree.ErrTooLarge) {
		return unsupported(at, "cannot be backed up: the folder has too many entries")
	}
	if err != nil {
		return err
	}
	s.folders += len(at)
	s.open += len(entries)
	defer func() { s.open -= len(entries) }()
	if s.folders > maxPaths || s.open > maxOpen {
		return unsupported(at, fmt.Sprintf("cannot be backed up: the paths of all folders take more than %d MiB, or nested folders have more than %d entries", maxPaths>>20, maxOpen))
	}
	for _, e := range entries {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		if err := s.entry(f, e, path.Join(at, encodeName(e.Name)), depth); err != nil {
			return err
		}
	}
	return nil
}

func (s *scanner) entry(f *selected, e *tree.Entry, at string, depth int) (err error) {
	s.usage.Entries++
	d := detail{Path: at, Opaque: f.opaque(e)}
	if e.Kind() != unix.S_IFDIR && e.Stat.Nlink > 1 && !e.Whiteout() { // overlays may link whiteouts to each other
		if first, ok := s.links[inodeOf(e)]; ok {
			d.Link = first
			return s.add(&d, unix.Timespec{})
		}
		s.linked += len(at)
		if len(s.links) == maxLinks || s.linked > maxPaths {
			return unsupported(at, fmt.Sprintf("cannot be backed up: more than %d files have several links, or their paths take more than %d MiB", maxLinks, maxPaths>>20))
		}
		s.links[inodeOf(e)] = at
	}
	if !e.Whiteout() {
		if d.Attributes, err = f.Attributes(e); err != nil {
			return err
		}
	}
	switch e.Kind() {
	case unix.S_IFREG:
		s.usage.Bytes += e.Stat.Size
		if e.Stat.Blocks*512 < e.Stat.Size {
			if err := s.holes(f.Folder, e, &d); err != nil {
				return err
			}
		}
	case unix.S_IFDIR:
		if err := s.add(&d, e.Stat.Mtim); err != nil {
			return err
		}
		inner, err := f.inner(e)
		if err != nil {
			return err
		}
		defer inner.Close()
		return s.folder(inner, at, depth+1)
	case unix.S_IFLNK:
	default:
		d.Node = &node{Mode: e.Stat.Mode, UID: e.Stat.Uid, GID: e.Stat.Gid, Device: e.Stat.Rdev, Modified: e.Stat.Mtim}
	}
	return s.add(&d, e.Stat.Mtim)
}

// holes adds the extents of a file with holes to d. It subtracts the holes from s.usage, which includes them.
func (s *scanner) holes(f *tree.Folder, e *tree.Entry, d *detail) error {
	file, err := f.Open(e)
	if err != nil {
		return err
	}
	defer file.Close()
	extents, holes, err := tree.Extents(file, e.Stat.Size)
	if err == nil && !holes && e.Stat.Size-e.Stat.Blocks*512 > maxZeros {
		return unsupported(d.Path, "cannot be backed up: it has too many holes")
	}
	if err != nil || !holes {
		return err
	}
	d.Size, d.Extents = e.Stat.Size, extents
	s.usage.Bytes += contentLength(extents) - e.Stat.Size
	return nil
}

func contentLength(extents []tree.Extent) (n int64) {
	for _, x := range extents {
		n += x.Length
	}
	return n
}

// uploader writes a disk to the repository.
type uploader struct {
	ctx      context.Context
	w        repo.DirectRepositoryWriter
	links    map[inode]string
	progress *progress
	slots    chan struct{} // goroutines beyond the caller's
	buffers  sync.Pool
}

// root writes the disk and the details, and returns the entry of the root of the backup.
func (u *uploader) root(disk *selected, s *scanner, at time.Time) (*snapshot.DirEntry, error) {
	st, err := disk.Stat()
	if err != nil {
		return nil, err
	}
	written, err := u.folder(disk, entryOf(diskName, snapshot.EntryTypeDirectory, &st), "")
	if err != nil {
		return nil, err
	}
	details := &snapshot.DirEntry{Name: detailsName, Type: snapshot.EntryTypeFile, Permissions: 0o600, FileSize: int64(s.details.Len()), ModTime: fs.UTCTimestampFromTime(at)}
	if details.ObjectID, err = u.object(bufio.NewReader(&s.details), details.FileSize); err != nil {
		return nil, err
	}
	var both snapshotfs.DirManifestBuilder
	both.AddEntry(written)
	both.AddEntry(details)
	root := &snapshot.DirEntry{Name: "/", Type: snapshot.EntryTypeDirectory, Permissions: 0o700, ModTime: fs.UTCTimestampFromTime(at)}
	return root, u.manifest(root, &both)
}

// entryOf describes an entry for Kopia.
func entryOf(name string, kind snapshot.EntryType, st *unix.Stat_t) *snapshot.DirEntry {
	return &snapshot.DirEntry{
		Name: name, Type: kind, Permissions: snapshot.Permissions(modeOf(st.Mode)), UserID: st.Uid, GroupID: st.Gid,
		ModTime: fs.UTCTimestampFromTime(time.Unix(st.Mtim.Unix())),
	}
}

// manifest writes the list of a folder's entries, and sets the object id and summary of the folder's entry.
func (u *uploader) manifest(entry *snapshot.DirEntry, entries *snapshotfs.DirManifestBuilder) error {
	built := entries.Build(entry.ModTime, "")
	id, err := snapshotfs.WriteDirManifest(u.ctx, u.w, entry.Name, built, compressor)
	entry.ObjectID, entry.DirSummary = id, built.Summary
	return err
}

// folder writes a folder and all its entries, and returns entry with the object id.
func (u *uploader) folder(f *selected, entry *snapshot.DirEntry, at string) (*snapshot.DirEntry, error) {
	entries, err := f.Entries()
	if err != nil {
		return nil, err
	}
	var written snapshotfs.DirManifestBuilder // safe for concurrent use
	var all tree.Group
	for _, e := range entries {
		err = all.Run(u.slots, func() error {
			entry, err := u.entry(f, e, path.Join(at, encodeName(e.Name)))
			if err != nil || entry == nil {
				return err
			}
			written.AddEntry(entry)
			return nil
		})
		if err != nil {
			break
		}
	}
	if err := cmp.Or(err, all.Wait()); err != nil { // before the caller closes the folder
		return nil, err
	}
	u.progress.add(0)
	return entry, u.manifest(entry, &written)
}

// entry writes an entry. It returns nil if only the details describe the entry.
func (u *uploader) entry(f *selected, e *tree.Entry, at string) (*snapshot.DirEntry, error) {
	if err := u.ctx.Err(); err != nil {
		return nil, err
	}
	name := path.Base(at)
	if first, ok := u.links[inodeOf(e)]; ok && first != at && e.Kind() != unix.S_IFDIR && !e.Whiteout() {
		u.progress.add(0)
		return nil, nil
	}
	switch e.Kind() {
	case unix.S_IFDIR:
		inner, err := f.inner(e)
		if err != nil {
			return nil, err
		}
		defer inner.Close()
		return u.folder(inner, entryOf(name, snapshot.EntryTypeDirectory, &e.Stat), at)
	case unix.S_IFREG:
		entry := entryOf(name, snapshot.EntryTypeFile, &e.Stat)
		err := u.uploadFile(f.Folder, e, entry)
		u.progress.entries.Add(1)
		return entry, err
	case unix.S_IFLNK:
		target, err := f.Readlink(e)
		if err != nil {
			return nil, err
		}
		entry := entryOf(name, snapshot.EntryTypeSymlink, &e.Stat)
		entry.FileSize = int64(len(target))
		entry.ObjectID, err = u.object(bytes.NewReader([]byte(target)), entry.FileSize)
		u.progress.add(0)
		return entry, err
	}
	u.progress.add(0)
	return nil, nil
}

// uploadFile writes the content of a file without its holes, and sets the size and object id of entry.
func (u *uploader) uploadFile(f *tree.Folder, e *tree.Entry, entry *snapshot.DirEntry) (err error) {
	file, err := f.Open(e)
	if err != nil {
		return err
	}
	defer file.Close()
	content, length := io.Reader(io.NewSectionReader(file, 0, e.Stat.Size)), e.Stat.Size
	if e.Stat.Blocks*512 < e.Stat.Size {
		extents, holes, err := tree.Extents(file, e.Stat.Size)
		if err != nil {
			return err
		}
		if holes {
			content, length = readExtents(file, extents), contentLength(extents)
		}
	}
	entry.FileSize = length
	entry.ObjectID, err = u.object(&counted{content, u.progress}, length)
	if err != nil {
		return fmt.Errorf("back up %q: %w", e.Name, err)
	}
	return nil
}

// readExtents reads the extents of a file, one after the other.
func readExtents(file *os.File, extents []tree.Extent) io.Reader {
	parts := make([]io.Reader, len(extents))
	for i, x := range extents {
		parts[i] = io.NewSectionReader(file, x.Offset, x.Length)
	}
	return io.MultiReader(parts...)
}

// counted counts the bytes that are read.
type counted struct {
	io.Reader
	progress *progress
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.progress.bytes.Add(int64(n))
	return n, err
}

// object writes content to the repository, and returns its id. It returns io.ErrUnexpectedEOF if the content
// does not have this length.
func (u *uploader) object(content io.Reader, length int64) (object.ID, error) {
	w := u.w.NewObjectWriter(u.ctx, object.WriterOptions{Compressor: compressor, MetadataCompressor: compressor})
	defer w.Close()
	buffer, _ := u.buffers.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
		*buffer = make([]byte, copyBuffer)
	}
	defer u.buffers.Put(buffer)
	n, err := io.CopyBuffer(onlyWriter{w}, content, *buffer)
	if err == nil && n != length {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return object.EmptyID, err
	}
	return w.Result()
}

// onlyWriter hides the other methods of a writer, so that io.CopyBuffer uses its buffer.
type onlyWriter struct{ io.Writer }
