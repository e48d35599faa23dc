package bucketfs

import (
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// validity is how long the kernel caches names and attributes.
const validity = time.Second

// node is a file or folder that the kernel knows. Its fields are guarded by mount.mu.
type node struct {
	id      uint64
	key     string // of a folder: "" or ends in "/"
	folder  bool
	lookups uint64 // references of the kernel; a node with references counts against share.nodes

	object  object    // of a file, as last reported by the object store
	at      time.Time // when; zero if unknown
	marker  bool      // a folder whose marker object exists
	file    *file     // if it is open
	removed bool      // the name does not lead to this node any more
	cached  string    // the ETag of the content in the kernel's page cache
}

// isFresh reports whether the object needs no request.
func (n *node) isFresh() bool { return !n.at.IsZero() && time.Since(n.at) < validity }

// open gives a node without a file one with its object. The caller holds mount.mu.
func (n *node) open() {
	if n.file == nil {
		n.file = newFile()
		n.file.base, n.file.stored = n.object, true
	}
}

// node returns the node of an id, or nil.
func (m *mount) node(id uint64) *node {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.nodes[id]
}

// keyOf returns the key of a node.
func (m *mount) keyOf(n *node) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return n.key
}

// addNode adds a node without references. The caller holds m.mu.
func (m *mount) addNode(key string, folder bool) *node {
	m.lastNode++
	n := &node{id: m.lastNode, key: key, folder: folder}
	m.nodes[n.id] = n
	m.byKey[nodeKey{key, folder}] = n
	return n
}

// nodeKey identifies a node. The key "" is the root folder's.
type nodeKey struct {
	key    string
	folder bool
}

// detach removes the name of a node. The caller holds m.mu.
func (m *mount) detach(n *node) {
	if m.byKey[nodeKey{n.key, n.folder}] == n {
		delete(m.byKey, nodeKey{n.key, n.folder})
	}
	n.removed = true
}

// dropUnused removes a node without references. The caller holds m.mu.
func (m *mount) dropUnused(n *node) {
	if n.lookups == 0 && n.file == nil && n.id != fuse.FUSE_ROOT_ID {
		m.detach(n)
		delete(m.nodes, n.id)
	}
}

// Forget implements fuse.RawFileSystem.
func (m *mount) Forget(id, count uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.nodes[id]
	if n == nil || id == fuse.FUSE_ROOT_ID {
		return
	}
	if n.lookups > 0 && n.lookups <= count {
		m.share.nodes.free(1)
	}
	n.lookups -= min(count, n.lookups)
	m.dropUnused(n)
}

// folderNode returns the node of a folder. The caller holds m.mu.
func (m *mount) folderNode(key string, marker bool) *node {
	n := m.byKey[nodeKey{key, true}]
	if n == nil {
		n = m.addNode(key, true)
	}
	n.marker = n.marker || marker
	return n
}

// fileNode returns the node of an object. An open file whose object has changed retains its node: the name
// leads to a new one. The caller holds m.mu.
func (m *mount) fileNode(key string, o object) *node {
	n := m.byKey[nodeKey{key, false}]
	if n != nil && n.file != nil {
		if n.file.isLocal() {
			return n
		}
		if n.file.etag() != o.etag {
			m.detach(n)
			n = nil
		}
	}
	if n == nil {
		n = m.addNode(key, false)
	}
	n.object, n.at = o, time.Now()
	return n
}

// localNode returns the node of a file with a local state, or nil. The caller holds m.mu.
func (m *mount) localNode(key string) *node {
	if n := m.byKey[nodeKey{key, false}]; n != nil && n.file != nil && n.file.isLocal() {
		return n
	}
	return nil
}

// withNode reserves one of the nodes that the kernel may know, and calls enter, which uses it by enterReserved. It returns
// ENFILE if there are too many.
func (m *mount) withNode(enter func() fuse.Status) fuse.Status {
	m.pruneIfScarce()
	if !m.share.nodes.acquire(1) {
		return fuse.Status(syscall.ENFILE)
	}
	code := enter()
	if !code.Ok() {
		m.share.nodes.free(1)
	}
	return code
}

// enterReserved is enter for a caller of withNode, and does not fail.
func (m *mount) enterReserved(n *node, out *fuse.EntryOut) {
	if n.lookups > 0 {
		m.share.nodes.free(1)
	}
	m.addReference(n, out)
}

// enter adds a reference of the kernel and fills an entry. It returns ENFILE if the kernel knows the maximum of nodes. The
// caller holds m.mu.
func (m *mount) enter(n *node, out *fuse.EntryOut) fuse.Status {
	m.pruneIfScarce()
	if n.lookups == 0 && !m.share.nodes.acquire(1) {
		m.dropUnused(n)
		return fuse.Status(syscall.ENFILE)
	}
	m.addReference(n, out)
	return fuse.OK
}

// pruneIfScarce starts Share.prune if the kernel may not know many more nodes, and reports whether that is so.
func (m *mount) pruneIfScarce() bool {
	if !m.share.nodes.isScarce() {
		return false
	}
	if m.share.pruning.CompareAndSwap(false, true) {
		m.background.Go(func() {
			defer m.share.pruning.Store(false)
			m.share.prune()
			select {
			case <-time.After(pruneInterval):
			case <-m.ctx.Done():
			}
		})
	}
	return true
}

// prune makes the kernel forget half of the nodes, but none that a program uses, for example as its working folder. It
// has no effect before Linux 6.18: that forgets nodes only when the sandbox or the host is short of memory.
func (m *mount) prune() {
	m.mu.Lock()
	ids := make([]uint64, 0, len(m.nodes)/2)
	for id, n := range m.nodes { // in random order
		if len(ids) < cap(ids) && n.lookups > 0 && n.file == nil {
			ids = append(ids, id)
		}
	}
	m.mu.Unlock()
	for batch := range slices.Chunk(ids, maxPruned) {
		if m.device.prune(batch) != nil {
			return
		}
	}
}

// addReference adds a reference of the kernel and fills an entry. The caller holds m.mu.
func (m *mount) addReference(n *node, out *fuse.EntryOut) {
	n.lookups++
	out.NodeId = n.id
	out.SetEntryTimeout(validity)
	out.SetAttrTimeout(validity)
	m.attributes(n, &out.Attr)
}

// attributes fills the attributes of a node. The caller holds m.mu.
func (m *mount) attributes(n *node, out *fuse.Attr) {
	mode, mtime, size := uint32(fuse.S_IFREG|0o644), n.object.mtime, n.object.size
	switch {
	case n.folder:
		mode, mtime, size = fuse.S_IFDIR|0o755, m.started, 0
	case n.file != nil:
		size, mtime = n.file.attributes()
	}
	if m.readOnly {
		mode &^= 0o222
	}
	*out = fuse.Attr{
		Ino: n.id, Mode: mode, Nlink: 1, Owner: m.owner, Blksize: maxTransfer,
		Size: uint64(size), Blocks: uint64(size+511) / 512,
	}
	if n.removed {
		out.Nlink = 0
	}
	out.SetTimes(&mtime, &mtime, &mtime)
}

// isFolderKey reports whether a key is a marker's.
func isFolderKey(key string) bool { return strings.HasSuffix(key, "/") }
