package bucketfs

import (
	"context"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// handle is an open file.
type handle struct {
	node    *node
	file    *file
	appends bool
	writes  bool
	reader  reader
}

// Open implements fuse.RawFileSystem.
func (m *mount) Open(interrupt <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	writes := in.Flags&syscall.O_ACCMODE != syscall.O_RDONLY
	if m.readOnly && (writes || in.Flags&syscall.O_TRUNC != 0) {
		return fuse.EROFS
	}
	n := m.node(in.NodeId)
	switch {
	case n == nil:
		return fuse.ENOENT
	case n.folder:
		return fuse.EISDIR
	}
	return m.withHandle(func() fuse.Status { return m.open(interrupt, n, in, out) })
}

func (m *mount) open(interrupt <-chan struct{}, n *node, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	if err := m.refresh(ctx, n); err != nil {
		return status(ctx, err)
	}
	id, h, err := m.openNode(n, in.Flags)
	if err != nil {
		return status(ctx, err)
	}
	if in.Flags&syscall.O_TRUNC != 0 {
		if err := m.truncate(ctx, h, 0); err != nil {
			m.releaseHandle(id)
			return status(ctx, err)
		}
	}
	out.Fh = id
	if m.isCached(n) {
		out.OpenFlags = fuse.FOPEN_KEEP_CACHE
	}
	return fuse.OK
}

// isCached reports whether the kernel's page cache has the current content of an open file, and records
// that it will.
func (m *mount) isCached(n *node) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.file.isLocal() {
		return true // each change goes through the kernel
	}
	etag := n.file.etag()
	cached := etag != "" && n.cached == etag
	n.cached = etag
	return cached
}

// openNode adds a handle of a file.
func (m *mount) openNode(n *node, flags uint32) (uint64, *handle, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.removed && n.file == nil {
		return 0, nil, errStale // the kernel looks the name up again
	}
	n.open()
	id, h := m.addFile(n, flags)
	return id, h, nil
}

// addFile adds a handle of a node with a file. The caller holds m.mu.
func (m *mount) addFile(n *node, flags uint32) (uint64, *handle) {
	h := &handle{
		node: n, file: n.file,
		appends: flags&syscall.O_APPEND != 0,
		writes:  flags&syscall.O_ACCMODE != syscall.O_RDONLY,
	}
	n.file.mu.Lock()
	defer n.file.mu.Unlock()
	n.file.handles++
	return m.addHandle(h), h
}

// Create implements fuse.RawFileSystem.
func (m *mount) Create(interrupt <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	key, code := m.newKey(in.NodeId, name)
	if !code.Ok() {
		return code
	}
	return m.withHandle(func() fuse.Status {
		return m.withNode(func() fuse.Status { return m.create(key, in.Flags, out) })
	})
}

func (m *mount) create(key string, flags uint32, out *fuse.CreateOut) fuse.Status {
	scratch, err := m.share.createScratch()
	if err != nil {
		m.log.Error("failed to create file", "error", err)
		return fuse.Status(errno(err))
	}
	id, n, err := m.createNode(key, scratch, flags)
	if err != nil {
		scratch.close()
		return fuse.Status(errno(err))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out.Fh, out.OpenOut.OpenFlags = id, fuse.FOPEN_KEEP_CACHE
	m.enterReserved(n, &out.EntryOut)
	return fuse.OK
}

// createNode adds a node with a new empty file. It takes ownership of scratch unless it fails.
func (m *mount) createNode(key string, scratch *scratchFile, flags uint32) (uint64, *node, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := m.byKey[nodeKey{key, false}]; n != nil {
		if n.file != nil && n.file.isLocal() {
			return 0, nil, syscall.EEXIST // two calls raced
		}
		m.detach(n)
		m.dropUnused(n)
	}
	n := m.addNode(key, false)
	n.file = newFile()
	id, _ := m.addFile(n, flags)
	n.file.mu.Lock()
	defer n.file.mu.Unlock()
	n.file.setScratch(scratch)
	n.file.change()
	return id, n, nil
}

// Release implements fuse.RawFileSystem.
func (m *mount) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	m.releaseHandle(in.Fh)
	m.share.handles.free(1)
}

// releaseHandle closes a file. Changes that close(2) has not uploaded, of a shared mapping or after an
// error, are uploaded now. If that fails, they are lost, as close(2) has reported.
func (m *mount) releaseHandle(id uint64) {
	h := m.handle(id)
	if h == nil {
		return
	}
	h.reader.close()
	f := h.file
	f.mu.Lock()
	f.closing++
	upload := f.closing == f.handles && f.dirty()
	f.mu.Unlock()
	if upload {
		if err := m.upload(m.ctx, h.node, f); err != nil {
			m.log.Error("failed to upload file after close", "key", m.keyOf(h.node), "error", err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.handles, id)
	f.mu.Lock()
	f.handles, f.closing = f.handles-1, f.closing-1
	f.mu.Unlock()
	m.dropFile(h.node)
}

// dropFile frees the file of a node if it has no handle. The caller holds m.mu.
func (m *mount) dropFile(n *node) {
	f := n.file
	f.mu.Lock()
	unused, local, clean := f.handles == 0, f.scratch != nil, f.written == f.uploaded
	base, stored := f.base, f.stored
	f.mu.Unlock()
	if !unused {
		return
	}
	f.discard(m.log)
	n.file = nil
	switch {
	case local && clean:
		n.object, n.cached, n.at = base, base.etag, time.Now()
	case local:
		n.cached, n.at = "", time.Time{}
		if !stored {
			m.detach(n)
		}
	}
	m.dropUnused(n)
}

// Flush implements fuse.RawFileSystem. It is called for each close(2) of a descriptor.
func (m *mount) Flush(interrupt <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	h := m.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	if !h.writes {
		return fuse.OK
	}
	return m.sync(interrupt, &in.InHeader, h)
}

// Fsync implements fuse.RawFileSystem.
func (m *mount) Fsync(interrupt <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := m.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	return m.sync(interrupt, &in.InHeader, h)
}

// sync uploads a file. Only the end of the program interrupts it, because programs do not expect EINTR of close(2). An
// upload that has begun then goes on.
func (m *mount) sync(interrupt <-chan struct{}, header *fuse.InHeader, h *handle) fuse.Status {
	ctx, cancel := m.interruptible(interrupt, header.Pid, func(signals uint64, _ time.Duration) bool { return isKilled(signals) })
	defer cancel()
	if err := h.file.lock(ctx); err != nil {
		return status(ctx, err)
	}
	done := make(chan error, 1)
	m.background.Go(func() {
		defer h.file.unlock()
		done <- m.uploadDirty(m.ctx, h.node, h.file)
	})
	select {
	case err := <-done:
		return status(m.ctx, err)
	case <-ctx.Done():
		return status(ctx, context.Cause(ctx))
	}
}

// upload uploads a file if it is dirty. If it fails, the file stays dirty.
func (m *mount) upload(ctx context.Context, n *node, f *file) error {
	if err := f.lock(ctx); err != nil {
		return err
	}
	defer f.unlock()
	return m.uploadDirty(ctx, n, f)
}

// uploadDirty is upload for callers that hold f.busy.
func (m *mount) uploadDirty(ctx context.Context, n *node, f *file) error {
	if !f.isDirty() {
		return nil
	}
	return m.uploadTo(ctx, f, m.keyOf(n))
}

// uploadTo uploads a local file to a key. The caller holds f.busy.
func (m *mount) uploadTo(ctx context.Context, f *file, key string) error {
	f.mu.Lock()
	written, scratch, size := f.written, f.scratch, f.scratch.size
	f.tried = true
	f.mu.Unlock()
	o, err := m.store.put(ctx, key, scratch, size)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.base, f.stored, f.uploaded = o, true, written
	if f.written == written {
		f.mtime = o.mtime
	}
	return nil
}
