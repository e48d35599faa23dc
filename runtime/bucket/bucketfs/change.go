package bucketfs

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// lockName opens the file that a name leads to and locks it, so that writes, uploads and downloads wait, also if a
// program opens the file meanwhile. The caller calls the function that it returns.
func (m *mount) lockName(ctx context.Context, key string) (*node, func(), error) {
	m.mu.Lock()
	n := m.byKey[nodeKey{key, false}]
	if n == nil { // the kernel has not looked up the name, or no object has it
		n = m.addNode(key, false)
	}
	n.open()
	id, h := m.addFile(n, syscall.O_RDONLY)
	m.mu.Unlock()
	if err := h.file.lock(ctx); err != nil {
		m.releaseHandle(id)
		return nil, nil, err
	}
	return n, func() {
		h.file.unlock()
		m.releaseHandle(id)
	}, nil
}

// removeNode detaches a node because its object was deleted or replaced. Its handles can read a local file only.
func (m *mount) removeNode(n *node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.detach(n)
	n.file.remove()
}

// Unlink implements fuse.RawFileSystem.
func (m *mount) Unlink(interrupt <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	key, code := m.newKey(header.NodeId, name)
	if !code.Ok() {
		return code
	}
	ctx, cancel := m.operation(interrupt, header)
	defer cancel()
	n, unlock, err := m.lockName(ctx, key)
	if err != nil {
		return status(ctx, err)
	}
	defer unlock()
	stored := n.file.mayBeStored()
	if stored {
		if err := m.store.delete(ctx, key); err != nil {
			return status(ctx, err)
		}
	}
	m.removeNode(n)
	if stored {
		m.retainFolder(ctx, parentOf(key))
	}
	return fuse.OK
}

// mayBeStored reports whether the bucket may have the object.
func (f *file) mayBeStored() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stored || f.tried
}

// Rename implements fuse.RawFileSystem. It is a copy and a deletion: after a failure, both names may exist.
func (m *mount) Rename(interrupt <-chan struct{}, in *fuse.RenameIn, oldName, newName string) fuse.Status {
	from, code := m.newKey(in.NodeId, oldName)
	if !code.Ok() {
		return code
	}
	to, code := m.newKey(in.Newdir, newName)
	switch {
	case !code.Ok():
		return code
	case in.Flags&^unix.RENAME_NOREPLACE != 0:
		return fuse.EINVAL
	}
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	if err := m.checkRename(ctx, from, to, in.Flags&unix.RENAME_NOREPLACE != 0); err != nil {
		return status(ctx, err)
	}
	return status(ctx, m.rename(ctx, from, to))
}

// checkRename returns an error if from cannot be renamed to to.
func (m *mount) checkRename(ctx context.Context, from, to string, exclusive bool) error {
	source, err := m.findName(ctx, from)
	switch {
	case err != nil:
		return err
	case source.folder:
		return syscall.EXDEV // mv(1) copies
	}
	target, err := m.findName(ctx, to)
	switch {
	case errno(err) == syscall.ENOENT:
		return nil
	case err != nil:
		return err
	case exclusive:
		return syscall.EEXIST
	case target.folder:
		return syscall.EISDIR
	}
	return nil
}

// findName is find, which also finds local files.
func (m *mount) findName(ctx context.Context, key string) (found, error) {
	m.mu.Lock()
	n := m.localNode(key)
	m.mu.Unlock()
	if n != nil {
		return found{}, nil
	}
	return m.find(ctx, key)
}

func (m *mount) rename(ctx context.Context, from, to string) error {
	// The kernel does not rename two names concurrently in opposite directions.
	n, unlock, err := m.lockName(ctx, from)
	if err != nil {
		return err
	}
	defer unlock()
	target, unlockTarget, err := m.lockName(ctx, to)
	if err != nil {
		return err
	}
	defer unlockTarget()
	if err := m.refreshLocked(ctx, n, from); err != nil {
		return err
	}
	copied, stored, err := m.copyTo(ctx, n.file, from, to)
	if err != nil {
		return err
	}
	m.removeNode(target)
	if stored {
		if err := m.store.delete(ctx, from); err != nil {
			n.file.markDirty()
			return err
		}
	}
	m.rekey(n, to, copied)
	if stored {
		m.retainFolder(ctx, parentOf(from))
	}
	return nil
}

// refreshLocked requests the object of a file that lockName has opened: it may have been uploaded, or replaced by
// another sandbox. A file that a program has open retains the object that it was opened with.
func (m *mount) refreshLocked(ctx context.Context, n *node, key string) error {
	if n.file.isLocal() {
		return nil
	}
	o, err := m.store.stat(ctx, key)
	if isNotFound(err) {
		return syscall.ENOENT
	} else if err != nil {
		return err
	}
	n.file.mu.Lock()
	defer n.file.mu.Unlock()
	if n.file.handles == 1 {
		n.file.base = o
	}
	return nil
}

// markDirty marks a local file, which was uploaded to another key, as not uploaded to its own.
func (f *file) markDirty() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.scratch != nil {
		f.written++
	}
}

// copyTo creates the object at the new key, and reports whether there may be one at the old key.
func (m *mount) copyTo(ctx context.Context, f *file, from, to string) (copied object, stored bool, err error) {
	scratch, base := f.content()
	stored = f.mayBeStored()
	if !f.isDirty() {
		copied, err = m.store.copy(ctx, from, base, to)
		if scratch == nil || !errors.Is(err, errStale) {
			return copied, stored, err
		}
	}
	err = m.uploadTo(ctx, f, to)
	_, copied = f.content()
	return copied, stored, err
}

// rekey changes the name of a node, which lockName has opened.
func (m *mount) rekey(n *node, key string, o object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.removed {
		return
	}
	m.detach(n)
	n.key, n.removed = key, false
	m.byKey[nodeKey{key, false}] = n
	n.object, n.at = o, time.Now()
	n.file.mu.Lock()
	defer n.file.mu.Unlock()
	if n.cached == n.file.base.etag {
		n.cached = o.etag
	}
	n.file.base, n.file.stored = o, true
}
