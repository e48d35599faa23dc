package bucketfs

import (
	"context"
	"io"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"
)

const (
	// readWindow is the maximum read-ahead of a handle. 4 MiB hide 40 ms of latency at 100 MB/s.
	readWindow = 4 << 20
	// firstRead is what the first read of a file requests: many files are smaller, and programs that
	// inspect the first bytes do not need more.
	firstRead = 1 << 20
	// randomRead is what a read requests elsewhere.
	randomRead = 256 << 10
	// jump is the distance within which concurrent reads count as sequential.
	jump = 512 << 10
)

// Read implements fuse.RawFileSystem.
func (m *mount) Read(interrupt <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	h := m.handle(in.Fh)
	if h == nil {
		return nil, fuse.EBADF
	}
	scratch, o := h.file.content()
	size := o.size
	if scratch != nil {
		size, _ = h.file.attributes()
	}
	if in.Offset >= uint64(size) {
		return fuse.ReadResultData(nil), fuse.OK
	}
	off := int64(in.Offset)
	buf = buf[:min(int64(len(buf)), int64(in.Size), size-off)]
	if scratch != nil {
		n, err := scratch.ReadAt(buf, off)
		if err != nil {
			return nil, fuse.EIO
		}
		return fuse.ReadResultData(buf[:n]), fuse.OK
	}
	ctx, cancel := m.operation(interrupt, &in.InHeader)
	defer cancel()
	if err := h.reader.read(ctx, m, m.keyOf(h.node), o, buf, off); err != nil {
		return nil, status(ctx, err)
	}
	return fuse.ReadResultData(buf), fuse.OK
}

// reader reads the object of a handle. It detects sequential reading.
type reader struct {
	mu     sync.Mutex
	stream *stream
	next   int64 // the greatest end of a read since the last jump
	closed bool
}

// read fills p with the bytes from off, which exist.
func (r *reader) read(ctx context.Context, m *mount, key string, o object, p []byte, off int64) error {
	for len(p) > 0 {
		s, err := r.streamAt(m, key, o, off, int64(len(p)))
		if err != nil {
			return err
		}
		if s == nil { // no memory for read-ahead, or another read needs the stream
			return m.readDirect(ctx, key, o, p, off)
		}
		n, err := s.read(ctx, p, off)
		s.unpin()
		if err == errMissed { // another read has moved the window
			return m.readDirect(ctx, key, o, p, off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// streamAt returns a pinned stream that will have the bytes from off, or nil.
func (r *reader) streamAt(m *mount, key string, o object, off, n int64) (*stream, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, context.Canceled
	}
	sequential := off >= r.next-jump && off <= r.next+jump && r.next > 0
	if r.stream != nil && r.stream.pin(off) {
		r.next = max(r.next, off+n)
		return r.stream, nil
	}
	if r.stream != nil {
		if _, pinned := r.stream.usage(); pinned {
			return nil, nil // concurrent reads that replaced each other's stream would make no progress
		}
		r.stream.all.remove(r.stream)
		r.stream = nil
	}
	end := o.size
	switch {
	case off == 0:
		end = min(o.size, firstRead)
	case !sequential:
		end = min(o.size, off+max(n, randomRead))
	}
	r.next = off + n
	r.stream = m.share.streams.add(m, key, o, off, end)
	return r.stream, nil
}

func (r *reader) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.stream != nil {
		r.stream.all.remove(r.stream)
	}
}

// readDirect reads without a buffer.
func (m *mount) readDirect(ctx context.Context, key string, o object, p []byte, off int64) error {
	if err := m.store.transfers.acquire(ctx); err != nil {
		return err
	}
	defer m.store.transfers.releaseSlot()
	for attempt := 0; ; attempt++ {
		n, err := m.readOnce(ctx, key, o, p, off)
		if err == nil || attempt == maxAttempts || ctx.Err() != nil || isPermanent(err) {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
}

// readOnce sends one request, and returns how many bytes it read.
func (m *mount) readOnce(ctx context.Context, key string, o object, p []byte, off int64) (int, error) {
	body, err := m.store.get(ctx, key, o, off, int64(len(p)))
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return io.ReadFull(body, p)
}
