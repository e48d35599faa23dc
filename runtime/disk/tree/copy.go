package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// kindOfPass is what a pass may rely on.
type kindOfPass int

const (
	firstChanging kindOfPass = iota // entries may change; the copy is empty
	laterChanging                   // entries may change; those that may well change again are left for the last pass
	last                            // entries do not change
)

// pass is one pass of a copy.
type pass struct {
	*Copy
	ctx    context.Context
	target int // the root of the copy
	kind   kindOfPass
	group  Group

	linking sync.Mutex
	links   map[inode]string // path in the copy of its first link
}

// inode identifies a file. The layers of an image may be on several file systems.
type inode struct {
	layer  int
	number uint64
}

// folder is a folder in the source and in the copy.
type folder struct {
	source, target int    // descriptors
	path           string // from the root
	layer          int    // that has the source; 0 unless several layers are copied
}

func (f folder) close() {
	unix.Close(f.source)
	unix.Close(f.target)
}

// apply makes the copy, which has the entries of c.have, equal to want, which becomes c.have.
func (c *Copy) apply(ctx context.Context, source int, want *node, kind kindOfPass) error {
	have := c.have
	if have == nil {
		if err := os.Mkdir(c.target, 0o700); err != nil {
			return err
		}
	}
	target, err := openFolder(unix.AT_FDCWD, c.target)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	p := pass{Copy: c, ctx: ctx, target: target, kind: kind, links: map[inode]string{}}
	if have != nil {
		p.compare(have, want, "")
	}
	root := folder{source: source, target: target}
	p.group.note(p.entries(root, have, want))
	if err := p.group.Wait(); err != nil {
		return err
	}
	if err := p.attributes(root, want); err != nil { // after the entries, which change the times of folders
		return err
	}
	c.have = want
	return nil
}

// compare marks the folders that are the same, at and below the folder at. It records the hard links that the copy has and
// that stay, so that new names of their files become links to them.
func (p *pass) compare(have, want *node, at string) {
	same := have.unchanged(want)
	left := have.children
	for _, n := range want.children {
		for len(left) > 0 && left[0].name < n.name {
			left, same = left[1:], false
		}
		if len(left) == 0 || left[0].name != n.name {
			same = false
			continue
		}
		before := left[0]
		left = left[1:]
		switch {
		case n.stamp.isFolder() && before.stamp.isFolder():
			p.compare(before, n, path.Join(at, n.name))
			same = same && n.same
		case !before.unchanged(n):
			same = false
		case n.stamp.nlink > 1:
			p.links[inode{number: n.stamp.ino}] = path.Join(at, n.name)
		}
	}
	want.same = same && len(left) == 0
}

// filesPerTask is how many files of a folder one goroutine copies.
const filesPerTask = 64

// entries makes the entries of the copy's folder, which are as in have, equal to want's. have may
// be nil; otherwise compare has compared them.
func (p *pass) entries(f folder, have, want *node) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	old := map[string]*node{}
	if have != nil {
		for _, n := range have.children {
			old[n.name] = n
		}
		want.touched = want.stamp != have.stamp || have.stale.Load()
	} else {
		want.touched = true
	}
	var files []*node
	for _, n := range want.children {
		before := old[n.name]
		delete(old, n.name)
		if n.same {
			continue
		}
		if before != nil && before.stamp.isFolder() && n.stamp.isFolder() {
			if err := p.inner(f, before, n); err != nil {
				return err
			}
			continue
		}
		if before != nil && before.unchanged(n) {
			continue
		}
		if p.postpones(n) {
			n.stale.Store(true)
			continue
		}
		if before != nil {
			if err := remove(f.target, before.name, maxDepth, refuseDeeper); err != nil {
				return err
			}
		}
		want.touched = true
		if n.stamp.isFolder() {
			if err := p.inner(f, nil, n); err != nil {
				return err
			}
		} else {
			files = append(files, n)
		}
	}
	for name := range old {
		want.touched = true
		if err := remove(f.target, name, maxDepth, refuseDeeper); err != nil {
			return err
		}
	}
	return p.files(f, files)
}

// postpones reports whether a later pass is to copy an entry that has changed. The copy may have an earlier one with that name.
func (p *pass) postpones(n *node) bool {
	return p.kind == laterChanging && !n.stamp.isFolder() && (n.stale.Load() || n.stamp.size > maxRepeated)
}

// inner is entries for a folder in f, which it creates unless the copy has it.
func (p *pass) inner(f folder, have, n *node) error {
	if have == nil {
		if err := unix.Mkdirat(f.target, n.name, 0o700); err != nil {
			return fmt.Errorf("create the folder %q: %w", n.name, err)
		}
	}
	from, err := openFolder(f.source, n.name)
	if err != nil {
		n.children = nil // its copy stays as it is in this pass
		if have != nil {
			n.children = have.children
		}
		return p.failed(n, err)
	}
	to, err := openFolder(f.target, n.name)
	if err != nil {
		unix.Close(from)
		return fmt.Errorf("open the copy of %q: %w", n.name, err)
	}
	inner := folder{source: from, target: to, path: path.Join(f.path, n.name)}
	return p.group.Run(p.slots, func() error {
		defer inner.close()
		return p.entries(inner, have, n)
	})
}

// files copies files, links and others of a folder.
func (p *pass) files(f folder, files []*node) error {
	var tasks Group
	for batch := range slices.Chunk(files, filesPerTask) {
		tasks.note(tasks.Run(p.slots, func() error {
			for _, n := range batch {
				if err := p.ctx.Err(); err != nil {
					return err
				}
				if err := p.file(f, n); err != nil {
					if err := p.failed(n, err); err != nil {
						return err
					}
				}
			}
			return nil
		}))
	}
	return tasks.Wait() // before the caller closes the folder
}

// errReplaced: an entry is no longer the one that was scanned.
var errReplaced = errors.New("it was replaced during the copy")

// failed ignores an error that follows from a change of n, if entries may change: the next pass
// copies n again.
func (p *pass) failed(n *node, err error) error {
	for _, change := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENXIO, errReplaced} {
		if p.kind != last && errors.Is(err, change) {
			n.stale.Store(true)
			return nil
		}
	}
	return fmt.Errorf("copy %q: %w", n.name, err)
}

// file copies an entry that is not a folder.
func (p *pass) file(f folder, n *node) error {
	if n.stamp.nlink <= 1 {
		return p.create(f, n)
	}
	p.linking.Lock() // a later link waits for the file
	defer p.linking.Unlock()
	file := inode{f.layer, n.stamp.ino}
	if first, ok := p.links[file]; ok {
		return unix.Linkat(p.target, first, f.target, n.name, 0)
	}
	if err := p.create(f, n); err != nil {
		return err
	}
	p.links[file] = path.Join(f.path, n.name)
	return nil
}

// create creates the copy of an entry.
func (p *pass) create(f folder, n *node) error {
	switch n.stamp.kind() {
	case unix.S_IFREG:
		return p.regular(f, n)
	case unix.S_IFLNK:
		return symlink(f, n)
	case unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR, unix.S_IFBLK:
		// A character device 0:0, which overlayfs uses for a deleted entry, is the only device
		// that may be created in a user namespace.
		if err := unix.Mknodat(f.target, n.name, n.stamp.mode, int(n.stamp.rdev)); err != nil {
			return err
		}
		return named(f, n)
	}
	return fmt.Errorf("unknown type of entry %#o", n.stamp.kind())
}

// regular copies a file.
func (p *pass) regular(f folder, n *node) error {
	from, err := retry(func() (int, error) {
		return unix.Openat(f.source, n.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if st.Ino != n.stamp.ino || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errReplaced
	}
	if p.kind == laterChanging { // see repeat
		if err := unix.SyncFileRange(from, 0, 0, unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER); err != nil {
			return fmt.Errorf("write it back: %w", err)
		}
	}
	to, err := retry(func() (int, error) {
		return unix.Openat(f.target, n.name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	})
	if err != nil {
		return err
	}
	defer unix.Close(to)
	if err := p.content(to, from, n.stamp); err != nil {
		return err
	}
	return setOpen(to, from, n.stamp)
}

// content copies the content of a file, with its holes.
func (p *pass) content(to, from int, st Stamp) error {
	if st.size == 0 {
		return nil
	}
	if !p.noClone.Load() {
		_, err := retry(func() (int, error) { return 0, unix.IoctlFileClone(to, from) })
		if err == nil {
			return nil
		}
		p.noClone.Store(true)
	}
	if st.blocks*512 >= st.size {
		return copyRange(to, from, 0, st.size)
	}
	for at := int64(0); at < st.size; {
		begin, err := unix.Seek(from, at, unix.SEEK_DATA)
		if err == unix.ENXIO { // a hole up to the end
			break
		}
		if err != nil {
			return fmt.Errorf("find the data of a file with holes: %w", err)
		}
		end, err := unix.Seek(from, begin, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find the holes of a file: %w", err)
		}
		if err := copyRange(to, from, begin, min(end, st.size)); err != nil {
			return err
		}
		at = end
	}
	return unix.Ftruncate(to, st.size)
}

// copySize is the size of a buffer. Larger ranges are copied in the kernel.
const copySize = 64 << 10

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// copyRange copies from begin to end, or to the end of a file that has become shorter.
func copyRange(to, from int, begin, end int64) error {
	if end-begin <= copySize {
		buffer := buffers.Get().(*[copySize]byte)
		defer buffers.Put(buffer)
		for begin < end {
			n, err := retry(func() (int, error) { return unix.Pread(from, buffer[:end-begin], begin) })
			if err != nil || n == 0 {
				return err
			}
			if _, err := retry(func() (int, error) { return unix.Pwrite(to, buffer[:n], begin) }); err != nil {
				return err
			}
			begin += int64(n)
		}
		return nil
	}
	for in, out := begin, begin; in < end; {
		n, err := retry(func() (int, error) { return unix.CopyFileRange(from, &in, to, &out, int(min(end-in, 1<<30)), 0) })
		if err != nil || n == 0 {
			return err
		}
	}
	return nil
}
