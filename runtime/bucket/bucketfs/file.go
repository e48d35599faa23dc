package bucketfs

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// file is the state that the handles of an open file share. At first it is an object of the bucket. The
// first change makes it local: its content is in a scratch file until the last handle is released.
type file struct {
	// busy is a lock, held during uploads, downloads and changes of the name.
	busy chan struct{}

	mu       sync.Mutex
	handles  int
	closing  int    // handles that are being released
	base     object // the object in the bucket
	stored   bool   // base exists
	tried    bool   // an upload may have created the object
	scratch  *scratchFile
	mtime    time.Time // of scratch
	written  uint64    // count of changes
	uploaded uint64    // written of the last upload
	removed  bool      // unlinked, or replaced by another file
}

func newFile() *file { return &file{busy: make(chan struct{}, 1)} }

// lock acquires busy, or returns the cause of ctx's end. unlock releases it.
func (f *file) lock(ctx context.Context) error {
	select {
	case f.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (f *file) unlock() { <-f.busy }

// isLocal reports whether the content is in a scratch file.
func (f *file) isLocal() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.scratch != nil
}

// isDirty reports whether the bucket lacks changes of a file that has a name.
func (f *file) isDirty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dirty()
}

// dirty is isDirty for callers that hold f.mu.
func (f *file) dirty() bool { return f.written != f.uploaded && !f.removed }

// etag returns the ETag of the object in the bucket.
func (f *file) etag() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.base.etag
}

// attributes returns the size and the time of the last change.
func (f *file) attributes() (size int64, mtime time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.scratch != nil {
		return f.scratch.size, f.mtime
	}
	return f.base.size, f.base.mtime
}

// content returns the scratch file, or nil and the object.
func (f *file) content() (*scratchFile, object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.scratch, f.base
}

// setScratch makes the file local. The caller holds f.mu.
func (f *file) setScratch(s *scratchFile) { f.scratch, f.mtime = s, f.base.mtime }

// change records a change. The caller holds f.mu.
func (f *file) change() {
	f.written++
	f.mtime = time.Now().Truncate(time.Second) // as the object store will report it
}

// remove marks the file as unlinked.
func (f *file) remove() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removed = true
}

// discard frees the scratch file.
func (f *file) discard(log *slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dirty() {
		log.Warn("discarded changes of a file that were not uploaded", "size", f.scratch.size)
	}
	if f.scratch != nil {
		f.scratch.close()
		f.scratch = nil
	}
}
