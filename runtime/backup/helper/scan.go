package helper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

const (
	// maxDepth limits the levels of folders.
	maxDepth = 1000
	// maxPaths limits the paths in memory, in bytes, for links and for folders each. A restore has the paths
	// of all folders in memory, too.
	maxPaths = 256 << 20
	// maxOpen limits the entries in memory, which take 300 bytes each.
	maxOpen = 2 << 20
	// maxZeros limits the holes of a file that are read as zeros, in bytes.
	maxZeros = 1 << 30
	// maxLinks limits the files with several hard links. Their paths are in memory.
	maxLinks = 1 << 20
)

// inode of a file in a layer.
type inode struct {
	layer int
	ino   uint64
}

func inodeOf(e *tree.Entry) inode { return inode{e.Layer, e.Stat.Ino} }

// scanner counts the entries and bytes of a disk, and collects the details that Kopia does not store.
type scanner struct {
	ctx     context.Context
	usage   wire.Usage
	links   map[inode]string // first paths of files with several hard links
	linked  int              // bytes of these paths
	folders int              // bytes of the paths of all folders
	open    int              // entries of the folder that is read, and of all folders above it
	details bytes.Buffer
}

func (s *scanner) run(disk source) error {
	st, err := disk.Stat()
	if err != nil {
		return err
	}
	d := detail{Opaque: disk.Opaque()}
	if d.Attributes, err = disk.RootAttributes(); err != nil {
		return err
	}
	s.usage.Entries++
	if err := s.add(&d, st.Mtim); err != nil {
		return err
	}
	return s.folder(disk, "", 0)
}

// add appends d to the details unless d is empty. d includes the time modified if Kopia cannot store that time.
func (s *scanner) add(d *detail, modified unix.Timespec) error {
	if !storable(modified) && d.Node == nil {
		d.Modified = &modified
	}
	if d.empty() {
		return nil
	}
	if err := json.NewEncoder(&s.details).Encode(d); err != nil {
		return err
	}
	if s.details.Len() > maxDetails {
		return unsupported(d.Path, fmt.Sprintf("cannot be backed up: extended attributes, links and special files take more than %d MiB", maxDetails>>20))
	}
	return nil
}

func (s *scanner) folder(f source, at string, depth int) error {
	if depth > maxDepth {
		return unsupported(at, fmt.Sprintf("cannot be backed up: %v", tree.ErrTooDeep))
	}
	entries, err := f.Entries()
	if errors.Is(err, tree.ErrTooLarge) {
		return unsupported(at, "cannot be backed up: the folder has too many entries")
	}
	if err != nil {
		return err
	}
	s.folders += len(at)
	s.open += len(entries)
	defer func() { s.open -= len(entries) }()
	if s.folders > maxPaths || s.open > maxOpen {
		return unsupported(at, fmt.Sprintf("cannot be backed up: the paths of all folders take more than %d MiB, or nested folders have more than %d entries", maxPaths>>20, maxOpen))
	}
	for _, e := range entries {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		if err := s.entry(f, e, path.Join(at, encodeName(e.Name)), depth); err != nil {
			return err
		}
	}
	return nil
}

func (s *scanner) entry(f source, e *tree.Entry, at string, depth int) (err error) {
	s.usage.Entries++
	d := detail{Path: at, Opaque: f.opaque(e)}
	if e.Kind() != unix.S_IFDIR && e.Stat.Nlink > 1 && !e.Whiteout() { // overlays may link whiteouts to each other
		if first, ok := s.links[inodeOf(e)]; ok {
			d.Link = first
			return s.add(&d, unix.Timespec{})
		}
		s.linked += len(at)
		if len(s.links) == maxLinks || s.linked > maxPaths {
			return unsupported(at, fmt.Sprintf("cannot be backed up: more than %d files have several links, or their paths take more than %d MiB", maxLinks, maxPaths>>20))
		}
		s.links[inodeOf(e)] = at
	}
	if !e.Whiteout() {
		if d.Attributes, err = f.Attributes(e); err != nil {
			return err
		}
	}
	switch e.Kind() {
	case unix.S_IFREG:
		s.usage.Bytes += e.Stat.Size
		if e.Stat.Blocks*512 < e.Stat.Size {
			if err := s.holes(f, e, &d); err != nil {
				return err
			}
		}
	case unix.S_IFDIR:
		if err := s.add(&d, e.Stat.Mtim); err != nil {
			return err
		}
		inner, err := f.inner(e)
		if err != nil {
			return err
		}
		defer inner.Close()
		return s.folder(inner, at, depth+1)
	case unix.S_IFLNK:
	default:
		d.Node = &node{Mode: e.Stat.Mode, UID: e.Stat.Uid, GID: e.Stat.Gid, Device: e.Stat.Rdev, Modified: e.Stat.Mtim}
	}
	return s.add(&d, e.Stat.Mtim)
}

// holes adds the extents of a file with holes to d. It subtracts the holes from s.usage, which includes them.
func (s *scanner) holes(f source, e *tree.Entry, d *detail) error {
	extents, holes, err := f.extents(e)
	if err != nil || !holes {
		return err
	}
	d.Size, d.Extents = e.Stat.Size, extents
	s.usage.Bytes += contentLength(extents) - e.Stat.Size
	return nil
}

func contentLength(extents []tree.Extent) (n int64) {
	for _, x := range extents {
		n += x.Length
	}
	return n
}
