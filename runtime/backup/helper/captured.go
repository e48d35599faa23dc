package helper

import (
	"cmp"
	"fmt"
	"io"
	"path"
	"sync"
	"sync/atomic"

	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

// captured is a folder of a disk as it was while programs did not run.
type captured struct {
	stat       unix.Stat_t       // of the root
	attributes map[string][]byte // of the root
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
	p, err := newPack(request.Cache, maxCapturedBytes)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.file.Close()
		}
	}()
	c := capturer{uploader: u, done: done, pack: p, linked: map[inode]func() (stored, error){}}
	root, err := c.folder(disk, 0)
	if err != nil {
		return nil, err
	}
	if root.stat, err = disk.Stat(); err != nil {
		return nil, err
	}
	root.attributes, err = disk.RootAttributes()
	return root, err
}

// capturer captures the folders of one disk.
type capturer struct {
	*uploader
	done    *uploads
	pack    *pack
	entries atomic.Int64
	details atomic.Int64 // bytes of extended attributes, targets and extents

	linking sync.Mutex
	linked  map[inode]func() (stored, error) // capture files with several hard links once each
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
		if h.content, err = c.content(f, e); err != nil {
			return fmt.Errorf("capture %q: %w", at, err)
		}
		return c.hold(at, extentSize*len(h.content.parts))
	}
	return nil
}

// content returns where the content of a file is, and captures it unless it has been uploaded.
func (c *capturer) content(f *selected, e *tree.Entry) (stored, error) {
	c.done.mu.Lock()
	uploaded := c.done.files[inodeOf(e)]
	c.done.mu.Unlock()
	if uploaded.current(&e.Stat) {
		return uploaded.stored, nil
	}
	if e.Stat.Nlink <= 1 {
		return c.pack.add(f, e)
	}
	c.linking.Lock()
	once := c.linked[inodeOf(e)]
	if once == nil {
		once = sync.OnceValues(func() (stored, error) { return c.pack.add(f, e) })
		c.linked[inodeOf(e)] = once
	}
	c.linking.Unlock()
	return once()
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

var (
	_ source = (*selected)(nil)
	_ source = (*captured)(nil)
)
