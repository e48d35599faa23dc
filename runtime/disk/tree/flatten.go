package tree

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// Flatten copies a disk that OpenLayers has opened to the new folder target, as one layer above the image. The files of
// the disk must not change meanwhile. The copy is not synced. After an error, the caller removes target.
func Flatten(ctx context.Context, disk *Folder, target string) error {
	return flatten(ctx, disk, target, nil)
}

// FlattenPaths is Flatten for the entries at paths of a disk that OpenMerged has opened. The copy hides everything that
// other disks have at the paths. It has the folders that contain the paths, with their attributes, and nothing else. If the
// disk does not have one of the paths, FlattenPaths returns *PathError.
func FlattenPaths(ctx context.Context, disk *Folder, target string, paths Paths) error {
	return flatten(ctx, disk, target, paths)
}

// flatten is FlattenPaths or, if paths is nil, Flatten.
func flatten(ctx context.Context, disk *Folder, target string, paths Paths) error {
	if err := os.Mkdir(target, 0o700); err != nil {
		return err
	}
	fd, err := openFolder(unix.AT_FDCWD, target)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	p := pass{Copy: New("", target), ctx: ctx, target: fd, links: map[inode]string{}}
	return p.flatten(part{Folder: disk, paths: paths, opaque: disk.Opaque()}, fd, 0)
}

// part is a folder of a disk that is to be copied.
type part struct {
	*Folder
	path string // without the slash at the beginning
	// paths are the only paths in the folder to copy; nil: all.
	paths Paths
	// whole: the folder is at one of the paths, or in such a folder.
	whole bool
	// opaque: the copy hides what other layers have in the folder.
	opaque bool
}

// entries returns the entries to copy.
func (d part) entries() ([]*Entry, error) {
	if d.paths != nil {
		return d.Named(d.paths, "/"+d.path)
	}
	return d.Entries()
}

// inner opens a folder to copy. The caller closes it.
func (d part) inner(e *Entry) (part, error) {
	f, err := d.Folder.Folder(e)
	if err != nil {
		return part{}, err
	}
	inner := part{Folder: f, path: path.Join(d.path, e.Name), whole: d.whole || d.paths != nil}
	switch {
	case d.paths != nil && len(d.paths[e.Name]) > 0: // it contains paths
		inner.paths, inner.whole = d.paths[e.Name], false
	case d.paths != nil:
		inner.opaque = true
	case !d.whole:
		inner.opaque = f.Opaque()
	}
	return inner, nil
}

// flatten copies the entries of a folder to the folder to, and then the attributes of the folder.
func (p *pass) flatten(from part, to int, depth int) error {
	if depth > maxDepth {
		return ErrTooDeep
	}
	entries, err := from.entries()
	if err != nil {
		return err
	}
	var all Group
	for _, e := range entries {
		err = all.Run(p.slots, func() error { return p.flattenEntry(from, e, to, depth) })
		if err != nil {
			break
		}
	}
	if err := cmp.Or(err, all.Wait()); err != nil { // before the caller closes the folders
		return err
	}
	if from.opaque {
		if err := descriptor(to).set("user.overlay.opaque", []byte("y")); err != nil {
			return fmt.Errorf("mark the folder %q: %w", from.path, err)
		}
	}
	if err := setFolder(to, from.Folder); err != nil {
		return fmt.Errorf("copy the folder %q: %w", from.path, err)
	}
	return nil
}

func (p *pass) flattenEntry(from part, e *Entry, to int, depth int) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if e.Kind() != unix.S_IFDIR {
		f := folder{source: from.layers[e.Layer], target: to, path: from.path, layer: e.Layer}
		if err := p.file(f, &node{name: e.Name, stamp: StampOf(&e.Stat)}); err != nil {
			return fmt.Errorf("copy %q: %w", path.Join(from.path, e.Name), err)
		}
		return nil
	}
	inner, err := from.inner(e)
	if err != nil {
		return err
	}
	defer inner.Close()
	if err := unix.Mkdirat(to, e.Name, 0o700); err != nil {
		return fmt.Errorf("create the folder %q: %w", inner.path, err)
	}
	fd, err := openFolder(to, e.Name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return p.flatten(inner, fd, depth+1)
}
