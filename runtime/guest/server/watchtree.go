package server

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// maxScanned bounds the names in memory that scans of new directories have reported.
const maxScanned = 100_000

// scanPart is how many entries of a directory are read together.
const scanPart = 512

// errDirectoryLimit: a directory cannot be watched because of a limit of doze's or the
// sandbox's.
var errDirectoryLimit = errors.New("too many directories are watched")

// watchTree are the directories of a watch.
type watchTree struct {
	ctx    context.Context // ends the visit of directories
	queue  *inotify
	real   string // path of the root; empty for /
	shown  string // the path that clients use for the root, or for the watched file
	file   string // the only watched name in the root; empty: all
	unused string // a name that no file has

	root        *directory
	parent      int32 // the kernel's number for the root's parent, or -1
	directories map[int32]*directory

	scans []*directory // with scanned names, in the order of their fences
	names int          // in scans, not more than maxScanned
	lost  bool         // scans have found more
}

// directory is a watched directory.
type directory struct {
	wd       int32 // the kernel's number
	parent   *directory
	name     string
	children map[string]*directory

	// scanned are the names that a scan has found and reported. Their creation may also be in
	// the queue, before fence.
	scanned map[string]bool
	fence   uint64
}

// appendTo appends the path below the root, which is empty or begins with a slash.
func (d *directory) appendTo(b []byte) []byte {
	if d.parent == nil {
		return b
	}
	return append(append(d.parent.appendTo(b), '/'), d.name...)
}

// below returns the path of a name below the root.
func (d *directory) below(name string) string {
	if d.parent == nil {
		return name
	}
	return string(append(append(d.appendTo(nil)[1:], '/'), name...))
}

// removeScanned reports whether a scan has found the name of a change that was in the queue
// then. The next such change is a new one.
func (d *directory) removeScanned(c change) bool {
	if c.at >= d.fence || !d.scanned[c.name] {
		return false
	}
	delete(d.scanned, c.name)
	return true
}

// realPath returns the path of a directory.
func (t *watchTree) realPath(d *directory) string {
	return cmp.Or(string(d.appendTo([]byte(t.real))), "/")
}

func (t *watchTree) reset() {
	t.root, t.parent, t.directories = nil, -1, map[int32]*directory{}
	t.scans, t.names, t.lost = nil, 0, false
}

// enterAll watches the root, its parent, and the directories below.
func (w *watch) enterAll() error {
	for {
		w.watches.directories.Add(-int64(len(w.directories)))
		w.watched.Store(0)
		w.unreadable.Store(0)
		w.reset()
		// A directory is found twice if it is moved meanwhile.
		if err := w.enterRoot(); !errors.Is(err, errMisplaced) {
			return err
		}
	}
}

func (w *watch) enterRoot() error {
	path := cmp.Or(w.real, "/")
	if w.file == "" && path != "/" {
		// An unreadable parent only delays the report that the root is deleted.
		if wd, err := w.queue.add(filepath.Dir(path), parentChanges); err == nil {
			w.parent = wd
		}
	}
	wd, err := w.queue.add(path, rootChanges)
	if errors.Is(err, syscall.ENOSPC) {
		return errDirectoryLimit
	}
	if err != nil {
		return err
	}
	w.root = &directory{wd: wd}
	if err := w.register(w.root); err != nil {
		return err
	}
	if !w.spec.Recursive || w.file != "" {
		return nil
	}
	return w.visit(w.root, false)
}

func (w *watch) register(d *directory) error {
	if !w.watches.addDirectory() {
		w.queue.remove(d.wd)
		return errDirectoryLimit
	}
	w.directories[d.wd] = d
	w.watched.Add(1)
	return nil
}

// follow watches a directory and those below it. With report it reports their entries.
func (w *watch) follow(parent *directory, name string, report bool) (guest.WatchReason, error) {
	err := w.enter(parent, name, report)
	if errors.Is(err, errMisplaced) {
		return w.rebuild()
	}
	if w.lost {
		w.lost = false
		w.reportOverflow(guest.WatchQueueFull, nil)
	}
	return "", err
}

// errMisplaced: a directory was found below itself, because of renames that are still in the
// queue.
var errMisplaced = errors.New("the directory is above its parent")

// enter watches a directory and those below it. Later changes are in the queue.
func (w *watch) enter(parent *directory, name string, report bool) error {
	wd, err := w.queue.add(w.realPath(parent)+"/"+name, watchedChanges)
	switch {
	case errors.Is(err, os.ErrClosed):
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return nil // it was removed or replaced, which is in the queue
	case errors.Is(err, syscall.ENOSPC):
		return errDirectoryLimit
	case err != nil:
		w.skip(parent, name)
		return nil
	}
	d := w.directories[wd]
	if d == nil {
		d = &directory{wd: wd}
		if err := w.register(d); err != nil {
			return err
		}
	}
	if !w.reparent(d, parent, name) {
		return errMisplaced
	}
	return w.visit(d, report)
}

// skip counts and reports a directory that cannot be watched.
func (w *watch) skip(parent *directory, name string) {
	w.unreadable.Add(1)
	w.reportOverflow(guest.WatchPathUnreadable, w.shownPath(parent, name))
}

// reparent makes d the directory of that name in parent. It returns false if the tree does not
// have the directories where they are.
func (w *watch) reparent(d, parent *directory, name string) bool {
	for above := parent; above != nil; above = above.parent {
		if above == d {
			return false
		}
	}
	if d.parent != nil && d.parent.children[d.name] == d {
		delete(d.parent.children, d.name)
	}
	before := parent.children[name]
	if parent.children == nil {
		parent.children = map[string]*directory{}
	}
	parent.children[name] = d
	d.parent, d.name = parent, name
	if before != nil {
		before.parent = nil
		// The kernel has ended the watch of a directory that was replaced. One that still
		// exists has a new place, such as by RENAME_EXCHANGE.
		return !w.drop(before)
	}
	return true
}

// drop ends the watches of a directory and of those below it. It reports whether the kernel
// still watched the directory. d may be nil.
func (w *watch) drop(d *directory) (existed bool) {
	if d == nil {
		return false
	}
	for _, child := range d.children {
		w.drop(child)
	}
	if d.parent != nil && d.parent.children[d.name] == d {
		delete(d.parent.children, d.name)
	}
	if w.directories[d.wd] == d {
		delete(w.directories, d.wd)
		w.watched.Add(-1)
		w.watches.directories.Add(-1)
		existed = w.queue.remove(d.wd)
	}
	return existed
}

// dropExcluded drops the directories below d that are excluded in its new place.
func (w *watch) dropExcluded(d *directory) {
	for name, child := range d.children {
		if w.excluded(d, name) {
			w.drop(child)
		} else {
			w.dropExcluded(child)
		}
	}
}

// visit reads a directory, which is watched already, and enters those in it. With report it
// reports the entries: whatever is created meanwhile is found, or in the queue, or both.
func (w *watch) visit(d *directory, report bool) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	dir, err := os.OpenFile(w.realPath(d), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return nil // it was removed or replaced, which is in the queue
	case err != nil && d == w.root:
		return err
	case err != nil:
		w.skip(d.parent, d.name)
		return nil
	}
	var below []string
	for err == nil {
		var entries []os.DirEntry
		entries, err = dir.ReadDir(scanPart) // io.EOF, or it was removed
		for _, e := range entries {
			if w.excluded(d, e.Name()) {
				continue
			}
			if report {
				w.scanned(d, e)
			}
			if e.IsDir() {
				below = append(below, e.Name())
			}
		}
	}
	dir.Close()
	if len(d.scanned) > 0 {
		d.fence = w.queue.end()
		w.scans = append(w.scans, d)
	}
	for _, name := range below {
		if err := w.enter(d, name, report); err != nil {
			return err
		}
	}
	return nil
}

// scanned reports an entry that a scan has found.
func (w *watch) scanned(d *directory, e os.DirEntry) {
	if w.names >= maxScanned {
		w.lost = true
		return
	}
	if d.scanned == nil {
		d.scanned = map[string]bool{}
	}
	if !d.scanned[e.Name()] {
		d.scanned[e.Name()] = true
		w.names++
	}
	w.report(guest.WatchCreate, d, e.Name(), e.IsDir())
}

// forgetScans forgets the names of scans whose changes in the queue are handled.
func (w *watch) forgetScans() {
	for len(w.scans) > 0 && w.scans[0].fence <= w.queue.position() {
		w.scans[0].scanned = nil
		w.scans = w.scans[1:]
	}
	if len(w.scans) == 0 {
		w.scans, w.names = nil, 0
	}
}

// rebuild visits all directories again after changes were lost, and reports the loss when
// all are watched.
func (w *watch) rebuild() (guest.WatchReason, error) {
	before := w.directories
	quiet := w.quiet
	w.quiet = true // the loss covers what is unreadable
	err := w.enterAll()
	w.quiet = quiet
	for wd := range before {
		if w.directories[wd] == nil {
			w.queue.remove(wd)
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return guest.WatchRootDeleted, nil
	case err == nil:
		w.reportOverflow(guest.WatchQueueFull, nil)
	}
	return "", err
}
