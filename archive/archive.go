// Package archive packs folders as tar streams and unpacks them: in a sandbox's
// guest, and in the command line client on the other side of a copy.
//
// An archive is not trusted. Unpack writes nothing outside of its folder,
// whatever names, links and modes the archive has, and whatever else changes the
// folder meanwhile. Its entries and folders are bounded in number: [ErrTooLarge].
package archive

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"path/filepath"
	"strings"
	"sync"
)

// Kinds of [Error]. Other errors come from the file system or the stream.
var (
	ErrInvalid  = errors.New("invalid archive")
	ErrUnsafe   = errors.New("archive leads out of its folder")
	ErrTooLarge = errors.New("archive exceeds a limit")
	ErrReserved = errors.New("archive has an entry in a reserved folder")
	ErrSpecial  = errors.New("file cannot be packed")
)

// Error refuses an archive, or a file that cannot be packed.
type Error struct {
	Kind    error
	Message string // names what was refused, and why
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Kind }

func refuse(kind error, format string, args ...any) error {
	return &Error{kind, fmt.Sprintf(format, args...)}
}

// maxPath is the limit of Linux on a path.
const maxPath = 4096

// wrap makes an Error of a library's error about an unusable archive.
func wrap(err error) error {
	failed, isPath := errors.AsType[*fs.PathError](err)
	switch {
	case isPath && strings.Contains(failed.Err.Error(), "escapes from parent"): // os.Root; the library does not export it
		return refuse(ErrUnsafe, "a link leads out of the folder: %v", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return refuse(ErrInvalid, "the archive ends early; its complete entries are unpacked")
	case errors.Is(err, tar.ErrHeader), errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		return refuse(ErrInvalid, "invalid tar or gzip data: %v", err)
	}
	return err
}

// entryName checks the name of an entry, or of the file that a hard link names,
// and returns it clean.
func entryName(name string) (string, error) {
	switch {
	case len(name) >= maxPath:
		return "", refuse(ErrInvalid, "an entry's name has %d bytes; it must have fewer than %d", len(name), maxPath)
	case name == "" || strings.IndexByte(name, 0) >= 0:
		return "", refuse(ErrInvalid, "an entry's name is empty or has a zero byte")
	case strings.HasPrefix(name, "/"):
		return "", refuse(ErrUnsafe, "entry %.200q has an absolute path", name)
	case strings.Contains("/"+name+"/", "/../"), !isLocal(name):
		return "", refuse(ErrUnsafe, "entry %.200q leads out of the folder", name)
	}
	return path.Clean(name), nil
}

// isLocalLink reports whether a symbolic link in dir, a real path relative to the
// archive's folder, leads to something in that folder. The target may go up first
// and then down. Going up again could start from wherever another link leads.
func isLocalLink(dir, target string) bool {
	if target == "" || path.IsAbs(target) || filepath.IsAbs(target) || filepath.VolumeName(target) != "" {
		return false
	}
	depth := 0
	if dir = filepath.ToSlash(dir); dir != "." {
		depth = strings.Count(dir, "/") + 1
	}
	down := false
	for part := range strings.SplitSeq(filepath.ToSlash(target), "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; down || depth < 0 {
				return false
			}
		default:
			down = true
		}
	}
	return true
}

var copyBuffers = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// Copy copies contents with a buffer of a pool, whatever their size. It hides the methods that
// would make io.Copy allocate another.
func Copy(to io.Writer, from io.Reader) (int64, error) {
	buf := copyBuffers.Get().(*[64 << 10]byte)
	defer copyBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, buf[:])
}

// Within reports whether path is folder or in it. Both are clean.
func Within(path, folder string) bool {
	return path == folder || folder == "/" || strings.HasPrefix(path, folder+"/")
}
