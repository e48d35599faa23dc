package bucketfs

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// maxEmptyPages limits consecutive pages without a key. Some object stores send a few.
const maxEmptyPages = 100

var errEndless = errors.New("list makes no progress")

// folderHandle is an open folder. It holds one page of the list.
type folderHandle struct {
	key string // of the folder

	mu      sync.Mutex
	entries []entry // the current page
	first   uint64  // the offset of entries[0]
	token   string  // of the next page
	last    string  // the last listed key, by which progress is checked
	end     bool    // the object store has returned the last page
	local   []entry // local files that the list has not contained yet
	pending []entry // objects that a folder of the same name may follow: see merge
}

// entry of a folder.
type entry struct {
	name   string
	folder bool
	marker bool
	local  bool // its node has the attributes
	object object
}

// OpenDir implements fuse.RawFileSystem.
func (m *mount) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return m.withHandle(func() fuse.Status {
		m.mu.Lock()
		defer m.mu.Unlock()
		n := m.nodes[in.NodeId]
		if n == nil || !n.folder {
			return fuse.ENOTDIR
		}
		h := &folderHandle{key: n.key}
		h.rewind(m.localEntries(n.key))
		out.Fh = m.addHandle(h)
		return fuse.OK
	})
}

// ReleaseDir implements fuse.RawFileSystem.
func (m *mount) ReleaseDir(in *fuse.ReleaseIn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.handles, in.Fh)
	m.share.handles.free(1)
}

// FsyncDir implements fuse.RawFileSystem. Changes of folders are in the bucket when they return.
func (m *mount) FsyncDir(<-chan struct{}, *fuse.FsyncIn) fuse.Status { return fuse.OK }

// localEntries returns the files of a folder that may not be in the bucket yet. The caller holds m.mu.
func (m *mount) localEntries(folder string) []entry {
	var local []entry
	for _, h := range m.handles {
		h, ok := h.(*handle)
		if !ok || h.node.removed || !h.node.file.isLocal() || parentOf(h.node.key) != folder {
			continue
		}
		local = append(local, entry{name: h.node.key[len(folder):], local: true})
	}
	slices.SortFunc(local, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	return slices.CompactFunc(local, func(a, b entry) bool { return a.name == b.name })
}

// ReadDir implements fuse.RawFileSystem.
func (m *mount) ReadDir(interrupt <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return m.readFolder(interrupt, in, func(e entry, key string, off uint64) bool {
		return out.AddDirEntry(fuse.DirEntry{Name: e.name, Mode: e.mode(), Off: off})
	})
}

// ReadDirPlus implements fuse.RawFileSystem.
func (m *mount) ReadDirPlus(interrupt <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return m.readFolder(interrupt, in, func(e entry, key string, off uint64) bool {
		slot := out.AddDirLookupEntry(fuse.DirEntry{Name: e.name, Mode: e.mode(), Off: off})
		if slot == nil {
			return false
		}
		if e.name == "." || e.name == ".." || m.pruneIfScarce() {
			return true // without a reference: the kernel looks the name up
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if n := m.entryNode(e, key); n != nil && m.enter(n, slot).Ok() {
			out.FixMode(slot.Mode)
		}
		return true
	})
}

// entryNode returns the node of an entry, or nil if a local file has gone: then the kernel looks the
// name up. The caller holds m.mu.
func (m *mount) entryNode(e entry, folder string) *node {
	switch {
	case e.local:
		return m.localNode(folder + e.name)
	case e.folder:
		return m.folderNode(folder+e.name+"/", e.marker)
	}
	return m.fileNode(folder+e.name, e.object)
}

func (e entry) mode() uint32 {
	if e.folder {
		return fuse.S_IFDIR
	}
	return fuse.S_IFREG
}

// readFolder calls add with entries from an offset, until it returns false. Only the current page and
// the following ones can be read without a new list.
func (m *mount) readFolder(interrupt <-chan struct{}, in *fuse.ReadIn, add func(e entry, folder string, off uint64) bool) fuse.Status {
	m.mu.Lock()
	h, ok := m.handles[in.Fh].(*folderHandle)
	m.mu.Unlock()
	if !ok {
		return fuse.EBADF
	}
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	h.mu.Lock()
	defer h.mu.Unlock()
	if in.Offset < h.first || in.Offset == 0 {
		m.mu.Lock()
		local := m.localEntries(h.key)
		m.mu.Unlock()
		h.rewind(local)
	}
	off, added := in.Offset, false
	for {
		e, ok, err := h.at(ctx, m.store, off)
		switch {
		case err != nil && added:
			return fuse.OK // the next call reports the error
		case err != nil:
			return status(ctx, err)
		case !ok || !add(e, h.key, off+1):
			return fuse.OK
		}
		off, added = off+1, true
	}
}

// rewind starts the list again.
func (h *folderHandle) rewind(local []entry) {
	h.entries, h.first = []entry{{name: ".", folder: true}, {name: "..", folder: true}}, 0
	h.token, h.last, h.end, h.pending, h.local = "", "", false, nil, local
}

// at returns the entry at an offset, which is not before the current page, and false at the end.
func (h *folderHandle) at(ctx context.Context, s *store, off uint64) (entry, bool, error) {
	for empty := 0; off >= h.first+uint64(len(h.entries)); {
		if h.end {
			return entry{}, false, nil
		}
		if err := h.next(ctx, s); err != nil {
			return entry{}, false, err
		}
		if len(h.entries) > 0 {
			empty = 0
		} else if empty++; empty > maxEmptyPages {
			return entry{}, false, errEndless
		}
	}
	return h.entries[off-h.first], true, nil
}

// next requests the next page.
func (h *folderHandle) next(ctx context.Context, s *store) error {
	p, err := s.list(ctx, listing{prefix: h.key, delimiter: true, token: h.token, limit: pageSize})
	if err != nil {
		return err
	}
	more := p.IsTruncated && p.NextContinuationToken != ""
	if last := p.last(); more && last != "" {
		if last <= h.last {
			return errEndless
		}
		h.last = last
	}
	entries := h.merge(p.entries(h.key), more)
	h.first += uint64(len(h.entries))
	h.entries, h.token, h.end = entries, p.NextContinuationToken, !more
	return nil
}

// last returns the greatest key of a page.
func (p *page) last() string {
	last := ""
	for i := range p.Contents {
		last = max(last, p.Contents[i].Key)
	}
	for i := range p.CommonPrefixes {
		last = max(last, p.CommonPrefixes[i].Prefix)
	}
	return last
}

// entries returns the entries of a page by name. It omits keys that a file system cannot represent.
func (p *page) entries(folder string) map[string]entry {
	entries := make(map[string]entry, min(len(p.Contents)+len(p.CommonPrefixes), 2*pageSize))
	for _, o := range p.Contents {
		name, ok := childName(folder, o.Key)
		if !ok || isFolderKey(o.Key) || o.Size < 0 {
			continue
		}
		entries[name] = entry{name: name, object: object{
			size: o.Size, etag: strings.Trim(o.ETag, `"`), mtime: o.LastModified.Truncate(time.Second),
		}}
	}
	for _, prefix := range p.CommonPrefixes {
		if name, ok := childName(folder, prefix.Prefix); ok && isFolderKey(prefix.Prefix) {
			entries[name] = entry{name: name, folder: true}
		}
	}
	return entries
}

// merge returns the sorted entries of a page and, at the end of the list, of local files. It holds back
// the objects for which the folder of the same name may be in a later page.
func (h *folderHandle) merge(listed map[string]entry, more bool) []entry {
	for _, e := range h.pending {
		if _, ok := listed[e.name]; !ok {
			listed[e.name] = e
		}
	}
	h.pending = nil
	h.local = slices.DeleteFunc(h.local, func(e entry) bool {
		if _, ok := listed[e.name]; ok || !more {
			listed[e.name] = e
			return true
		}
		return false
	})
	if more {
		for name, e := range listed {
			// The folder's key sorts after the last one, which begins with the name: at most 255 names.
			if path := h.key + name; !e.folder && !e.local && strings.HasPrefix(h.last, path) && h.last < path+"/" {
				h.pending = append(h.pending, e)
				delete(listed, name)
			}
		}
	}
	entries := slices.Collect(maps.Values(listed))
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	return entries
}

// Mkdir implements fuse.RawFileSystem. It creates a marker.
func (m *mount) Mkdir(interrupt <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	key, code := m.newKey(in.NodeId, name)
	if !code.Ok() {
		return code
	}
	return m.withNode(func() fuse.Status { return m.mkdir(interrupt, &in.InHeader, key, out) })
}

func (m *mount) mkdir(interrupt <-chan struct{}, header *fuse.InHeader, key string, out *fuse.EntryOut) fuse.Status {
	ctx, cancel := m.operation(interrupt, header)
	defer cancel()
	if _, err := m.find(ctx, key); err == nil {
		return fuse.Status(syscall.EEXIST)
	} else if errno(err) != syscall.ENOENT {
		return status(ctx, err)
	}
	if err := m.store.putMarker(ctx, key+"/"); err != nil {
		return status(ctx, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.enterReserved(m.folderNode(key+"/", true), out)
	return fuse.OK
}

// newKey returns the key of a name that is to be created.
func (m *mount) newKey(parent uint64, name string) (string, fuse.Status) {
	n := m.node(parent)
	switch {
	case m.readOnly:
		return "", fuse.EROFS
	case n == nil || !n.folder:
		return "", fuse.ENOTDIR
	}
	key, errno := child(m.keyOf(n), name)
	return key, fuse.Status(errno)
}

// Rmdir implements fuse.RawFileSystem.
func (m *mount) Rmdir(interrupt <-chan struct{}, header *fuse.InHeader, name string) fuse.Status {
	key, code := m.newKey(header.NodeId, name)
	if !code.Ok() {
		return code
	}
	key += "/"
	ctx, cancel := m.operation(interrupt, header)
	defer cancel()
	empty, err := m.isEmpty(ctx, key)
	switch {
	case err != nil:
		return status(ctx, err)
	case !empty:
		return fuse.Status(syscall.ENOTEMPTY)
	}
	if err := m.store.delete(ctx, key); err != nil {
		return status(ctx, err)
	}
	m.mu.Lock()
	if n := m.byKey[nodeKey{key, true}]; n != nil {
		m.detach(n)
	}
	m.mu.Unlock()
	m.retainFolder(ctx, parentOf(key))
	return fuse.OK
}

// isEmpty reports whether a folder has no entry.
func (m *mount) isEmpty(ctx context.Context, key string) (bool, error) {
	p, err := m.store.list(ctx, listing{prefix: key, limit: 2})
	if err != nil {
		return false, err
	}
	for _, o := range p.Contents {
		if o.Key != key {
			return false, nil
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.localEntries(key)) == 0, nil
}

// retainFolder creates the marker of a folder whose last entry was deleted, so that the folder stays. It only logs
// a failure, because the deletion has succeeded.
func (m *mount) retainFolder(ctx context.Context, key string) {
	m.mu.Lock()
	n := m.byKey[nodeKey{key, true}]
	retained := n == nil || n.marker || n.id == fuse.FUSE_ROOT_ID
	m.mu.Unlock()
	if retained {
		return
	}
	p, err := m.store.list(ctx, listing{prefix: key, limit: 1})
	if err == nil && len(p.Contents) == 0 {
		err = m.store.putMarker(ctx, key)
	}
	if err != nil {
		m.log.Warn("failed to retain empty folder", "key", key, "error", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n.marker = n.marker || len(p.Contents) == 0 || p.Contents[0].Key == key
}
