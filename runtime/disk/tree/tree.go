// Package tree copies directory trees exactly: contents, holes, types, modes, owners, extended
// attributes, times and hard links. It shares the blocks of files where the file system can
// (FICLONE, ioctl_ficlone(2)).
//
// A tree whose files change is copied in passes, so that its programs stop only for the last one:
// Prefetch copies the present tree and then what has changed meanwhile, and Complete, during which
// nothing may change, copies what has changed since.
package tree

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxDepth bounds the levels of folders, for each of which a descriptor is open.
	maxDepth = 1000
	// maxPrefetched bounds the entries that Prefetch records, which take some 200 bytes each.
	// Complete copies a larger tree alone.
	maxPrefetched = 1 << 20
	// maxEntries bounds the entries of a tree, so that a copy takes at most 1 GB of memory.
	maxEntries = 4 << 20
	// firstPass is how long the first pass may take before Prefetch repeats it. In less time, few files
	// change that Complete would have to copy.
	firstPass = 200 * time.Millisecond
	// maxRepeated is the size of the largest file that Prefetch copies again. Larger ones may well change
	// until Complete, for which they are left.
	maxRepeated = 16 << 20
	// recent is how old a change of a file must be for a later one to show in its times. The
	// kernel's clock for times of files ticks at least every 10 ms.
	recent = 100 * time.Millisecond
)

// Usage of a tree.
type Usage struct {
	Bytes   int64 // on disk; shared blocks count
	Entries int64 // files, folders, links and others
}

// Copy is the copy of one tree. Its methods must not be called concurrently.
type Copy struct {
	source, target string
	paths          Paths // nil: everything
	have           *node // copied by the last pass; nil before the first
	limit          int64 // of entries: maxEntries, but in tests

	slots   chan struct{} // goroutines beyond the caller's
	noClone atomic.Bool   // the file system cannot share blocks
}

// New returns a copy of the folder source in target. Target must not exist; its parent must.
func New(source, target string) *Copy { return NewPartial(source, target, nil) }

// NewPartial is New for a part of the folder source: the folders that contain one of the paths, and everything at the paths
// themselves. The copy lacks the paths that source does not have. Without paths, it has everything.
func NewPartial(source, target string, paths Paths) *Copy {
	return &Copy{source: source, target: target, paths: paths, limit: maxEntries, slots: make(chan struct{}, 2*runtime.GOMAXPROCS(0))}
}

// node is an entry of a tree as it was found.
type node struct {
	name     string
	stamp    Stamp
	children []*node // of a folder, by name
	// stale: it changed too recently to notice a later change, or while it was copied.
	stale atomic.Bool
	// touched: a folder whose attributes the pass must set.
	touched bool
	// same: a folder whose copy is equal to it, with everything below.
	same bool
}

// unchanged reports whether the copy of the entry is one of the present entry now, too.
func (n *node) unchanged(now *node) bool { return n.stamp == now.stamp && !n.stale.Load() }

// Stamp of an entry changes with each change of the entry's content or attributes, except with a change
// that follows another one immediately: see Settled.
type Stamp struct {
	mode, uid, gid    uint32
	ino, nlink, rdev  uint64
	size, blocks      int64
	modified, changed unix.Timespec
}

// StampOf returns the stamp of an entry.
func StampOf(st *unix.Stat_t) Stamp {
	return Stamp{
		mode: st.Mode, uid: st.Uid, gid: st.Gid, ino: st.Ino, nlink: uint64(st.Nlink), rdev: uint64(st.Rdev),
		size: st.Size, blocks: st.Blocks, modified: st.Mtim, changed: st.Ctim,
	}
}

// Settled reports whether the entry had not changed for a while at a time. Then each later change changes
// the stamp, unless the entry is a file with a page that a program has mapped and changed: its next change
// only shows after the page has been written back, as by syncfs(2).
func (s Stamp) Settled(at time.Time) bool { return at.Sub(time.Unix(s.changed.Unix())) >= recent }

func (s Stamp) kind() uint32   { return s.mode & unix.S_IFMT }
func (s Stamp) isFolder() bool { return s.kind() == unix.S_IFDIR }

// Prefetch copies the tree as it is; entries may change meanwhile. A tree that is too large to
// remember is left to Complete.
func (c *Copy) Prefetch(ctx context.Context) error {
	source, err := openFolder(unix.AT_FDCWD, c.source)
	if err != nil {
		return err
	}
	defer unix.Close(source)
	began := time.Now()
	have, err := c.scanChanging(ctx, source)
	if err != nil || have == nil {
		return err
	}
	// A page that a program has mapped and made dirty takes its next change without a new
	// time of the file, until it has been written back. The stamps are from before the
	// write-back and the copies from after it: a later change of such a page is a fault,
	// which sets the time.
	if err := unix.Syncfs(source); err != nil {
		return fmt.Errorf("sync %s: %w", c.source, err)
	}
	if err := c.apply(ctx, source, have, firstChanging); err != nil {
		return err
	}
	if time.Since(began) < firstPass {
		return nil
	}
	return c.repeat(ctx, source)
}

// repeat copies what has changed since the first pass, and will perhaps not change again until Complete. A file is written back
// between the reading of its times and its copy, as in the first pass.
func (c *Copy) repeat(ctx context.Context, source int) error {
	want, err := c.scanChanging(ctx, source)
	if err != nil || want == nil {
		return err
	}
	return c.apply(ctx, source, want, laterChanging)
}

// scanChanging reads a tree that may change. It returns nil if the tree is too large to remember.
func (c *Copy) scanChanging(ctx context.Context, source int) (*node, error) {
	scan := scanner{ctx: ctx, slots: c.slots, limit: min(c.limit, maxPrefetched), changing: true}
	root, err := scan.root(source, c.paths)
	if err != nil || scan.exceeded() {
		return nil, err
	}
	return root, nil
}

// Complete copies what Prefetch did not, or what has changed since. The tree must not change
// meanwhile. The copy is not synced.
func (c *Copy) Complete(ctx context.Context) (Usage, error) {
	source, err := openFolder(unix.AT_FDCWD, c.source)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(source)
	scan := scanner{ctx: ctx, slots: c.slots, limit: c.limit}
	want, err := scan.root(source, c.paths)
	if err == nil && scan.exceeded() {
		err = fmt.Errorf("more than %d files, folders and links", c.limit)
	}
	if err != nil {
		return Usage{}, err
	}
	if err := c.apply(ctx, source, want, last); err != nil {
		return Usage{}, err
	}
	return Usage{Bytes: scan.bytes.Load(), Entries: scan.entries.Load()}, nil
}

// Measure returns the usage of the tree at path, which may change meanwhile. It runs only on the
// caller's thread. It stops when the usage exceeds the limit (0: none), and then returns a usage that
// exceeds it.
func Measure(ctx context.Context, path string, limit Usage) (Usage, error) {
	fd, err := openFolder(unix.AT_FDCWD, path)
	if err != nil {
		return Usage{}, err
	}
	defer unix.Close(fd)
	scan := scanner{ctx: ctx, limit: limit.Entries, limitBytes: limit.Bytes, changing: true, forget: true}
	_, err = scan.root(fd, nil)
	return Usage{Bytes: scan.bytes.Load(), Entries: scan.entries.Load()}, err
}

// scanner reads the entries of a tree.
type scanner struct {
	ctx      context.Context
	slots    chan struct{}
	changing bool // entries may vanish
	forget   bool // count entries only
	// limit of entries and limitBytes of their usage; 0: none
	limit, limitBytes int64

	began          time.Time // one for all entries, so that the names of a file are stale together
	entries, bytes atomic.Int64
	group          Group
}

func (s *scanner) exceeded() bool {
	return s.limit > 0 && s.entries.Load() > s.limit || s.limitBytes > 0 && s.bytes.Load() > s.limitBytes
}

// root reads the entries of the root, or of a part of it if paths is not empty.
func (s *scanner) root(fd int, paths Paths) (*node, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	root := &node{stamp: StampOf(&st)}
	root.stale.Store(true)
	s.began = time.Now()
	s.count(root.stamp)
	s.group.note(s.folder(fd, root, paths, 0))
	err := s.group.Wait()
	if s.exceeded() {
		err = nil
	}
	return root, err
}

func (s *scanner) count(st Stamp) {
	s.entries.Add(1)
	bytes := st.blocks * 512
	if st.nlink > 1 && !st.isFolder() {
		bytes /= int64(st.nlink) // each link counts its share, because all links of a file are on the same disk
	}
	s.bytes.Add(bytes)
}

// folder reads the entries of the folder fd into n: all of them, or those at paths if it is not empty.
func (s *scanner) folder(fd int, n *node, paths Paths, depth int) error {
	if depth > maxDepth {
		return ErrTooDeep
	}
	if err := s.ctx.Err(); err != nil {
		return err
	}
	read := func(names []string) error { return s.names(fd, names, n, paths, depth) }
	var err error
	if len(paths) > 0 {
		err = read(slices.Collect(maps.Keys(paths)))
	} else {
		err = eachNames(fd, read)
	}
	slices.SortFunc(n.children, func(a, b *node) int { return cmp.Compare(a.name, b.name) })
	return err
}

// names reads entries of the folder fd into n. paths are the selected paths in that folder; empty: all.
func (s *scanner) names(fd int, names []string, n *node, paths Paths, depth int) error {
	for _, name := range names {
		var st unix.Stat_t
		err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == unix.ENOENT && s.changing || missing(err) && len(paths) > 0 {
			continue
		}
		if err != nil {
			return fmt.Errorf("inspect %q: %w", name, err)
		}
		child := &node{name: name, stamp: StampOf(&st)}
		child.stale.Store(!child.stamp.Settled(s.began))
		s.count(child.stamp)
		if s.exceeded() {
			return errEnough
		}
		if !s.forget {
			n.children = append(n.children, child)
		}
		if !child.stamp.isFolder() {
			continue
		}
		inner, err := openFolder(fd, name)
		if (err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP) && s.changing {
			continue // its copy is an empty folder
		}
		if err != nil {
			return fmt.Errorf("open %q: %w", name, err)
		}
		err = s.group.Run(s.slots, func() error {
			defer unix.Close(inner)
			return s.folder(inner, child, paths[name], depth+1)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// errEnough ends a scan that has exceeded its limit.
var errEnough = errors.New("more than the limit")

// ErrTooDeep is returned for more than maxDepth levels.
var ErrTooDeep = fmt.Errorf("folders are nested in more than %d levels", maxDepth)

// Group runs functions concurrently while slots are free, and inline otherwise. Groups may share slots, and
// functions may use further groups. The zero value is ready for use.
type Group struct {
	running sync.WaitGroup
	mu      sync.Mutex
	err     error // the first
}

// Run runs f. It returns the error of f if it ran inline, otherwise the first error of the group so far.
func (g *Group) Run(slots chan struct{}, f func() error) error {
	select {
	case slots <- struct{}{}:
		g.running.Go(func() {
			defer func() { <-slots }()
			g.note(f())
		})
		return g.failed()
	default:
		return f()
	}
}

func (g *Group) note(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = err
	}
}

func (g *Group) failed() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

// Wait waits for the functions that run concurrently, and returns their first error.
func (g *Group) Wait() error {
	g.running.Wait()
	return g.failed()
}

// openFolder opens a folder without following a link in its last component.
func openFolder(parent int, name string) (int, error) {
	return retry(func() (int, error) {
		return unix.Openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
}

// retry calls f again while a signal interrupts it.
func retry[T any](f func() (T, error)) (T, error) {
	for {
		v, err := f()
		if err != unix.EINTR {
			return v, err
		}
	}
}

// readNames returns names in the folder fd, except "." and "..": all of them, or somewhat more than
// limit.
func readNames(fd, limit int) ([]string, error) {
	var all []string
	err := eachNames(fd, func(names []string) error {
		if all = append(all, names...); len(all) > limit {
			return errEnough
		}
		return nil
	})
	if err == errEnough {
		err = nil
	}
	return all, err
}

// eachNames calls f with the names in the folder fd, except "." and "..", in batches. It stops at the
// first error of f and returns it. A removed folder has no names.
func eachNames(fd int, f func(names []string) error) error {
	buffer := make([]byte, 32<<10)
	if _, err := unix.Seek(fd, 0, os.SEEK_SET); err != nil {
		return err
	}
	for {
		n, err := retry(func() (int, error) { return unix.ReadDirent(fd, buffer) })
		if err == unix.ENOENT {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read a folder: %w", err)
		}
		if n <= 0 {
			return nil
		}
		_, _, names := unix.ParseDirent(buffer[:n], -1, nil)
		if err := f(names); err != nil {
			return err
		}
	}
}
