package tree

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// A Folder is a folder of the tree that results from merging the layers of an overlay above the image:
// https://docs.kernel.org/filesystems/overlayfs.html. Whiteouts and opaque folders in the tree delete entries of
// the image. A Folder is safe for concurrent use until it is closed.
type Folder struct {
	// layers are descriptors of the folder in each layer, highest first; the image's layers are last. A
	// descriptor is -1 if the layer does not have the folder, or if a higher layer hides the folder.
	layers []int
	above  int // number of layers above the image; OpenMerged counts the image's layers, too
	opaque bool
	// shifted is the index of the first layer of the image, and shift is added to the user and group ids of its entries.
	shifted int
	shift   uint32
}

// OpenLayers opens the root of the tree. layers are the folders of the layers above the image, and below are the
// folders of the image's layers, both highest first. The caller closes the Folder.
func OpenLayers(layers, below []string) (*Folder, error) {
	return open(layers, below, &Folder{above: len(layers), shifted: len(layers)})
}

// OpenMerged opens the root of the tree that includes the entries of the image, and has no whiteouts. The arguments are as
// for OpenLayers. shift is added to the user and group ids of the entries of the image, whose layers in
// Podman's storage do not have the ids of containers. The caller closes the Folder.
func OpenMerged(layers, below []string, shift uint32) (*Folder, error) {
	return open(layers, below, &Folder{above: len(layers) + len(below), shifted: len(layers), shift: shift})
}

// open opens the folders of f.
func open(layers, below []string, f *Folder) (*Folder, error) {
	for _, path := range slices.Concat(layers, below) {
		fd, err := openFolder(unix.AT_FDCWD, path)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		f.layers = append(f.layers, fd)
	}
	return f, nil
}

// Sync writes changes of the files in the highest layer that has the folder, and everything else on its file system,
// to the disk.
func (f *Folder) Sync() error {
	_, top, err := f.top()
	if err != nil {
		return err
	}
	if err := unix.Syncfs(top); err != nil {
		return fmt.Errorf("sync a file system: %w", err)
	}
	return nil
}

// Close releases the descriptors. It is idempotent.
func (f *Folder) Close() {
	for _, fd := range f.layers {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	f.layers = nil
}

// Entry of a Folder. Kind, owner and times are in Stat; a character device with the number 0 is a
// whiteout, which deletes what the image has under that name.
type Entry struct {
	Name string
	Stat unix.Stat_t
	// Layer is the index of the layer that has the entry. Entries of a layer with the same inode are
	// links to one file.
	Layer int
	// folders are the indexes of the layers that have this folder and are not hidden, including the image's layers.
	folders []int
	opaque  bool
}

// Kind returns the type of the entry: the bits unix.S_IFMT of its mode.
func (e *Entry) Kind() uint32 { return e.Stat.Mode & unix.S_IFMT }

// Whiteout reports whether the entry deletes an entry of the image.
func (e *Entry) Whiteout() bool { return e.Kind() == unix.S_IFCHR && e.Stat.Rdev == 0 }

// Opaque reports whether the folder hides the image's folder.
func (e *Entry) Opaque() bool { return e.opaque }

// Opaque reports whether the folder hides the image's folder.
func (f *Folder) Opaque() bool { return f.opaque }

// Stat describes the folder.
func (f *Folder) Stat() (st unix.Stat_t, err error) {
	layer, top, err := f.top()
	if err != nil {
		return st, err
	}
	err = unix.Fstat(top, &st)
	f.shiftOwner(layer, &st)
	return st, err
}

// shiftOwner converts the owner of an entry of a layer to the ids of containers.
func (f *Folder) shiftOwner(layer int, st *unix.Stat_t) {
	if layer >= f.shifted {
		st.Uid += f.shift
		st.Gid += f.shift
	}
}

// top returns the index and the descriptor of the highest layer that has the folder.
func (f *Folder) top() (layer, fd int, err error) {
	for layer, fd := range f.layers[:min(f.above, len(f.layers))] {
		if fd >= 0 {
			return layer, fd, nil
		}
	}
	return -1, -1, os.ErrClosed
}

// maxFolder limits the entries of one folder, which are in memory together, at 300 bytes each.
const maxFolder = 1 << 20

// ErrTooLarge is returned for a folder with more entries than fit into memory. Errors wrap it.
var ErrTooLarge = errors.New("has too many entries")

// Entries returns the entries of the folder, sorted by name.
func (f *Folder) Entries() ([]*Entry, error) {
	found := map[string]*Entry{}
	ended := map[string]bool{} // names whose lower layers are hidden
	for layer, fd := range f.layers[:f.above] {
		if fd < 0 {
			continue
		}
		err := eachNames(fd, func(names []string) error {
			for _, name := range names {
				if err := merge(found, ended, fd, layer, name); err != nil && !missing(err) { // running programs may have deleted it
					return err
				}
			}
			if len(found) > maxFolder {
				return fmt.Errorf("a folder %w: more than %d", ErrTooLarge, maxFolder)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	entries := make([]*Entry, 0, len(found))
	for name, e := range found {
		visible, err := f.complete(e, ended[name])
		if err != nil {
			return nil, err
		}
		if visible {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(a, b *Entry) int { return cmp.Compare(a.Name, b.Name) })
	return entries, nil
}

// Entry returns the entry of that name, or nil if the folder does not have it.
func (f *Folder) Entry(name string) (*Entry, error) {
	found := map[string]*Entry{}
	ended := map[string]bool{}
	for layer, fd := range f.layers[:f.above] {
		if fd < 0 {
			continue
		}
		if err := merge(found, ended, fd, layer, name); err != nil && !missing(err) {
			return nil, err
		}
	}
	e := found[name]
	if e == nil {
		return nil, nil
	}
	visible, err := f.complete(e, ended[name])
	if err != nil || !visible {
		return nil, err
	}
	return e, nil
}

// missing reports whether an error means that a folder cannot have, or does not have, an entry of a name.
func missing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENAMETOOLONG)
}

// complete completes an entry that merge has found in the layers above the image. ended means that the image's layers
// are hidden. complete returns false for a whiteout that deletes nothing, which an overlay would show as a file.
func (f *Folder) complete(e *Entry, ended bool) (visible bool, err error) {
	if e.Kind() == unix.S_IFDIR && !ended {
		if err := f.image(e); err != nil {
			return false, err
		}
	}
	if e.Whiteout() {
		return f.inImage(e.Name)
	}
	f.shiftOwner(e.Layer, &e.Stat)
	return true, nil
}

// Visible describes the entry of that name in the merged tree, including the image. ok is false if the tree does not
// have the entry.
func (f *Folder) Visible(name string) (st unix.Stat_t, ok bool, err error) {
	_, st, err = f.visible(name)
	if missing(err) {
		return unix.Stat_t{}, false, nil
	}
	return st, err == nil, err
}

// visible returns the descriptor of the folder in the highest layer that has the entry, which may be of the image, and
// describes the entry. If the tree does not have the entry, visible returns an error for which missing is true.
func (f *Folder) visible(name string) (fd int, st unix.Stat_t, err error) {
	for _, fd := range f.layers {
		if fd < 0 {
			continue
		}
		err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return -1, st, fmt.Errorf("inspect %q: %w", name, err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
			break
		}
		return fd, st, nil
	}
	return -1, st, unix.ENOENT
}

// ReadFile returns the content of a regular file in the merged tree, including the image. It returns nil if the tree
// does not have the file, if the entry is not a regular file, or if the file has more than limit bytes.
func (f *Folder) ReadFile(name string, limit int64) ([]byte, error) {
	folder, st, err := f.visible(name)
	if missing(err) {
		return nil, nil
	}
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > limit {
		return nil, err
	}
	file, err := openFile(folder, name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, limit))
	if err != nil {
		return nil, fmt.Errorf("read %q: %w", name, err)
	}
	return content, nil
}

// merge adds an entry of a layer to found. fd is the descriptor of the folder in that layer. The caller merges
// higher layers first.
func merge(found map[string]*Entry, ended map[string]bool, fd, layer int, name string) error {
	if ended[name] {
		return nil
	}
	now := &Entry{Name: name, Layer: layer}
	if err := unix.Fstatat(fd, name, &now.Stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("inspect %q: %w", name, err)
	}
	above := found[name]
	if now.Kind() != unix.S_IFDIR {
		ended[name] = true
		if above == nil {
			found[name] = now
		} else { // a folder that replaced another kind of entry
			above.opaque = true
		}
		return nil
	}
	if above == nil {
		above = now
		found[name] = now
	}
	above.folders = append(above.folders, layer)
	inner, err := openFolder(fd, name)
	if err != nil {
		return fmt.Errorf("open %q: %w", name, err)
	}
	defer unix.Close(inner)
	hidden, err := hides(inner)
	if err != nil {
		return fmt.Errorf("inspect %q: %w", name, err)
	}
	if hidden {
		above.opaque, ended[name] = true, true
	}
	return nil
}

// image adds the image's layers that have the folder e and are not hidden to e.folders. If the image has another
// kind of entry with that name, image makes e opaque.
func (f *Folder) image(e *Entry) error {
	for layer := f.above; layer < len(f.layers); layer++ {
		if f.layers[layer] < 0 {
			continue
		}
		inner, err := openFolder(f.layers[layer], e.Name)
		if err == unix.ENOENT {
			continue
		}
		if err == unix.ENOTDIR || err == unix.ELOOP { // another kind of entry hides the layers below it
			if e.folders[len(e.folders)-1] < f.above {
				e.opaque = true
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("open %q in the image: %w", e.Name, err)
		}
		hidden, err := hides(inner)
		unix.Close(inner)
		if err != nil {
			return fmt.Errorf("inspect %q in the image: %w", e.Name, err)
		}
		e.folders = append(e.folders, layer)
		if hidden {
			return nil
		}
	}
	return nil
}

// inImage reports whether a layer of the image has an entry of this name in the folder, or deletes one.
func (f *Folder) inImage(name string) (bool, error) {
	for _, fd := range f.layers[f.above:] {
		if fd < 0 {
			continue
		}
		var st unix.Stat_t
		err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil {
			return true, nil
		}
		if err != unix.ENOENT {
			return false, fmt.Errorf("inspect %q in the image: %w", name, err)
		}
	}
	return false, nil
}

// Folder opens the folder of an entry. The caller closes it.
func (f *Folder) Folder(e *Entry) (*Folder, error) {
	inner := &Folder{layers: slices.Repeat([]int{-1}, len(f.layers)), above: f.above, opaque: e.opaque, shifted: f.shifted, shift: f.shift}
	for _, layer := range e.folders {
		fd, err := openFolder(f.layers[layer], e.Name)
		if err != nil {
			inner.Close()
			return nil, fmt.Errorf("open %q: %w", e.Name, err)
		}
		inner.layers[layer] = fd
	}
	return inner, nil
}

// Open opens a file. The caller closes it.
func (f *Folder) Open(e *Entry) (*os.File, error) { return openFile(f.layers[e.Layer], e.Name) }

func openFile(folder int, name string) (*os.File, error) {
	fd, err := retry(func() (int, error) {
		return unix.Openat(folder, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Readlink returns the target of a symbolic link.
func (f *Folder) Readlink(e *Entry) (string, error) {
	target := make([]byte, e.Stat.Size+1)
	n, err := unix.Readlinkat(f.layers[e.Layer], e.Name, target)
	if err != nil {
		return "", fmt.Errorf("read the link %q: %w", e.Name, err)
	}
	return string(target[:n]), nil
}

// Attributes returns the extended attributes of an entry, except overlay attributes.
func (f *Folder) Attributes(e *Entry) (map[string][]byte, error) {
	fd := f.layers[e.Layer]
	values, err := ownAttributes(inFolder(fd, e.Name))
	if err != nil {
		return nil, fmt.Errorf("%q: %w", e.Name, err)
	}
	return values, nil
}

// RootAttributes returns the extended attributes of the folder itself, except overlay attributes.
func (f *Folder) RootAttributes() (map[string][]byte, error) {
	_, top, err := f.top()
	if err != nil {
		return nil, err
	}
	return ownAttributes(descriptor(top))
}

// overlayAttribute reports whether an overlay has set the attribute. Overlays store the attributes that
// programs set under such a name with the prefix overlay.overlay.
func overlayAttribute(name string) bool {
	_, rest, _ := strings.Cut(name, ".")
	return (strings.HasPrefix(name, "user.") || strings.HasPrefix(name, "trusted.")) && strings.HasPrefix(rest, "overlay.") && !strings.HasPrefix(rest, "overlay.overlay.")
}

func ownAttributes(of attributed) (map[string][]byte, error) {
	names, err := attributesOf(of)
	if err != nil {
		return nil, err
	}
	var values map[string][]byte
	for _, name := range names {
		if overlayAttribute(name) {
			continue
		}
		value, err := sized(nil, func(value []byte) (int, error) { return of.get(name, value) })
		if err != nil {
			return nil, fmt.Errorf("read the extended attribute %s: %w", name, err)
		}
		if values == nil {
			values = map[string][]byte{}
		}
		values[name] = value
	}
	return values, nil
}

// Extent is a part of a file that is not a hole.
type Extent struct {
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// maxExtents limits the extents of a file. Extents reports a file with more as one without holes.
const maxExtents = 1 << 16

// Extents returns the extents of a file, and whether it has holes.
func Extents(file *os.File, size int64) (extents []Extent, holes bool, err error) {
	for at := int64(0); at < size; {
		start, err := file.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // a hole until the end
			break
		}
		if err != nil {
			return nil, false, fmt.Errorf("find the holes of a file: %w", err)
		}
		end, err := file.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return nil, false, fmt.Errorf("find the holes of a file: %w", err)
		}
		end = min(end, size)
		if start >= size || len(extents) == maxExtents {
			break
		}
		extents = append(extents, Extent{start, end - start})
		at = end
	}
	whole := len(extents) == 1 && extents[0] == Extent{0, size}
	if size == 0 || whole {
		return extents, false, nil
	}
	if len(extents) == maxExtents {
		return []Extent{{0, size}}, false, nil
	}
	return extents, true, nil
}
