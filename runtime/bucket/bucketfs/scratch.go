package bucketfs

import (
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// createScratch returns a new empty file.
func (s *Share) createScratch() (*scratchFile, error) {
	fd, err := unix.Open(s.scratch, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return &scratchFile{space: s.space, f: os.NewFile(uintptr(fd), s.scratch)}, nil
	}
	f, err := os.CreateTemp(s.scratch, "bucketfs-") // a file system without O_TMPFILE
	if err != nil {
		return nil, fmt.Errorf("create scratch file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("create scratch file: %w", err)
	}
	return &scratchFile{space: s.space, f: f}, nil
}

// scratchFile is an unlinked file of the scratch folder, for a file that is being written. Its size counts against the
// quota, holes included: they are uploaded. Its methods other than ReadAt must not be called concurrently.
type scratchFile struct {
	space *quota
	f     *os.File
	size  int64
}

// ReadAt implements io.ReaderAt, but reads zeros beyond the end of the file.
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
	if !s.space.acquire(reserved) {
		return 0, syscall.ENOSPC
	}
	n, err := s.f.WriteAt(p, off)
	var grown int64
	if n > 0 {
		grown = max(off+int64(n)-s.size, 0)
	}
	s.size += grown
	s.space.free(reserved - grown)
	return n, err
}

// truncate sets the size.
func (s *scratchFile) truncate(size int64) error {
	grown := max(size-s.size, 0)
	if !s.space.acquire(grown) {
		return syscall.ENOSPC
	}
	if err := s.f.Truncate(size); err != nil {
		s.space.free(grown)
		return err
	}
	s.space.free(max(s.size-size, 0))
	s.size = size
	return nil
}

// close frees the file.
func (s *scratchFile) close() {
	s.space.free(s.size)
	s.f.Close()
}
