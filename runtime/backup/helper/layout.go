package helper

import (
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

// A backup is a Kopia snapshot. Its root contains:
//
//	disk       the folders, files and symbolic links of the disk above its image. Files are stored without
//	           holes. Of several hard links to a file, only the first is stored
//	details    a line of JSON, a detail, for each entry that disk does not describe completely
const (
	diskName    = "disk"
	detailsName = "details"
)

// detail describes the properties of an entry that Kopia does not store.
type detail struct {
	// Path from the root of the disk with encoded names; empty: the root itself.
	Path string `json:"path"`
	// Attributes are the extended attributes.
	Attributes map[string][]byte `json:"attributes,omitempty"`
	// Opaque: the folder hides the image's folder.
	Opaque bool `json:"opaque,omitempty"`
	// Link is the path of another name of the file.
	Link string `json:"link,omitempty"`
	// Size and Extents of a file with holes.
	Size    int64         `json:"size,omitempty"`
	Extents []tree.Extent `json:"extents,omitempty"`
	// Node describes an entry that is not in disk: a device, pipe, socket, or whiteout. A whiteout is a
	// character device with the number 0, which deletes an entry of the image.
	Node *node `json:"node,omitempty"`
	// Modified is the time of the last modification if Kopia cannot store it: before 1678 or after 2262.
	Modified *unix.Timespec `json:"modified,omitempty"`
}

// empty reports whether there is nothing to store.
func (d *detail) empty() bool {
	return len(d.Attributes) == 0 && !d.Opaque && d.Link == "" && d.Size == 0 && d.Node == nil && d.Modified == nil
}

type node struct {
	Mode     uint32        `json:"mode"`
	UID      uint32        `json:"uid"`
	GID      uint32        `json:"gid"`
	Device   uint64        `json:"device,omitempty"`
	Modified unix.Timespec `json:"modified"`
}

// maxDetails is the maximum size of the details of a backup, in bytes of JSON. The details are in memory.
const maxDetails = 256 << 20

// unsupported returns the error for an entry that a backup cannot represent.
func unsupported(path, why string) error {
	return &wire.Error{Code: wire.Unsupported, Message: fmt.Sprintf("%q %s", path, why)}
}

// encodedPrefix is the prefix of all encoded names. Names that already begin with it are encoded.
const encodedPrefix = "doze-encoded-"

// encodeName returns the name of an entry in the repository. Names in the repository are UTF-8.
func encodeName(name string) string {
	if utf8.ValidString(name) && !strings.HasPrefix(name, encodedPrefix) {
		return name
	}
	return encodedPrefix + hex.EncodeToString([]byte(name))
}

// decodeName reverses encodeName. It returns an error for an invalid file name.
func decodeName(name string) (string, error) {
	if encoded, ok := strings.CutPrefix(name, encodedPrefix); ok {
		decoded, err := hex.DecodeString(encoded)
		if err != nil {
			return "", damaged(fmt.Errorf("decode the name %q: %w", name, err))
		}
		name = string(decoded)
	}
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return "", damaged(fmt.Errorf("%q is not a valid file name", name))
	}
	return name, nil
}

// modeOf converts permission bits of a file to an os.FileMode, which Kopia stores.
func modeOf(mode uint32) os.FileMode {
	m := os.FileMode(mode & 0o777)
	for _, bit := range modeBits {
		if mode&bit.unix != 0 {
			m |= bit.os
		}
	}
	return m
}

// permissionsOf reverses modeOf.
func permissionsOf(m os.FileMode) uint32 {
	mode := uint32(m.Perm())
	for _, bit := range modeBits {
		if m&bit.os != 0 {
			mode |= bit.unix
		}
	}
	return mode
}

var modeBits = []struct {
	unix uint32
	os   os.FileMode
}{{unix.S_ISUID, os.ModeSetuid}, {unix.S_ISGID, os.ModeSetgid}, {unix.S_ISVTX, os.ModeSticky}}

// storable reports whether Kopia can store the time. Kopia stores nanoseconds since 1970 in 64 bits.
func storable(t unix.Timespec) bool {
	back := time.Unix(0, time.Unix(t.Unix()).UnixNano())
	return back.Equal(time.Unix(t.Unix()))
}
