package tree

import (
	"archive/tar"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrUnpackable means that an image layer cannot represent a file. It is wrapped, with the path.
var ErrUnpackable = errors.New("cannot be in an image")

const (
	// maxPacked limits the total size of a tree's files, including holes: a layer stores holes as
	// zeros, and a sparse file can be up to 8 EiB.
	maxPacked = 256 << 30
	// maxPackNames bounds the memory for names: of the entries of folders that are being packed, and
	// of files with several links.
	maxPackNames = 128 << 20
	// nameOverhead is what a name takes besides its bytes.
	nameOverhead = 64
)

// Names and prefix of the entries that mark deletions in a layer:
// https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// Pack writes the tree at path, the upper folder of an overlay, as a layer of an OCI image. Entries
// are sorted by name, so that each call writes the same bytes. owner maps the owner of a file to the
// owner of its entry.
//
// The layer omits sockets, access control lists and access times, and stores holes as zeros.
func Pack(ctx context.Context, w io.Writer, path string, owner func(uid, gid uint32) (int, int)) error {
	fd, err := openFolder(unix.AT_FDCWD, path)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	p := packer{ctx: ctx, tar: tar.NewWriter(w), owner: owner, links: map[uint64]string{}}
	if err := p.folder(fd, ".", 0); err != nil {
		return err
	}
	return p.tar.Close()
}

type packer struct {
	ctx   context.Context
	tar   *tar.Writer
	owner func(uid, gid uint32) (int, int)
	bytes int64             // of files so far
	links map[uint64]string // inode → first name
	names int               // bytes of names in memory, at most maxPackNames
}

func (p *packer) folder(fd int, at string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%q %w: %w", at, ErrUnpackable, ErrTooDeep)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if err := p.write(at+"/", &st, tar.Header{Typeflag: tar.TypeDir}, descriptor(fd)); err != nil {
		return err
	}
	hidden, err := hides(fd)
	if err != nil {
		return fmt.Errorf("pack %q: %w", at, err)
	}
	if hidden {
		if err := p.mark(path.Join(at, opaque)); err != nil {
			return err
		}
	}
	held := 0
	defer func() { p.names -= held }()
	var names []string
	err = eachNames(fd, func(some []string) error {
		for _, name := range some {
			held += len(name) + nameOverhead
			if err := p.hold(name, at); err != nil {
				return err
			}
		}
		names = append(names, some...)
		return nil
	})
	if err != nil && !errors.Is(err, ErrUnpackable) {
		err = fmt.Errorf("read %q: %w", at, err)
	}
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		if err := p.entry(fd, name, path.Join(at, name), depth); err != nil {
			return err
		}
	}
	return nil
}

// hold counts a name that stays in memory.
func (p *packer) hold(name, at string) error {
	if p.names += len(name) + nameOverhead; p.names > maxPackNames {
		return fmt.Errorf("%q %w: the names of files in nested folders, and of files with several links, take more than %d MiB", at, ErrUnpackable, maxPackNames>>20)
	}
	return nil
}

// hides reports whether a folder is opaque, so that it hides the folder below it.
func hides(fd int) (bool, error) {
	for _, prefix := range []string{"user.", "trusted."} {
		value, err := sized(nil, func(value []byte) (int, error) { return descriptor(fd).get(prefix+"overlay.opaque", value) })
		if err == nil && string(value) == "y" {
			return true, nil
		}
		if err != nil && err != unix.ENODATA && err != unix.ENOTSUP {
			return false, fmt.Errorf("read an extended attribute: %w", err)
		}
	}
	return false, nil
}

// mark writes an entry that marks a deletion.
func (p *packer) mark(name string) error {
	return p.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, ModTime: time.Unix(0, 0), Format: tar.FormatPAX})
}

func (p *packer) entry(folder int, name, at string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(folder, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("inspect %q: %w", at, err)
	}
	if strings.HasPrefix(name, whiteout) {
		return fmt.Errorf("%q %w: names that begin with %s mark deleted files in an image", at, ErrUnpackable, whiteout)
	}
	kind := st.Mode & unix.S_IFMT
	switch kind {
	case unix.S_IFDIR:
		fd, err := openFolder(folder, name)
		if err != nil {
			return fmt.Errorf("open %q: %w", at, err)
		}
		defer unix.Close(fd)
		return p.folder(fd, at, depth+1)
	case unix.S_IFCHR:
		if st.Rdev == 0 {
			return p.mark(path.Join(path.Dir(at), whiteout+name))
		}
	case unix.S_IFSOCK:
		return nil
	}
	if st.Nlink > 1 {
		if first, ok := p.links[st.Ino]; ok {
			return p.write(at, &st, tar.Header{Typeflag: tar.TypeLink, Linkname: first}, nil)
		}
		if err := p.hold(at, at); err != nil {
			return err
		}
		p.links[st.Ino] = at
	}
	attributes := inFolder(folder, name)
	switch kind {
	case unix.S_IFREG:
		return p.file(folder, name, at)
	case unix.S_IFLNK:
		target := make([]byte, st.Size+1)
		n, err := unix.Readlinkat(folder, name, target)
		if err != nil {
			return fmt.Errorf("read the link %q: %w", at, err)
		}
		return p.write(at, &st, tar.Header{Typeflag: tar.TypeSymlink, Linkname: string(target[:n])}, attributes)
	case unix.S_IFIFO:
		return p.write(at, &st, tar.Header{Typeflag: tar.TypeFifo}, attributes)
	}
	return fmt.Errorf("%q %w: it is a device", at, ErrUnpackable)
}

func (p *packer) file(folder int, name, at string) error {
	fd, err := retry(func() (int, error) {
		return unix.Openat(folder, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return fmt.Errorf("open %q: %w", at, err)
	}
	file := os.NewFile(uintptr(fd), at)
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%q: %w", at, errReplaced)
	}
	if st.Size > maxPacked-p.bytes {
		return fmt.Errorf("%q %w: the total size of all files, including holes, exceeds %d GiB", at, ErrUnpackable, maxPacked>>30)
	}
	p.bytes += st.Size
	if err := p.write(at, &st, tar.Header{Typeflag: tar.TypeReg, Size: st.Size}, descriptor(fd)); err != nil {
		return err
	}
	if _, err := io.CopyN(p.tar, file, st.Size); err != nil {
		return fmt.Errorf("pack %q: %w", at, err)
	}
	return nil
}

// write writes the header of an entry. A link has no attributes of its own.
func (p *packer) write(name string, st *unix.Stat_t, h tar.Header, attributes attributed) error {
	h.Name, h.Format = name, tar.FormatPAX
	h.Mode, h.ModTime = int64(st.Mode&0o7777), time.Unix(st.Mtim.Unix())
	h.Uid, h.Gid = p.owner(st.Uid, st.Gid)
	if attributes != nil {
		records, err := p.records(attributes)
		if err != nil {
			return fmt.Errorf("pack %q: %w", name, err)
		}
		h.PAXRecords = records
	}
	if err := p.tar.WriteHeader(&h); errors.Is(err, tar.ErrFieldTooLong) {
		return fmt.Errorf("%q %w: its extended attributes are too large", name, ErrUnpackable)
	} else if err != nil {
		return fmt.Errorf("pack %q: %w", name, err)
	}
	return nil
}

const (
	userAttribute = "user."
	capabilities  = "security.capability"
	// attributeRecord is the prefix of the records of extended attributes:
	// https://github.com/opencontainers/image-spec/blob/main/layer.md#file-attributes
	attributeRecord = "SCHILY.xattr."
)

// records returns the extended attributes to store in a layer: user attributes and file capabilities.
// It omits access control lists, because no importer translates the user ids in them.
func (p *packer) records(e attributed) (map[string]string, error) {
	names, err := attributesOf(e)
	if err != nil {
		return nil, err
	}
	var records map[string]string
	for _, name := range names {
		if name != capabilities && !strings.HasPrefix(name, userAttribute) || strings.HasPrefix(name, userAttribute+"overlay.") {
			continue
		}
		value, err := sized(nil, func(value []byte) (int, error) { return e.get(name, value) })
		if err != nil {
			return nil, fmt.Errorf("read the extended attribute %s: %w", name, err)
		}
		if name == capabilities {
			if value = p.capabilities(value); value == nil {
				continue
			}
		}
		if strings.Contains(name, "=") {
			return nil, fmt.Errorf("the extended attribute %q %w: its name contains =", name, ErrUnpackable)
		}
		if records == nil {
			records = map[string]string{}
		}
		records[attributeRecord+name] = string(value)
	}
	return records, nil
}

const (
	// Of struct vfs_ns_cap_data in linux/capability.h.
	capabilitiesRevision = 0xff000000
	capabilities2        = 0x02000000
	capabilities3        = 0x03000000
	capabilities3Size    = 24
)

// capabilities returns file capabilities without the user namespace that they apply to, as an image
// stores them. It returns nil for a user namespace other than the container's.
func (p *packer) capabilities(value []byte) []byte {
	if len(value) != capabilities3Size {
		return value
	}
	magic := binary.LittleEndian.Uint32(value)
	if magic&capabilitiesRevision != capabilities3 {
		return value
	}
	root := binary.LittleEndian.Uint32(value[capabilities3Size-4:])
	if uid, _ := p.owner(root, 0); uid != 0 {
		return nil
	}
	short := slices.Clone(value[:capabilities3Size-4])
	binary.LittleEndian.PutUint32(short, magic&^capabilitiesRevision|capabilities2)
	return short
}
