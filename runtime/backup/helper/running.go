package helper

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

// The disk of running programs is uploaded in passes, like memory in a live migration: each pass uploads the
// files that have changed since the pass before. Then the programs stop, and the folders and the files that still
// differ are captured, in memory and in a temporary file. The rest of the backup is made from what was captured.

const (
	// maxPasses limits the passes while programs run. A pass is the last one if it leaves no more than
	// enoughCaptured bytes, which are captured in a few milliseconds.
	maxPasses      = 3
	enoughCaptured = 16 << 20
	// passPause is the time between two passes, in which files settle: see tree.Stamp.Settled.
	passPause = 200 * time.Millisecond
	// maxCaptured limits the entries of a disk, which take 500 bytes of memory each besides their extended attributes,
	// targets and extents. maxDetails limits these.
	maxCaptured = 500_000
	extentSize  = 16
)

// needsSnapshot returns the error for the disk of running programs that cannot be captured.
func needsSnapshot(why string) error { return &wire.Error{Code: wire.NeedsSnapshot, Message: why} }

// openRunning opens the root of the disk of a request. It returns the error of needsSnapshot if the sandbox has got another disk.
// The caller closes the root.
func openRunning(request wire.Request) (*selected, error) {
	disk, err := openSelected(request)
	if errors.Is(err, unix.ENOENT) {
		return nil, needsSnapshot(err.Error())
	}
	return disk, err
}

// entriesOf returns the entries of a folder of a disk that is to be captured.
func entriesOf(f *selected) ([]*tree.Entry, error) {
	entries, err := f.Entries()
	if errors.Is(err, tree.ErrTooLarge) {
		return nil, needsSnapshot(err.Error())
	}
	return entries, err
}

// stored is where the content of a file is, without its holes: in the repository, or in the capture.
type stored struct {
	length int64
	holes  bool
	parts  []tree.Extent // of a file with holes
	object object.ID     // empty: it is in the capture
	at     int64         // in the capture
}

// upload is the content of a file that was uploaded while programs ran.
type upload struct {
	stamp   tree.Stamp
	settled bool // each later change of the file changes its stamp
	claimed bool // a goroutine uploads it, or has done so
	stored  stored
}

// current reports whether the file still has the content that was uploaded.
func (u *upload) current(st *unix.Stat_t) bool {
	return u != nil && u.settled && u.stored.object != object.EmptyID && u.stamp == tree.StampOf(st)
}

// uploads are the uploads by file.
type uploads struct {
	mu    sync.Mutex
	files map[inode]*upload
}

// capture uploads the disk of running programs, asks the node to stop them, and captures the disk.
func (u *uploader) capture(request wire.Request, node *peer) (*captured, error) {
	done := &uploads{files: map[inode]*upload{}}
	for n := range maxPasses {
		if n > 0 {
			select {
			case <-time.After(passPause):
			case <-u.ctx.Done():
				return nil, u.ctx.Err()
			}
		}
		left, err := u.pass(request, done)
		if err != nil {
			return nil, err
		}
		if left <= enoughCaptured {
			break
		}
	}
	if err := node.stopPrograms(u.ctx); err != nil {
		return nil, err
	}
	c, err := u.captureStopped(request, done)
	if err == nil {
		node.send(wire.Message{Captured: true})
	}
	return c, err
}

// pass uploads the files that differ from done, while programs run, and adds them to done. It returns the size of the
// files that still differ, because they changed just now.
func (u *uploader) pass(request wire.Request, done *uploads) (left int64, err error) {
	disk, err := openRunning(request)
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	if err := disk.Sync(); err != nil { // a write-back may change the blocks of a file, which its stamp has
		return 0, err
	}
	began := time.Now()
	var entries, bytes, differ atomic.Int64
	err = u.walk(disk, 0, func(f *selected, e *tree.Entry) error {
		if entries.Add(1) > maxCaptured {
			return needsSnapshot(fmt.Sprintf("the disk has more than %d entries", maxCaptured))
		}
		if e.Kind() != unix.S_IFREG {
			return nil
		}
		size := min(e.Stat.Size, e.Stat.Blocks*512) / max(1, int64(e.Stat.Nlink)) // 0 links: it is being deleted
		bytes.Add(size)
		done.mu.Lock()
		defer done.mu.Unlock()
		if at := inodeOf(e); !done.files[at].current(&e.Stat) {
			stamp := tree.StampOf(&e.Stat)
			done.files[at] = &upload{stamp: stamp, settled: stamp.Settled(began)}
			differ.Add(size)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	u.progress.expect(wire.Usage{Bytes: bytes.Load(), Entries: entries.Load()})
	// See tree.Stamp.Settled: the stamps are from before the write-back, and the content is from after it.
	if err := disk.Sync(); err != nil {
		return 0, err
	}
	err = u.walk(disk, 0, func(f *selected, e *tree.Entry) error {
		if e.Kind() != unix.S_IFREG {
			return nil
		}
		file := done.claim(e)
		if file == nil {
			return nil
		}
		s, err := u.changing(f, e)
		if err != nil || s.object == object.EmptyID {
			return err
		}
		differ.Add(-s.length)
		done.mu.Lock()
		defer done.mu.Unlock()
		file.stored = s
		return nil
	})
	return differ.Load(), err
}

// claim returns the upload to make of a file, or nil if the file has changed again, or if it has been or is being uploaded, perhaps
// under another name.
func (done *uploads) claim(e *tree.Entry) *upload {
	done.mu.Lock()
	defer done.mu.Unlock()
	file := done.files[inodeOf(e)]
	if file == nil || file.claimed || !file.settled || file.stamp != tree.StampOf(&e.Stat) {
		return nil
	}
	file.claimed = true
	return file
}

// walk calls visit for each entry of a folder and of the folders in it, concurrently. It skips what vanishes meanwhile.
func (u *uploader) walk(f *selected, depth int, visit func(*selected, *tree.Entry) error) error {
	if depth > maxDepth {
		return unsupported("/"+f.path, fmt.Sprintf("cannot be backed up: %v", tree.ErrTooDeep))
	}
	entries, err := entriesOf(f)
	if err != nil {
		return unlessVanished(err)
	}
	var all tree.Group
	for _, e := range entries {
		err = all.Run(u.slots, func() error {
			if err := cmp.Or(u.ctx.Err(), visit(f, e)); err != nil || e.Kind() != unix.S_IFDIR {
				return err
			}
			inner, err := f.open(e)
			if err != nil {
				return unlessVanished(err)
			}
			defer inner.Close()
			return u.walk(inner, depth+1, visit)
		})
		if err != nil {
			break
		}
	}
	return cmp.Or(err, all.Wait()) // before the caller closes the folder
}

// unlessVanished returns nil if err means that an entry is gone, or has been replaced by another kind of entry.
func unlessVanished(err error) error {
	for _, gone := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENXIO} {
		if errors.Is(err, gone) {
			return nil
		}
	}
	return err
}

// changing uploads a file that programs may change. It returns a stored without an object if the file is not the
// one of e any more.
func (u *uploader) changing(f *selected, e *tree.Entry) (stored, error) {
	file, err := f.Open(e)
	if err != nil {
		return stored{}, unlessVanished(err)
	}
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return stored{}, err
	}
	if st.Ino != e.Stat.Ino || st.Ctim != e.Stat.Ctim || st.Size != e.Stat.Size {
		return stored{}, nil
	}
	s, err := u.file(file, &st)
	if errors.Is(err, io.ErrUnexpectedEOF) { // the file has become shorter
		return stored{}, nil
	}
	if err != nil {
		return stored{}, fmt.Errorf("back up %q: %w", e.Name, err)
	}
	return s, nil
}

// captured is a folder of a disk as it was while programs did not run.
type captured struct {
	stat       unix.Stat_t
	attributes map[string][]byte
	hides      bool
	entries    []*tree.Entry
	held       map[*tree.Entry]*held
	pack       *pack
}

// held is what a captured folder has of an entry besides the entry itself.
type held struct {
	attributes map[string][]byte
	opaque     bool
	target     string    // of a symbolic link
	content    stored    // of a file
	folder     *captured // of a folder
}

// captureStopped captures the disk of a request while its files do not change. The caller closes it.
func (u *uploader) captureStopped(request wire.Request, done *uploads) (_ *captured, err error) {
	disk, err := openRunning(request)
	if err != nil {
		return nil, err
	}
	defer disk.Close()
	p, err := newPack(request.Cache)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.file.Close()
		}
	}()
	c := capturer{uploader: u, done: done, pack: p}
	return c.folder(disk, 0)
}

// capturer captures the folders of one disk.
type capturer struct {
	*uploader
	done    *uploads
	pack    *pack
	entries atomic.Int64
	details atomic.Int64 // bytes of extended attributes, targets and extents
}

// hold counts details, which are in memory.
func (c *capturer) hold(at string, bytes int) error {
	if c.details.Add(int64(bytes)) > maxDetails {
		return unsupported(at, fmt.Sprintf("cannot be backed up: extended attributes, links and special files take more than %d MiB", maxDetails>>20))
	}
	return nil
}

// attributesSize returns the size of extended attributes in memory.
func attributesSize(attributes map[string][]byte) (size int) {
	for name, value := range attributes {
		size += len(name) + len(value)
	}
	return size
}

func (c *capturer) folder(f *selected, depth int) (*captured, error) {
	if depth > maxDepth {
		return nil, unsupported("/"+f.path, fmt.Sprintf("cannot be backed up: %v", tree.ErrTooDeep))
	}
	into := &captured{hides: f.Opaque(), pack: c.pack}
	var err error
	if into.stat, err = f.Stat(); err != nil {
		return nil, err
	}
	if into.attributes, err = f.RootAttributes(); err != nil {
		return nil, err
	}
	if into.entries, err = entriesOf(f); err != nil {
		return nil, err
	}
	if c.entries.Add(int64(len(into.entries))) > maxCaptured {
		return nil, needsSnapshot(fmt.Sprintf("the disk has more than %d entries", maxCaptured))
	}
	into.held = make(map[*tree.Entry]*held, len(into.entries))
	var all tree.Group
	for _, e := range into.entries {
		h := &held{opaque: f.opaque(e)}
		into.held[e] = h
		if err = all.Run(c.slots, func() error { return c.entry(f, e, h, depth) }); err != nil {
			break
		}
	}
	if err := cmp.Or(err, all.Wait()); err != nil { // before the caller closes the folder
		return nil, err
	}
	return into, nil
}

func (c *capturer) entry(f *selected, e *tree.Entry, h *held, depth int) (err error) {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if e.Whiteout() {
		return nil
	}
	if h.attributes, err = f.Attributes(e); err != nil {
		return err
	}
	at := path.Join("/", f.path, e.Name)
	if err := c.hold(at, attributesSize(h.attributes)); err != nil {
		return err
	}
	switch e.Kind() {
	case unix.S_IFDIR:
		inner, err := f.open(e)
		if err != nil {
			return err
		}
		defer inner.Close()
		h.folder, err = c.folder(inner, depth+1)
		return err
	case unix.S_IFLNK:
		if h.target, err = f.Readlink(e); err != nil {
			return err
		}
		return c.hold(at, len(h.target))
	case unix.S_IFREG:
		c.done.mu.Lock()
		uploaded := c.done.files[inodeOf(e)]
		c.done.mu.Unlock()
		if uploaded.current(&e.Stat) {
			h.content = uploaded.stored
		} else if h.content, err = c.pack.add(f, e); err != nil {
			return fmt.Errorf("capture %q: %w", at, err)
		}
		return c.hold(at, extentSize*len(h.content.parts))
	}
	return nil
}

// Stat, RootAttributes, Opaque, opaque, Entries, Attributes, Readlink, extents, upload, inner and Close implement source.
func (c *captured) Stat() (unix.Stat_t, error)                 { return c.stat, nil }
func (c *captured) RootAttributes() (map[string][]byte, error) { return c.attributes, nil }
func (c *captured) Opaque() bool                               { return c.hides }
func (c *captured) opaque(e *tree.Entry) bool                  { return c.held[e].opaque }
func (c *captured) Entries() ([]*tree.Entry, error)            { return c.entries, nil }
func (c *captured) Readlink(e *tree.Entry) (string, error)     { return c.held[e].target, nil }
func (c *captured) inner(e *tree.Entry) (source, error)        { return inner{c.held[e].folder}, nil }
func (c *captured) Attributes(e *tree.Entry) (map[string][]byte, error) {
	return c.held[e].attributes, nil
}

func (c *captured) extents(e *tree.Entry) ([]tree.Extent, bool, error) {
	s := c.held[e].content
	return s.parts, s.holes, nil
}

func (c *captured) upload(u *uploader, e *tree.Entry, entry *snapshot.DirEntry) (err error) {
	s := c.held[e].content
	if s.object == object.EmptyID {
		s.object, err = u.object(&counted{io.NewSectionReader(c.pack.file, s.at, s.length), u.progress}, s.length)
		if err != nil {
			return fmt.Errorf("back up %q: %w", e.Name, err)
		}
	}
	entry.FileSize, entry.ObjectID = s.length, s.object
	return nil
}

// Close deletes the captured content.
func (c *captured) Close() { c.pack.file.Close() }

// inner is a captured folder in another one, which closes it.
type inner struct{ *captured }

func (inner) Close() {}

// pack is a temporary file with the contents of captured files, one after the other.
type pack struct {
	file *os.File // has no name
	end  atomic.Int64
}

// newPack returns an empty pack, whose file is in folder. The caller closes the file.
func newPack(folder string) (*pack, error) {
	file, err := os.CreateTemp(folder, "capture-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		file.Close()
		return nil, err
	}
	return &pack{file: file}, nil
}

// add adds the content of a file, without its holes. It is safe for concurrent use.
func (p *pack) add(f *selected, e *tree.Entry) (stored, error) {
	file, err := f.Open(e)
	if err != nil {
		return stored{}, err
	}
	defer file.Close()
	s := stored{length: e.Stat.Size}
	content := io.Reader(io.NewSectionReader(file, 0, s.length))
	extents, holes, err := extentsOf(file, &e.Stat)
	if err != nil {
		return stored{}, err
	}
	if holes {
		content, s.length, s.parts, s.holes = readExtents(file, extents), contentLength(extents), extents, true
	}
	s.at = p.end.Add(s.length) - s.length
	n, err := io.Copy(io.NewOffsetWriter(p.file, s.at), content)
	if err == nil && n != s.length {
		err = io.ErrUnexpectedEOF
	}
	return s, err
}

var (
	_ source = (*selected)(nil)
	_ source = (*captured)(nil)
)
