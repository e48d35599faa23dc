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
	// The index of uploaded content is written when uploads have gone on for 1/checkpointPart of their time since
	// it was last written, but at most every minCheckpoint, and at least every maxCheckpoint. After a crash, the
	// next backup does not upload indexed content again. A checkpoint waits for the uploads in progress, adds an
	// object with an index and up to two small packs, and costs time in proportion to the indexes of the last days: Kopia
	// merges all in memory, and maintenance compacts them when an epoch of a day is two epochs old. In proportion to
	// the time, a backup of an hour writes 110 indexes instead of 720. Without a checkpoint at 5 s, a kill
	// would lose all of a short backup.
	minCheckpoint  = 5 * time.Second
	maxCheckpoint  = time.Minute
	checkpointPart = 20
	// failureFlush limits the time to write the index after a failure. The object store may be the cause.
	failureFlush = 30 * time.Second
	copyBuffer   = 128 << 10
)

// source is a folder of the disk to back up: selected, or captured. Its methods are safe for concurrent use until Close.
type source interface {
	// Stat and RootAttributes describe the root of the disk.
	Stat() (unix.Stat_t, error)
	RootAttributes() (map[string][]byte, error)
	// Opaque reports whether the folder hides the image's folder, and opaque whether a folder in it hides
	// what a restore finds at its path.
	Opaque() bool
	opaque(*tree.Entry) bool
	// Entries returns the entries to back up, sorted by name. The same entry is always the same pointer, or equal.
	Entries() ([]*tree.Entry, error)
	Attributes(*tree.Entry) (map[string][]byte, error)
	Readlink(*tree.Entry) (string, error)
	// extents returns the extents of a file, and whether it has holes.
	extents(*tree.Entry) (extents []tree.Extent, holes bool, err error)
	// upload writes the content of a file without its holes, unless the repository has it already, and sets
	// size and object id of the file's entry.
	upload(*uploader, *tree.Entry, *snapshot.DirEntry) error
	// inner opens a folder in this one. The caller closes it.
	inner(*tree.Entry) (source, error)
	Close()
}

// backUp stores the disk that request.Layers form above the image, or the paths of the request.
func (r *repository) backUp(ctx context.Context, request wire.Request, node *peer) (wire.Result, error) {
	ids, err := snapshot.ListSnapshotManifests(ctx, r, nil, map[string]string{ownerTag: request.Owner})
	if err != nil {
		return wire.Result{}, unreadable(ctx, "records of backups", err)
	}
	if len(ids) >= request.Limit {
		return wire.Result{}, &wire.Error{Code: wire.Limit, Message: fmt.Sprintf("%s has %d backups", request.Owner, len(ids))}
	}
	var result wire.Result
	before := r.store.sent.Load()
	err = r.write(ctx, func(ctx context.Context, w repo.DirectRepositoryWriter) (err error) {
		defer func() {
			if err != nil {
				flushFailed(ctx, w)
			}
		}()
		uploading, cancel := context.WithCancel(ctx)
		defer cancel()
		u := &uploader{ctx: uploading, w: w, slots: make(chan struct{}, readers-1), progress: startProgress(ctx, node)}
		defer u.progress.conclude()
		flushed := make(chan error, 1)
		go func() { flushed <- flushRegularly(uploading, w, r.store.sent.Load, cancel) }()
		root, usage, err := u.disk(request, node)
		cancel()
		if err = errors.Join(<-flushed, err); err != nil {
			return err
		}
		if err := w.Flush(ctx); err != nil { // so that the record counts all uploaded bytes
			return err
		}
		if request.Running {
			if request.Record, err = node.record(ctx); err != nil {
				return err
			}
		}
		result = wire.Result{Usage: usage, Stored: r.store.sent.Load() - before, Duration: time.Since(request.Time)}
		record, err := json.Marshal(wire.Backup{Usage: usage, Stored: result.Stored, Duration: result.Duration, Record: request.Record})
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

// disk writes the disk of a request, and returns the entry of the root of the backup.
func (u *uploader) disk(request wire.Request, node *peer) (*snapshot.DirEntry, wire.Usage, error) {
	disk, err := u.open(request, node)
	if err != nil {
		return nil, wire.Usage{}, err
	}
	defer disk.Close()
	scan := scanner{ctx: u.ctx, links: map[inode]string{}}
	if err := scan.run(disk); err != nil {
		return nil, wire.Usage{}, err
	}
	if s, ok := disk.(*selected); ok {
		s.of.matching.Store(0)
	}
	u.progress.expect(scan.usage)
	u.links = scan.links
	root, err := u.root(disk, &scan, request.Time)
	return root, scan.usage, err
}

// open opens the disk of a request. The caller closes it.
func (u *uploader) open(request wire.Request, node *peer) (source, error) {
	if request.Running {
		return u.capture(request, node)
	}
	return openSelected(request)
}

// flushRegularly flushes the writer at every checkpoint until ctx ends, if bytes have been sent since the last one. If
// a flush fails, it calls cancel and returns the error.
func flushRegularly(ctx context.Context, w repo.RepositoryWriter, sent func() int64, cancel context.CancelFunc) error {
	start, flushed := time.Now(), sent()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(max(time.Since(start)/checkpointPart, minCheckpoint), maxCheckpoint)):
		}
		if sent() == flushed {
			continue
		}
		if err := w.Flush(ctx); err != nil && ctx.Err() == nil {
			cancel()
			return err
		}
		flushed = sent()
	}
}

// flushFailed flushes the writer of a failed backup, so that the next one does not upload the same content again. Kopia's
// FlushOnFailure does it without a limit, and returns the error of the flush instead of the failure.
func flushFailed(ctx context.Context, w repo.RepositoryWriter) {
	ctx, cancel := context.WithTimeout(ctx, failureFlush)
	defer cancel()
	_ = w.Flush(ctx)
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
func (u *uploader) root(disk source, s *scanner, at time.Time) (*snapshot.DirEntry, error) {
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
func (u *uploader) folder(f source, entry *snapshot.DirEntry, at string) (*snapshot.DirEntry, error) {
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
func (u *uploader) entry(f source, e *tree.Entry, at string) (*snapshot.DirEntry, error) {
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
		err := f.upload(u, e, entry)
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

// file writes the content of an open file of the folder f without its holes, and returns where it is.
func (u *uploader) file(f *selected, file *os.File, st *unix.Stat_t) (stored, error) {
	content := io.Reader(io.NewSectionReader(file, 0, st.Size))
	s := stored{length: st.Size}
	extents, holes, err := f.extentsOf(file, st)
	if err != nil {
		return stored{}, err
	}
	if holes {
		content = readExtents(file, extents)
		s.length, s.parts, s.holes = contentLength(extents), extents, true
	}
	s.object, err = u.object(&counted{content, u.progress}, s.length)
	return s, err
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
