package bucketfs

import (
	"context"
	"fmt"
	"io"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// maxFile is the maximum size of a file, S3's limit of an object.
const maxFile = 5 << 40

// Write implements fuse.RawFileSystem.
func (m *mount) Write(interrupt <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := m.handle(in.Fh)
	if h == nil {
		return 0, fuse.EBADF
	}
	if in.Offset > maxFile-uint64(len(data)) {
		return 0, fuse.Status(syscall.EFBIG)
	}
	if !h.file.isLocal() {
		ctx, cancel := m.operation(interrupt, &in.InHeader)
		defer cancel()
		if err := m.makeLocal(ctx, h); err != nil {
			return 0, status(ctx, err)
		}
	}
	f := h.file
	f.mu.Lock()
	defer f.mu.Unlock()
	off := int64(in.Offset)
	if h.appends && in.WriteFlags&fuse.WRITE_CACHE == 0 {
		off = f.scratch.size // the kernel may have the size of an older object
	}
	n, err := f.scratch.writeAt(data, off)
	if n > 0 {
		f.change()
		return uint32(n), fuse.OK
	}
	return 0, fuse.Status(errno(err))
}

// makeLocal downloads a file to a scratch file.
func (m *mount) makeLocal(ctx context.Context, h *handle) error {
	f := h.file
	if err := f.lock(ctx); err != nil {
		return err
	}
	defer f.unlock()
	scratch, base := f.content()
	if scratch != nil {
		return nil
	}
	scratch, err := m.share.createScratch()
	if err != nil {
		return err
	}
	if err := m.download(ctx, m.keyOf(h.node), base, scratch); err != nil {
		scratch.close()
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.setScratch(scratch)
	return nil
}

// download writes an object to an empty scratch file.
func (m *mount) download(ctx context.Context, key string, o object, to *scratchFile) error {
	if o.size == 0 {
		return nil
	}
	if err := to.truncate(o.size); err != nil { // reserves the bytes first
		return err
	}
	if err := m.store.transfers.acquire(ctx); err != nil {
		return err
	}
	defer m.store.transfers.releaseSlot()
	buffer := make([]byte, maxTransfer)
	var off int64
	for attempt := 0; ; attempt++ {
		done, err := m.downloadFrom(ctx, key, o, to, off, buffer)
		if err == nil || attempt == maxAttempts || ctx.Err() != nil || isPermanent(err) {
			return err
		}
		if done > off {
			attempt = 0
		}
		off = done
	}
}

// downloadFrom writes the bytes of an object from an offset on, and returns the offset that it reached.
func (m *mount) downloadFrom(ctx context.Context, key string, o object, to *scratchFile, off int64, buffer []byte) (int64, error) {
	body, err := m.store.get(ctx, key, o, off, o.size-off)
	if err != nil {
		return off, err
	}
	defer body.Close()
	for off < o.size {
		n, err := body.Read(buffer)
		if n > 0 {
			if _, err := to.writeAt(buffer[:n], off); err != nil {
				return off, err
			}
			off += int64(n)
		}
		if err == io.EOF {
			break
		} else if err != nil {
			return off, fmt.Errorf("read object: %w", err)
		}
	}
	return off, nil
}

// isPermanent reports whether a repeated request would fail, too. minio-go has repeated failed requests, but
// not those whose response was cut.
func isPermanent(err error) bool { return errno(err) != syscall.EIO }

// truncate sets the size of a file.
func (m *mount) truncate(ctx context.Context, h *handle, size uint64) error {
	if size > maxFile {
		return syscall.EFBIG
	}
	if size == 0 {
		return m.clear(ctx, h)
	}
	if err := m.makeLocal(ctx, h); err != nil {
		return err
	}
	h.file.mu.Lock()
	defer h.file.mu.Unlock()
	if err := h.file.scratch.truncate(int64(size)); err != nil {
		return err
	}
	h.file.change()
	return nil
}

// clear sets the size to 0, without a download.
func (m *mount) clear(ctx context.Context, h *handle) error {
	f := h.file
	if err := f.lock(ctx); err != nil {
		return err
	}
	defer f.unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.scratch == nil {
		scratch, err := m.share.createScratch()
		if err != nil {
			return err
		}
		f.setScratch(scratch)
	} else if err := f.scratch.truncate(0); err != nil {
		return err
	}
	f.change()
	return nil
}

// SetAttr implements fuse.RawFileSystem. The size is the only attribute that changes; modes, owners and times
// are accepted without effect, so that cp -p and tar work.
func (m *mount) SetAttr(interrupt <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := m.node(in.NodeId)
	switch {
	case m.readOnly:
		return fuse.EROFS
	case n == nil:
		return fuse.ENOENT
	}
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	if size, ok := in.GetSize(); ok {
		fh, opened := in.GetFh()
		if err := m.resize(ctx, n, size, fh, opened); err != nil {
			return status(ctx, err)
		}
	}
	err := m.refresh(ctx, n)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil && !n.removed {
		return status(ctx, err)
	}
	m.attributes(n, &out.Attr)
	out.SetTimeout(validity)
	return fuse.OK
}

// resize sets the size of a file. Without a handle, which close(2) would upload, it uploads the file.
func (m *mount) resize(ctx context.Context, n *node, size uint64, fh uint64, opened bool) error {
	if n.folder {
		return syscall.EISDIR
	}
	if opened {
		h := m.handle(fh)
		if h == nil {
			return syscall.EINVAL
		}
		return m.truncate(ctx, h, size)
	}
	if err := m.refresh(ctx, n); err != nil {
		return err
	}
	id, h, err := m.openNode(n, syscall.O_RDWR)
	if err != nil {
		return err
	}
	defer m.releaseHandle(id)
	if err := m.truncate(ctx, h, size); err != nil {
		return err
	}
	return m.upload(ctx, n, h.file)
}
