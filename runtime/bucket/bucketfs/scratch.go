package bucketfs

import (
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Scratch is a folder for files that are being written, with a limit of their total size. It is
// safe for concurrent use.
type Scratch struct {
	dir   string
	limit int64

	mu   sync.Mutex
	used int64
}

// NewScratch returns the scratch folder dir, which must exist. limit is in bytes. Files have no
// name in the folder, so that a crash leaves none.
func NewScratch(dir string, limit int64) *Scratch { return &Scratch{dir: dir, limit: limit} }

// Used returns the total size of the files.
func (s *Scratch) Used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

// reserve adds n bytes to the total size, or returns ENOSPC. A negative n releases bytes.
func (s *Scratch) reserve(n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > 0 && n > s.limit-s.used {
		return syscall.ENOSPC
	}
	s.used += n
	return nil
}

// create returns a new empty file.
func (s *Scratch) create() (*scratchFile, error) {
	if s == nil {
		return nil, syscall.EROFS
	}
	fd, err := unix.Open(s.dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return &scratchFile{scratch: s, f: os.NewFile(uintptr(fd), s.dir)}, nil
	}
	f, err := os.CreateTemp(s.dir, "bucketfs-") // a file system without O_TMPFILE
	if err != nil {
		return nil, fmt.Errorf("create scratch file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("create scratch file: %w", err)
	}
	return &scratchFile{scratch: s, f: f}, nil
}

// scratchFile is an unlinked file whose size counts against the limit, holes included: they are
// uploaded. Its methods other than readAt must not be called concurrently.
type scratchFile struct {
	scratch *Scratch
	f       *os.File
	size    int64
}

// readAt reads like io.ReaderAt, but zeros beyond the end.
func (s *scratchFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := s.f.ReadAt(p, off)
	if err == io.EOF {
		clear(p[n:])
		return len(p), nil
	}
	return n, err
}

// writeAt extends the file as necessary, but not beyond the bytes that it has written.
func (s *scratchFile) writeAt(p []byte, off int64) (int, error) {
	reserved := max(off+int64(len(p))-s.size, 0)
	if err := s.scratch.reserve(reserved); err != nil {
		return 0, err
	}
	n, err := s.f.WriteAt(p, off)
	var grown int64
	if n > 0 {
		grown = max(off+int64(n)-s.size, 0)
	}
	s.size += grown
	_ = s.scratch.reserve(grown - reserved) // a negative number: it succeeds
	return n, err
}

// truncate sets the size.
func (s *scratchFile) truncate(size int64) error {
	if err := s.scratch.reserve(size - s.size); err != nil {
		return err
	}
	if err := s.f.Truncate(size); err != nil {
		_ = s.scratch.reserve(s.size - size) // undo
		return err
	}
	s.size = size
	return nil
}

// close frees the file.
func (s *scratchFile) close() {
	_ = s.scratch.reserve(-s.size)
	s.f.Close()
}
