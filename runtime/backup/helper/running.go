package helper

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kopia/kopia/repo/object"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/backup/wire"
	"github.com/doze-run/doze/runtime/disk/tree"
)

// The disk of running programs is uploaded in passes, like memory in a live migration: each pass uploads the
// files that have changed since the pass before. Then the programs stop, and the folders and the files that still
// differ are captured, in memory and in a temporary file. The rest of the backup is made from what was captured.

const (
	// maxPasses limits the passes while programs run. A pass is the last one if it leaves no more than
	// enoughCaptured bytes, which are captured in a few milliseconds.
	maxPasses      = 3
	enoughCaptured = 16 << 20
	// passPause is the time between two passes, in which files settle: see tree.Stamp.Settled.
	passPause = 200 * time.Millisecond
	// maxCaptured limits the entries of a disk, which take 500 bytes of memory each besides their extended attributes,
	// targets and extents. maxDetails limits these.
	maxCaptured = 500_000
	extentSize  = 16
	// maxCapturedBytes limits the content that is captured, for which programs stop.
	maxCapturedBytes = 1 << 30
)

// needsSnapshot returns the error for the disk of running programs that cannot be captured.
func needsSnapshot(why string) error { return &wire.Error{Code: wire.NeedsSnapshot, Message: why} }

// openRunning opens the root of the disk of a request. It returns the error of needsSnapshot if the sandbox has got another disk.
// The caller closes the root.
func openRunning(request wire.Request) (*selected, error) {
	disk, err := openSelected(request)
	if errors.Is(err, unix.ENOENT) {
		return nil, needsSnapshot(err.Error())
	}
	return disk, err
}

// entriesOf returns the entries of a folder of a disk that is to be captured.
func entriesOf(f *selected) ([]*tree.Entry, error) {
	entries, err := f.Entries()
	if errors.Is(err, tree.ErrTooLarge) {
		return nil, needsSnapshot(err.Error())
	}
	return entries, err
}

// stored is where the content of a file is, without its holes: in the repository, or in the capture.
type stored struct {
	length int64
	holes  bool
	parts  []tree.Extent // of a file with holes
	object object.ID     // empty: it is in the capture
	at     int64         // in the capture
}

// upload is the content of a file that was uploaded while programs ran.
type upload struct {
	stamp   tree.Stamp
	settled bool // each later change of the file changes its stamp
	claimed bool // a goroutine uploads it, or has done so
	stored  stored
}

// current reports whether the file still has the content that was uploaded.
func (u *upload) current(st *unix.Stat_t) bool {
	return u != nil && u.settled && u.stored.object != object.EmptyID && u.stamp == tree.StampOf(st)
}

// uploads are the uploads by file.
type uploads struct {
	mu    sync.Mutex
	files map[inode]*upload
}

// capture uploads the disk of running programs, asks the node to stop them, and captures the disk.
func (u *uploader) capture(request wire.Request, node *peer) (*captured, error) {
	done := &uploads{files: map[inode]*upload{}}
	var left int64
	for n := range maxPasses {
		if n > 0 {
			select {
			case <-time.After(passPause):
			case <-u.ctx.Done():
				return nil, u.ctx.Err()
			}
		}
		var err error
		if left, err = u.pass(request, done); err != nil {
			return nil, err
		}
		if left <= enoughCaptured {
			break
		}
	}
	if left > maxCapturedBytes { // before programs stop
		return nil, needsSnapshot(fmt.Sprintf("programs change files of more than %d MiB at a time", maxCapturedBytes>>20))
	}
	if err := node.stopPrograms(u.ctx); err != nil {
		return nil, err
	}
	c, err := u.captureStopped(request, done)
	if err == nil {
		node.send(wire.Message{Captured: true})
	}
	return c, err
}

// pass uploads the files that differ from done, while programs run, and adds them to done. It returns the size of the
// files that still differ, because they changed just now.
func (u *uploader) pass(request wire.Request, done *uploads) (left int64, err error) {
	disk, err := openRunning(request)
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	if err := disk.Sync(); err != nil { // a write-back may change the blocks of a file, which its stamp has
		return 0, err
	}
	began := time.Now()
	var entries, bytes, differ atomic.Int64
	err = u.walk(disk, 0, func(f *selected, e *tree.Entry) error {
		if entries.Add(1) > maxCaptured {
			return needsSnapshot(fmt.Sprintf("the disk has more than %d entries", maxCaptured))
		}
		if e.Kind() != unix.S_IFREG {
			return nil
		}
		size := min(e.Stat.Size, e.Stat.Blocks*512) / max(1, int64(e.Stat.Nlink)) // 0 links: it is being deleted
		bytes.Add(size)
		done.mu.Lock()
		defer done.mu.Unlock()
		if at := inodeOf(e); !done.files[at].current(&e.Stat) {
			stamp := tree.StampOf(&e.Stat)
			done.files[at] = &upload{stamp: stamp, settled: stamp.Settled(began)}
			differ.Add(size)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	u.progress.expect(wire.Usage{Bytes: bytes.Load(), Entries: entries.Load()})
	// See tree.Stamp.Settled: the stamps are from before the write-back, and the content is from after it.
	if err := disk.Sync(); err != nil {
		return 0, err
	}
	err = u.walk(disk, 0, func(f *selected, e *tree.Entry) error {
		if e.Kind() != unix.S_IFREG {
			return nil
		}
		file := done.claim(e)
		if file == nil {
			return nil
		}
		s, err := u.changing(f, e)
		if err != nil || s.object == object.EmptyID {
			return err
		}
		differ.Add(-s.length)
		done.mu.Lock()
		defer done.mu.Unlock()
		file.stored = s
		return nil
	})
	return differ.Load(), err
}

// claim returns the upload to make of a file, or nil if the file has changed again, or if it has been or is being uploaded, perhaps
// under another name.
func (done *uploads) claim(e *tree.Entry) *upload {
	done.mu.Lock()
	defer done.mu.Unlock()
	file := done.files[inodeOf(e)]
	if file == nil || file.claimed || !file.settled || file.stamp != tree.StampOf(&e.Stat) {
		return nil
	}
	file.claimed = true
	return file
}

// walk calls visit for each entry of a folder and of the folders in it, concurrently. It skips what vanishes meanwhile.
func (u *uploader) walk(f *selected, depth int, visit func(*selected, *tree.Entry) error) error {
	if depth > maxDepth {
		return unsupported("/"+f.path, fmt.Sprintf("cannot be backed up: %v", tree.ErrTooDeep))
	}
	entries, err := entriesOf(f)
	if err != nil {
		return unlessVanished(err)
	}
	var all tree.Group
	for _, e := range entries {
		err = all.Run(u.slots, func() error {
			if err := cmp.Or(u.ctx.Err(), visit(f, e)); err != nil || e.Kind() != unix.S_IFDIR {
				return err
			}
			inner, err := f.open(e)
			if err != nil {
				return unlessVanished(err)
			}
			defer inner.Close()
			return u.walk(inner, depth+1, visit)
		})
		if err != nil {
			break
		}
	}
	return cmp.Or(err, all.Wait()) // before the caller closes the folder
}

// unlessVanished returns nil if err means that an entry is gone, or has been replaced by another kind of entry.
func unlessVanished(err error) error {
	for _, gone := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENXIO} {
		if errors.Is(err, gone) {
			return nil
		}
	}
	return err
}

// changing uploads a file that programs may change. It returns a stored without an object if the file is not the
// one of e any more.
func (u *uploader) changing(f *selected, e *tree.Entry) (stored, error) {
	file, err := f.Open(e)
	if err != nil {
		return stored{}, unlessVanished(err)
	}
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return stored{}, err
	}
	if st.Ino != e.Stat.Ino || st.Ctim != e.Stat.Ctim || st.Size != e.Stat.Size {
		return stored{}, nil
	}
	s, err := u.file(f, file, &st)
	if errors.Is(err, io.ErrUnexpectedEOF) { // the file has become shorter
		return stored{}, nil
	}
	if err != nil {
		return stored{}, fmt.Errorf("back up %q: %w", e.Name, err)
	}
	return s, nil
}
