package bucketfs

import (
	"context"
	"log/slog"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// mount is a file system. Locks are acquired in the order mount.mu, file.mu, and never during requests
// to the object store.
type mount struct {
	fuse.RawFileSystem // refuses what is not implemented

	ctx      context.Context // of the connection
	log      *slog.Logger
	store    *store
	share    *Share
	readOnly bool
	owner    fuse.Owner
	started  time.Time

	device *device

	background sync.WaitGroup // of streams, uploads and startPruning, which end with ctx

	mu         sync.Mutex
	nodes      map[uint64]*node
	byKey      map[nodeKey]*node
	lastNode   uint64
	handles    map[uint64]any // *handle or *folderHandle
	lastHandle uint64
}

func newMount(ctx context.Context, o Options, s *store) *mount {
	m := &mount{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		ctx:           ctx,
		log:           o.Log,
		store:         s,
		share:         o.Share,
		readOnly:      o.ReadOnly,
		owner:         fuse.Owner{Uid: o.UID, Gid: o.GID},
		started:       time.Now(),
		nodes:         map[uint64]*node{},
		byKey:         map[nodeKey]*node{},
		handles:       map[uint64]any{},
	}
	m.addNode(o.Bucket.Prefix, true) // FUSE_ROOT_ID
	return m
}

// discardFiles releases everything when the connection has ended. Changes that were not uploaded are lost.
func (m *mount) discardFiles() {
	m.background.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, h := range m.handles {
		if h, ok := h.(*handle); ok {
			h.reader.close()
		}
	}
	m.share.handles.free(int64(len(m.handles)))
	m.share.remove(m)
	for _, n := range m.nodes {
		if n.lookups > 0 {
			m.share.nodes.free(1) // the kernel does not send FORGET at the end
		}
		if n.file != nil {
			n.file.discard(m.log)
		}
	}
	m.store.close()
}

// String implements fuse.RawFileSystem.
func (m *mount) String() string { return "bucketfs" }

// withHandle calls open, which adds a handle for a program, if the sandbox may have another one.
func (m *mount) withHandle(open func() fuse.Status) fuse.Status {
	if !m.share.handles.acquire(1) {
		return fuse.Status(syscall.ENFILE)
	}
	code := open()
	if !code.Ok() {
		m.share.handles.free(1)
	}
	return code
}

// addHandle returns the id of a new handle. The caller holds m.mu.
func (m *mount) addHandle(h any) uint64 {
	m.lastHandle++
	m.handles[m.lastHandle] = h
	return m.lastHandle
}

func (m *mount) handle(id uint64) *handle {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, _ := m.handles[id].(*handle)
	return h
}

// StatFs implements fuse.RawFileSystem. A bucket has no limit, and programs that check for free space
// have to find some.
func (m *mount) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	const block, blocks, files = 4 << 10, 1 << 38, 1 << 32 // 1 PiB
	*out = fuse.StatfsOut{
		Blocks: blocks, Bfree: blocks, Bavail: blocks, Files: files, Ffree: files,
		Bsize: block, Frsize: block, NameLen: maxName,
	}
	return fuse.OK
}

// Access implements fuse.RawFileSystem. The kernel does not ask again.
func (m *mount) Access(<-chan struct{}, *fuse.AccessIn) fuse.Status { return fuse.ENOSYS }

// Symlink implements fuse.RawFileSystem: EPERM is what symlink(2) documents for such a file system.
func (m *mount) Symlink(<-chan struct{}, *fuse.InHeader, string, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

// Link implements fuse.RawFileSystem: EPERM is what link(2) documents for such a file system.
func (m *mount) Link(<-chan struct{}, *fuse.LinkIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}

// Mknod implements fuse.RawFileSystem.
func (m *mount) Mknod(<-chan struct{}, *fuse.MknodIn, string, *fuse.EntryOut) fuse.Status {
	return fuse.EPERM
}
