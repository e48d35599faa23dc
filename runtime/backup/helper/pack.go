package helper

import (
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/doze-run/doze/runtime/disk/tree"
)

// pack is a temporary file with the contents of captured files, one after the other.
type pack struct {
	file  *os.File // has no name
	end   atomic.Int64
	limit int64 // of end
}

// newPack returns an empty pack with at most limit bytes, whose file is in folder. The caller closes the file.
func newPack(folder string, limit int64) (*pack, error) {
	file, err := os.CreateTemp(folder, "capture-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		file.Close()
		return nil, err
	}
	return &pack{file: file, limit: limit}, nil
}

// add adds the content of a file, without its holes. It returns the error of needsSnapshot if the pack would exceed its limit. It
// is safe for concurrent use.
func (p *pack) add(f *selected, e *tree.Entry) (stored, error) {
	file, err := f.Open(e)
	if err != nil {
		return stored{}, err
	}
	defer file.Close()
	s := stored{length: e.Stat.Size}
	content := io.Reader(io.NewSectionReader(file, 0, s.length))
	extents, holes, err := f.extentsOf(file, &e.Stat)
	if err != nil {
		return stored{}, err
	}
	if holes {
		content, s.length, s.parts, s.holes = readExtents(file, extents), contentLength(extents), extents, true
	}
	s.at = p.end.Add(s.length) - s.length
	if s.at+s.length > p.limit {
		return stored{}, needsSnapshot(fmt.Sprintf("programs change files of more than %d MiB at a time", p.limit>>20))
	}
	n, err := io.Copy(io.NewOffsetWriter(p.file, s.at), content)
	if err == nil && n != s.length {
		err = io.ErrUnexpectedEOF
	}
	return s, err
}
