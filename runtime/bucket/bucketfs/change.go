package bucketfs

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// lockName locks the open file that a name leads to against uploads, and returns its node: nil if the
// kernel does not know the name. The caller calls the function that it returns.
func (m *mount) lockName(ctx context.Context, key string) (*node, *file, func(), error) {
	m.mu.Lock()
	n := m.byKey[nodeKey{key, false}]
	var f *file
	if n != nil {
		f = n.file
	}
	m.mu.Unlock()
	if f == nil {
		return n, nil, func() {}, nil
	}
	if err := f.lock(ctx); err != nil {
		return nil, nil, nil, err
	}
	return n, f, f.unlock, nil
}

// removeNode detaches the node that a name leads to, because its object was deleted or replaced. Its
// handles can read a local file only.
func (m *mount) removeNode(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.byKey[nodeKey{key, false}]
	if n == nil {
		return
	}
	m.detach(n)
	if n.file != nil {
		n.file.remove()
	}
	m.dropUnused(n)
}

// Unlink implements fuse.RawFileSystem.
func (m *mount) Unlink(interrupt <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	key, code := m.newKey(header.NodeId, name)
	if !code.Ok() {
		return code
	}
	ctx, cancel := m.operation(interrupt)
	defer cancel()
	_, f, unlock, err := m.lockName(ctx, key)
	if err != nil {
		return status(ctx, err)
	}
	defer unlock()
	stored := f == nil || f.mayBeStored()
	if stored {
		if err := m.store.delete(ctx, key); err != nil {
			return status(ctx, err)
		}
	}
	m.removeNode(key)
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
	ctx, cancel := m.operation(interrupt)
	defer cancel()
	o, err := m.checkRename(ctx, from, to, in.Flags&unix.RENAME_NOREPLACE != 0)
	if err != nil {
		return status(ctx, err)
	}
	return status(ctx, m.rename(ctx, from, to, o))
}

// checkRename returns the object at from, if it is not local, or an error if it cannot be renamed to to.
func (m *mount) checkRename(ctx context.Context, from, to string, exclusive bool) (object, error) {
	source, err := m.findName(ctx, from)
	switch {
	case err != nil:
		return object{}, err
	case source.folder:
		return object{}, syscall.EXDEV // mv(1) copies
	}
	target, err := m.findName(ctx, to)
	switch {
	case errno(err) == syscall.ENOENT:
		return source.object, nil
	case err != nil:
		return object{}, err
	case exclusive:
		return object{}, syscall.EEXIST
	case target.folder:
		return object{}, syscall.EISDIR
	}
	return source.object, nil
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

func (m *mount) rename(ctx context.Context, from, to string, o object) error {
	// The kernel does not rename two names concurrently in opposite directions.
	n, f, unlock, err := m.lockName(ctx, from)
	if err != nil {
		return err
	}
	defer unlock()
	_, _, unlockTarget, err := m.lockName(ctx, to)
	if err != nil {
		return err
	}
	defer unlockTarget()
	if f == nil { // it may have been uploaded and released since checkRename
		if o, err = m.store.stat(ctx, from); isNotFound(err) {
			return syscall.ENOENT
		} else if err != nil {
			return err
		}
	}
	copied, stored, err := m.copyTo(ctx, f, from, o, to)
	if err != nil {
		return err
	}
	m.removeNode(to)
	if stored {
		if err := m.store.delete(ctx, from); err != nil {
			f.markDirty()
			return err
		}
	}
	if n != nil {
		m.rekey(n, to, copied)
	}
	if stored {
		m.retainFolder(ctx, parentOf(from))
	}
	return nil
}

// markDirty marks a local file, which was uploaded to another key, as not uploaded to its own. f may be nil.
func (f *file) markDirty() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.scratch != nil {
		f.written++
	}
}

// copyTo creates the object at the new key, and reports whether there may be one at the old key.
func (m *mount) copyTo(ctx context.Context, f *file, from string, o object, to string) (copied object, stored bool, err error) {
	if f == nil {
		copied, err = m.store.copy(ctx, from, o, to)
		return copied, true, err
	}
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

// rekey changes the name of a node.
func (m *mount) rekey(n *node, key string, o object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.removed {
		return
	}
	m.detach(n)
	n.key, n.removed = key, false
	m.byKey[nodeKey{key, false}] = n
	if n.cached == n.object.etag && n.file == nil {
		n.cached = o.etag
	}
	n.object, n.at = o, time.Now()
	if n.file != nil {
		n.file.mu.Lock()
		defer n.file.mu.Unlock()
		n.file.base, n.file.stored = o, true
	}
}
