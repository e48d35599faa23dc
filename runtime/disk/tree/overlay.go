package tree

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Paths are paths of files and folders as a tree: the names of the entries of a folder, each with the paths in it. An entry
// without inner paths is a path itself. No path is inside another.
type Paths map[string]Paths

// NewPaths returns absolute paths as a tree.
func NewPaths(list []string) Paths {
	all := Paths{}
	for _, p := range list {
		at := all
		for name := range strings.SplitSeq(strings.TrimPrefix(p, "/"), "/") {
			if at[name] == nil {
				at[name] = Paths{}
			}
			at = at[name]
		}
	}
	return all
}

// PathError means that a disk does not have a path, because an entry of the path is missing or is not a folder.
type PathError struct {
	Path   string // of that entry
	Reason string // such as "does not exist"
}

func (e *PathError) Error() string { return strconv.Quote(e.Path) + " " + e.Reason }

// Check returns *PathError if a disk does not have one of the paths.
func (p Paths) Check(disk *Folder) error { return p.checkIn(disk, "/") }

// checkIn is Check for the paths in the folder with the path at.
func (p Paths) checkIn(f *Folder, at string) error {
	entries, err := f.Named(p, at)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if len(p[e.Name]) == 0 {
			continue
		}
		inner, err := f.Folder(e)
		if err != nil {
			return err
		}
		err = p[e.Name].checkIn(inner, path.Join(at, e.Name))
		inner.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// Named returns the entries of the folder that are paths or contain paths, sorted by name. at is the path of the folder. If
// the folder does not have one of the entries, or an entry that is to contain paths is not a folder, Named returns *PathError.
func (f *Folder) Named(paths Paths, at string) ([]*Entry, error) {
	entries := make([]*Entry, 0, len(paths))
	for _, name := range slices.Sorted(maps.Keys(paths)) {
		e, err := f.Entry(name)
		if err != nil {
			return nil, err
		}
		inPath := path.Join(at, name)
		switch {
		case e == nil:
			return nil, &PathError{inPath, "does not exist"}
		case len(paths[name]) > 0 && e.Kind() == unix.S_IFLNK:
			return nil, &PathError{inPath, "is a symbolic link, and not the folder of a path"}
		case len(paths[name]) > 0 && e.Kind() != unix.S_IFDIR:
			return nil, &PathError{inPath, "is not a folder"}
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// ErrNotFolder is returned by Overlay for a path below an entry that is not a folder. Errors wrap it.
var ErrNotFolder = errors.New("is not a folder")

// Overlay prepares the folder layer, which has entries at paths, as a layer above the disk below. The layer then replaces
// the entries at the paths, and nothing else: the folders that contain the paths get the attributes that they have on
// that disk. If a folder that contains a path is another kind of entry on that disk, Overlay returns ErrNotFolder, and
// the layer is not usable.
func Overlay(layer string, below *Folder, paths Paths) error {
	fd, err := openFolder(unix.AT_FDCWD, layer)
	if err != nil {
		return fmt.Errorf("open %s: %w", layer, err)
	}
	defer unix.Close(fd)
	return overlay(fd, below, paths, "/")
}

// overlay is Overlay for the folder with the path at.
func overlay(fd int, below *Folder, paths Paths, at string) error {
	for name, inner := range paths {
		if len(inner) == 0 {
			continue
		}
		if err := overlayInner(fd, below, name, inner, path.Join(at, name)); err != nil {
			return err
		}
	}
	if err := setFolder(fd, below); err != nil {
		return fmt.Errorf("prepare the folder %q: %w", at, err)
	}
	return nil
}

// overlayInner is Overlay for the folder of that name in the folder fd.
func overlayInner(fd int, below *Folder, name string, paths Paths, at string) error {
	e, err := below.Entry(name)
	if err != nil || e == nil { // the layer adds the folder
		return err
	}
	if e.Kind() != unix.S_IFDIR {
		return fmt.Errorf("%q %w", at, ErrNotFolder)
	}
	lower, err := below.Folder(e)
	if err != nil {
		return err
	}
	defer lower.Close()
	inner, err := openFolder(fd, name)
	if err != nil {
		return fmt.Errorf("open the new %q: %w", at, err)
	}
	defer unix.Close(inner)
	return overlay(inner, lower, paths, at)
}

// setFolder copies owner, mode, extended attributes and times of another folder to the open folder fd. It
// keeps the overlay attributes of both.
func setFolder(fd int, of *Folder) error {
	st, err := of.Stat()
	if err != nil {
		return err
	}
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
		return fmt.Errorf("set the owner: %w", err)
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return fmt.Errorf("set the mode: %w", err)
	}
	wanted, err := of.RootAttributes()
	if err != nil {
		return err
	}
	present, err := ownAttributes(descriptor(fd))
	if err != nil {
		return err
	}
	for name := range present {
		if _, ok := wanted[name]; ok {
			continue
		}
		if err := descriptor(fd).remove(name); err != nil {
			return fmt.Errorf("remove the extended attribute %s: %w", name, err)
		}
	}
	for name, value := range wanted {
		if err := descriptor(fd).set(name, value); err != nil {
			return fmt.Errorf("set the extended attribute %s: %w", name, err)
		}
	}
	return setTimes(fd, StampOf(&st))
}
