package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	watchedChanges = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB
	// Of the root, which has no watched parent.
	rootChanges = watchedChanges | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF
	// Of the root's parent: a deleted directory that a process works in lives on, without IN_DELETE_SELF.
	parentChanges = unix.IN_DELETE | unix.IN_MOVED_FROM
)

// watch follows the changes below one directory, or of one file in it.
type watch struct {
	id               string
	spec             guest.WatchSpec
	include, exclude guest.Patterns
	watches          *watches

	// Of one goroutine: the one that starts the watch, and later the one of run.
	watchTree
	quiet bool // changes happened before the watch began

	watched, unreadable atomic.Int64 // directories

	mu        sync.Mutex
	log       watchLog
	changed   chan struct{} // closed and replaced when the log has more, and at the end
	readers   map[*watchReader]struct{}
	forgotten bool
	idle      time.Time   // since when it has no reader
	steps     int         // of retention that have passed
	retention *time.Timer // calls expire
}

// startWatch returns a watch that has visited all directories. Everything that changes from
// now on is reported once run runs.
func startWatch(ctx context.Context, ws *watches, spec guest.WatchSpec) (_ *watch, err error) {
	w := &watch{id: guest.NewWatchID(), spec: spec, watches: ws, changed: make(chan struct{}), readers: map[*watchReader]struct{}{}}
	if w.include, err = guest.ParsePatterns(spec.Include); err == nil {
		w.exclude, err = guest.ParsePatterns(spec.Exclude)
	}
	if err != nil {
		return nil, refuse(guest.CodeInvalid, "%v", err)
	}
	path, err := ws.server.path(spec.Path)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	if w.shown = trimRoot(ws.server.shown(path)); !info.IsDir() {
		real, w.file = filepath.Split(real)
	}
	w.real = trimRoot(filepath.Clean(real))
	if w.queue, err = newInotify(); err != nil {
		return nil, limitReached(err)
	}
	if err := w.begin(ctx); err != nil {
		w.queue.close()
		ws.directories.Add(-int64(len(w.directories)))
		return nil, limitReached(err)
	}
	return w, nil
}

// trimRoot returns a clean path to which "/name" can be added.
func trimRoot(path string) string { return strings.TrimSuffix(path, "/") }

// limitReached turns the kernel's errors for an exhausted quota into a refusal.
func limitReached(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return refuse(guest.CodeWatchLimit, "the sandbox has no inotify instances or open files left; end a program that watches files, or raise the quota of its size")
	case errors.Is(err, errDirectoryLimit):
		return refuse(guest.CodeWatchLimit, "the directories are more than the %d that the watches of a sandbox may have, or than its inotify_watches; exclude some, or watch without recursive",
			guest.MaxWatchedDirectories)
	}
	return err
}

// begin visits the directories, and handles the changes that happened meanwhile without
// reporting them.
func (w *watch) begin(ctx context.Context) error {
	w.ctx, w.unused = ctx, ".doze-unused-"+rand.Text()
	defer func() { w.ctx = context.Background() }()
	w.quiet = true
	if err := w.enterAll(); err != nil {
		return err
	}
	for end := w.queue.end(); w.queue.position() < end; {
		w.queue.poll()
		if reason, err := w.drain(); err != nil {
			return err
		} else if reason != "" {
			return &fs.PathError{Op: "watch", Path: cmp.Or(w.real, "/"), Err: fs.ErrNotExist}
		}
	}
	w.quiet = false
	return ctx.Err()
}

// run handles changes until the watch ends.
func (w *watch) run() {
	defer func() {
		w.queue.close()
		w.watches.directories.Add(-int64(len(w.directories)))
	}()
	for {
		var reason guest.WatchReason
		err := w.queue.wait()
		if err == nil {
			reason, err = w.drain()
		}
		switch {
		case errors.Is(err, os.ErrClosed): // forget
			return
		case errors.Is(err, errDirectoryLimit):
			reason = guest.WatchDirectoryLimit
		case err != nil: // of rebuild: no directory is watched any longer
			reason = guest.WatchRootUnreadable
		}
		if reason != "" {
			w.publish(guest.WatchEvent{Type: guest.WatchStopped, Reason: reason})
			return
		}
	}
}

// drain handles the changes that were received. It returns the reason if the watch ends.
// Errors: errDirectoryLimit, os.ErrClosed, the context's, or one that the root caused when all
// directories were visited again.
func (w *watch) drain() (reason guest.WatchReason, err error) {
	for {
		c, ok := w.queue.next()
		if !ok {
			w.forgetScans()
			return "", nil
		}
		if reason, err = w.handle(c); reason != "" || err != nil {
			return reason, err
		}
	}
}

func (w *watch) handle(c change) (reason guest.WatchReason, err error) {
	d := w.directories[c.wd]
	switch {
	case c.is(unix.IN_Q_OVERFLOW):
		return w.rebuild()
	case c.wd == w.parent:
		return w.handleParent(c), nil
	case d == nil: // no longer watched
		return "", nil
	case c.name == "":
		return w.handleSelf(d, c), nil
	case c.is(unix.IN_MOVED_FROM):
		return w.handleMove(d, c)
	}
	isDir := c.is(unix.IN_ISDIR)
	reported := c.is(unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_DELETE) && d.removeScanned(c)
	switch {
	case c.is(unix.IN_DELETE):
		w.drop(d.children[c.name])
		w.report(guest.WatchDelete, d, c.name, isDir)
	case reported || w.excluded(d, c.name):
	case c.is(unix.IN_CREATE | unix.IN_MOVED_TO):
		return w.appeared(d, c.name, isDir)
	case c.is(unix.IN_MODIFY | unix.IN_CLOSE_WRITE):
		w.report(guest.WatchModify, d, c.name, isDir)
	case c.is(unix.IN_ATTRIB):
		w.report(guest.WatchAttrib, d, c.name, isDir)
		if isDir && w.spec.Recursive && d.children[c.name] == nil { // it may be readable now
			return w.follow(d, c.name, true)
		}
	}
	return "", nil
}

// appeared reports a new name, and everything below a new directory.
func (w *watch) appeared(d *directory, name string, isDir bool) (guest.WatchReason, error) {
	w.report(guest.WatchCreate, d, name, isDir)
	if isDir && w.spec.Recursive {
		return w.follow(d, name, true)
	}
	return "", nil
}

// handleParent handles a change in the root's parent.
func (w *watch) handleParent(c change) guest.WatchReason {
	switch {
	case c.name != filepath.Base(w.real) || !c.is(unix.IN_ISDIR):
		return ""
	case c.is(unix.IN_DELETE):
		return guest.WatchRootDeleted
	case c.is(unix.IN_MOVED_FROM):
		return guest.WatchRootMoved
	}
	return ""
}

// handleSelf handles a change of a directory itself, which its parent reports, too.
func (w *watch) handleSelf(d *directory, c change) guest.WatchReason {
	switch {
	case d != w.root:
		if c.is(unix.IN_IGNORED) {
			w.drop(d)
		}
	case c.is(unix.IN_MOVE_SELF):
		return guest.WatchRootMoved
	case c.is(unix.IN_DELETE_SELF | unix.IN_UNMOUNT | unix.IN_IGNORED):
		return guest.WatchRootDeleted
	case c.is(unix.IN_ATTRIB) && w.file == "":
		w.publish(guest.WatchEvent{Type: guest.WatchAttrib, Path: []byte(cmp.Or(w.shown, "/")), IsDir: true})
	}
	return ""
}

// handleMove handles the first event of a rename. The second is in the queue if the new place is
// watched: see awaitRename.
func (w *watch) handleMove(d *directory, from change) (guest.WatchReason, error) {
	d.removeScanned(from)
	to, known := w.queue.removeMovedTo(from.cookie)
	if !known {
		awaitRename(w.realPath(d), w.unused)
		for !known && w.queue.poll() {
			to, known = w.queue.removeMovedTo(from.cookie)
		}
	}
	child, isDir := d.children[from.name], from.is(unix.IN_ISDIR)
	target := w.directories[to.wd]
	if !known || target == nil || w.excluded(target, to.name) {
		w.drop(child)
		w.report(guest.WatchDelete, d, from.name, isDir)
		return "", nil
	}
	target.removeScanned(to)
	if w.excluded(d, from.name) {
		w.drop(child)
		return w.appeared(target, to.name, isDir)
	}
	w.reportMove(d, from.name, target, to.name, isDir)
	switch {
	case !isDir || !w.spec.Recursive:
		return "", nil
	case child == nil && target.children[to.name] == nil:
		return w.follow(target, to.name, true)
	case child == nil: // a scan has found it in its new place
		return "", nil
	case !w.reparent(child, target, to.name):
		return w.rebuild()
	case w.exclude.Anchored():
		w.dropExcluded(child)
		return w.follow(target, to.name, false)
	}
	return "", nil
}

// report publishes a change unless the filters omit it.
func (w *watch) report(kind guest.WatchEventType, d *directory, name string, isDir bool) {
	if w.quiet || w.excluded(d, name) || !w.included(d, name) && !(isDir && kind == guest.WatchDelete) {
		return
	}
	w.publish(guest.WatchEvent{Type: kind, Path: w.shownPath(d, name), IsDir: isDir})
}

// reportMove publishes a rename within the watch. The rename of a directory concerns everything
// below, so include does not apply to it.
func (w *watch) reportMove(from *directory, fromName string, to *directory, toName string, isDir bool) {
	if !w.quiet && (isDir || w.included(from, fromName) || w.included(to, toName)) {
		w.publish(guest.WatchEvent{Type: guest.WatchMove, Path: w.shownPath(to, toName), From: w.shownPath(from, fromName), IsDir: isDir})
	}
}

func (w *watch) reportOverflow(reason guest.WatchReason, path []byte) {
	if !w.quiet {
		w.publish(guest.WatchEvent{Type: guest.WatchOverflow, Reason: reason, Path: path})
	}
}

// excluded reports whether a name in a directory is not part of the watch.
func (w *watch) excluded(d *directory, name string) bool {
	switch {
	case w.file != "":
		return name != w.file
	case d == w.root && w.real == trimRoot(w.watches.server.cfg.Root) && systemDirectories[name]:
		return true
	}
	return !w.exclude.Empty() && w.exclude.Match(d.below(name))
}

// systemDirectories are never watched as a part of /: the kernel's do not report changes, and
// have no end.
var systemDirectories = map[string]bool{"proc": true, "sys": true, "dev": true, filepath.Base(own): true}

// included reports whether the changes of a name in a directory are to be reported.
func (w *watch) included(d *directory, name string) bool {
	return w.include.Empty() || w.include.Match(d.below(name))
}

// shownPath returns what clients call a name in a directory.
func (w *watch) shownPath(d *directory, name string) []byte {
	if w.file != "" {
		return []byte(w.shown)
	}
	return append(d.appendTo([]byte(w.shown)), "/"+name...)
}

// publish adds an event to the log.
func (w *watch) publish(ev guest.WatchEvent) {
	if w.quiet {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log.add(ev)
	w.release()
	w.wake()
}

// release drops events that were sent. w.mu is held.
func (w *watch) release() {
	sent := w.log.sent
	for r := range w.readers {
		sent = min(sent, r.at)
	}
	w.log.release(sent)
}

// wake wakes the readers. w.mu is held.
func (w *watch) wake() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// attach returns a reader of the events after a Seq, or nil if that Seq is in the future or the
// watch is forgotten.
func (w *watch) attach(after uint64) *watchReader {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.forgotten || after > w.log.last {
		return nil
	}
	r := &watchReader{watch: w, at: after}
	w.readers[r] = struct{}{}
	w.idle = time.Time{}
	if w.retention != nil {
		w.retention.Stop()
	}
	return r
}

// idleSince returns since when the watch has no reader, or zero if it has one.
func (w *watch) idleSince() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.idle
}

// step is the time between two calls of expire.
func (w *watch) step() time.Duration { return w.watches.server.cfg.retentionStep }

// expire counts the time without a reader.
func (w *watch) expire() {
	w.mu.Lock()
	if w.idle.IsZero() || w.forgotten {
		w.mu.Unlock()
		return
	}
	w.steps++
	over := w.steps >= retentionSteps
	if !over {
		w.retention.Reset(w.step())
	}
	w.mu.Unlock()
	if over {
		w.watches.remove(w)
	}
}

// forget ends the watch and its readers.
func (w *watch) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forgotten = true
	if w.retention != nil {
		w.retention.Stop()
	}
	w.wake()
	w.queue.close()
}
