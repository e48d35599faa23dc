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
	if err := os.Mkdir(target, 0o700); err != nil {
		return err
	}
	fd, err := openFolder(unix.AT_FDCWD, target)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	p := pass{Copy: New("", target), ctx: ctx, target: fd, links: map[uint64]string{}}
	return p.flatten(disk, fd, "", 0)
}

// flatten copies the entries of a folder, whose path is at, to the folder to, and then the attributes of the folder.
func (p *pass) flatten(from *Folder, to int, at string, depth int) error {
	if depth > maxDepth {
		return ErrTooDeep
	}
	entries, err := from.Entries()
	if err != nil {
		return err
	}
	var all Group
	for _, e := range entries {
		err = all.Run(p.slots, func() error { return p.flattenEntry(from, e, to, at, depth) })
		if err != nil {
			break
		}
	}
	if err := cmp.Or(err, all.Wait()); err != nil { // before the caller closes the folders
		return err
	}
	if from.Opaque() {
		if err := descriptor(to).set("user.overlay.opaque", []byte("y")); err != nil {
			return fmt.Errorf("mark the folder %q: %w", at, err)
		}
	}
	if err := setFolder(to, from); err != nil {
		return fmt.Errorf("copy the folder %q: %w", at, err)
	}
	return nil
}

func (p *pass) flattenEntry(from *Folder, e *Entry, to int, at string, depth int) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if e.Kind() != unix.S_IFDIR {
		f := folder{source: from.layers[e.Layer], target: to, path: at}
		if err := p.file(f, &node{name: e.Name, stamp: StampOf(&e.Stat)}); err != nil {
			return fmt.Errorf("copy %q: %w", path.Join(at, e.Name), err)
		}
		return nil
	}
	inner, err := from.Folder(e)
	if err != nil {
		return err
	}
	defer inner.Close()
	if err := unix.Mkdirat(to, e.Name, 0o700); err != nil {
		return fmt.Errorf("create the folder %q: %w", path.Join(at, e.Name), err)
	}
	fd, err := openFolder(to, e.Name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return p.flatten(inner, fd, path.Join(at, e.Name), depth+1)
}
