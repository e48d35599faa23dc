package bucketfs

import (
	"context"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sync/errgroup"
)

// Lookup implements fuse.RawFileSystem.
func (m *mount) Lookup(interrupt <-chan struct{}, header *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	parent := m.node(header.NodeId)
	if parent == nil {
		return fuse.ENOENT
	}
	key, errno := child(m.keyOf(parent), name)
	switch errno {
	case 0:
	case syscall.ENAMETOOLONG:
		return fuse.Status(errno)
	default:
		return fuse.ENOENT // creating the name reports the reason
	}
	if code, ok := m.enterLocal(key, out); ok {
		return code
	}
	ctx, cancel := m.operation(interrupt, header)
	defer cancel()
	found, err := m.find(ctx, key)
	if err != nil {
		return status(ctx, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.localNode(key) // it may have been created meanwhile
	switch {
	case n != nil:
	case found.folder:
		n = m.folderNode(key+"/", found.marker)
	default:
		n = m.fileNode(key, found.object)
	}
	return m.enter(n, out)
}

// enterLocal is enter for a file with a local state, and returns false if there is none.
func (m *mount) enterLocal(key string, out *fuse.EntryOut) (fuse.Status, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.localNode(key)
	if n == nil {
		return fuse.ENOENT, false
	}
	return m.enter(n, out), true
}

// found is what a name stands for in the bucket.
type found struct {
	folder bool
	marker bool // the folder has a marker
	object object
}

// find requests what a key without "/" at its end stands for, or returns ENOENT. A folder has
// precedence over an object.
func (m *mount) find(ctx context.Context, key string) (f found, err error) {
	group, ctx := errgroup.WithContext(ctx)
	exists := false
	group.Go(func() error {
		o, err := m.store.stat(ctx, key)
		if isNotFound(err) {
			return nil
		}
		f.object, exists = o, err == nil
		return err
	})
	var folder page
	group.Go(func() error {
		var err error
		folder, err = m.store.list(ctx, listing{prefix: key + "/", limit: 1})
		return err
	})
	if err := group.Wait(); err != nil {
		return found{}, err
	}
	for _, o := range folder.Contents {
		if strings.HasPrefix(o.Key, key+"/") {
			f.folder, f.marker = true, o.Key == key+"/"
		}
	}
	if !f.folder && !exists {
		return found{}, syscall.ENOENT
	}
	return f, nil
}

// GetAttr implements fuse.RawFileSystem.
func (m *mount) GetAttr(interrupt <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := m.node(in.NodeId)
	if n == nil {
		return fuse.ENOENT
	}
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	err := m.refresh(ctx, n)
	if err != nil && !(in.Flags()&fuse.FUSE_GETATTR_FH != 0 && (errno(err) == syscall.ENOENT || errno(err) == syscall.ESTALE)) {
		return status(ctx, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.attributes(n, &out.Attr)
	out.SetTimeout(validity)
	return fuse.OK
}

// refresh requests the object of a node if what is known of it has expired. It returns ESTALE if the object of an
// open file has changed, whereupon the kernel looks the name up again.
func (m *mount) refresh(ctx context.Context, n *node) error {
	m.mu.Lock()
	known := n.folder || n.removed || n.isFresh() || n.file != nil && n.file.isLocal()
	key := n.key
	m.mu.Unlock()
	if known {
		return nil
	}
	o, err := m.store.stat(ctx, key)
	if isNotFound(err) {
		err = syscall.ENOENT
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case n.removed || n.key != key || n.file != nil && n.file.isLocal():
		return nil // changed meanwhile, through this mount
	case n.file != nil && n.file.etag() != o.etag:
		return errStale
	}
	n.object, n.at = o, time.Now()
	return nil
}
