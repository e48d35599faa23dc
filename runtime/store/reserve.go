package store

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Badger writes through memory maps of sparse files. On a full disk, the first access to
// such a page is not an error but SIGBUS, which ends the whole process. Therefore the store
// never lets Badger touch a page that the disk might refuse:
//
//   - A write requires headroom: that many bytes must be free on the file system. They
//     cover Badger's work in the background after a write (a memtable of 8 MiB becomes a
//     table, tables are merged), with a wide margin for concurrent writes of other
//     programs.
//   - The blocks of the active write-ahead log are allocated as soon as Badger has created
//     the file. Deletes need no headroom while they fit in there, so that removing
//     sandboxes works on a full disk.
//
// Without headroom a write is refused with ErrStoreFull before it reaches Badger.
const defaultHeadroom = 192 << 20

// entryOverhead is an upper bound, in bytes, of the space that an entry needs in the
// write-ahead log and in the memtable in addition to its key and value (22+4+8 bytes and up
// to 96+8+18), and of the end mark of a transaction.
const entryOverhead = 320

// reserve ensures that the disk has space for Badger's writes.
type reserve struct {
	dir      string // empty for a store in memory, which needs no disk
	headroom uint64
	memTable int64
	log      *slog.Logger

	// The fields below belong to the writer.
	active    int   // number of the active write-ahead log
	allocated bool  // its blocks are allocated
	used      int64 // upper bound of the bytes that were written to it
}

// newReserve finds the active one of the logs that Badger has just opened in dir, and
// allocates its blocks.
func newReserve(dir string, t tuning, log *slog.Logger) (*reserve, error) {
	r := &reserve{dir: dir, headroom: t.headroom, memTable: t.memTable, log: log}
	if dir == "" {
		return r, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		var n int
		if _, err := fmt.Sscanf(e.Name(), "%d.mem", &n); err == nil {
			r.active = max(r.active, n)
		}
	}
	r.allocate()
	return r, nil
}

// check returns ErrStoreFull (wrapped) if less than the headroom is free on the disk.
func (r *reserve) check() error {
	if r.dir == "" {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(r.dir, &fs); err != nil {
		return fmt.Errorf("get the free space of %s: %w", r.dir, err)
	}
	free := fs.Bavail * uint64(fs.Bsize)
	if free < r.headroom {
		return fmt.Errorf("%w: %s has %d MiB free and needs %d", sandbox.ErrStoreFull, r.dir, free>>20, r.headroom>>20)
	}
	return nil
}

// admit returns nil if Badger may write a transaction of at most cost bytes.
func (r *reserve) admit(cost int64, onlyDeletes bool) error {
	err := r.check()
	if err != nil && onlyDeletes && r.allocated && r.used+cost < r.memTable {
		return nil
	}
	return err
}

// written accounts for a committed transaction. It reports whether Badger has switched to
// another log and writes the contents of the previous one into a table.
func (r *reserve) written(cost int64) (rotated bool) {
	if r.dir == "" {
		return true // it may have
	}
	r.used += cost
	if _, err := os.Stat(r.walPath(r.active + 1)); err == nil {
		r.active++
		r.used = cost
		r.allocate()
		return true
	}
	if !r.allocated {
		r.allocate()
	}
	return false
}

func (r *reserve) walPath(n int) string {
	return filepath.Join(r.dir, fmt.Sprintf("%05d.mem", n))
}

// allocate allocates the blocks of the active log, and syncs its folder: Badger syncs only
// the file.
func (r *reserve) allocate() {
	r.allocated = false
	f, err := os.OpenFile(r.walPath(r.active), os.O_RDWR, 0)
	if err != nil {
		r.log.Warn("failed to open the store's log to allocate its blocks", "error", err)
		return
	}
	defer f.Close()
	// Badger switches to the next log after memTable bytes; the transaction that reaches
	// them may have 15 % of that.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, r.memTable+r.memTable/4); err != nil {
		r.log.Debug("failed to allocate the blocks of the store's log", "error", err)
		return
	}
	if err := syncDir(r.dir); err != nil {
		r.log.Warn("failed to sync the store's folder", "error", err)
		return
	}
	r.allocated = true
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// removeEmptyLogs removes empty logs, which remain if the node is killed between two steps
// of creating or removing one. Badger would refuse to open them.
func removeEmptyLogs(dir string) error {
	files, err := storeFiles(dir)
	if err != nil {
		return err
	}
	for _, name := range slices.Concat(files.byKind[logSuffix], files.byKind[valueSuffix]) {
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		if err == nil && info.Size() == 0 {
			err = os.Remove(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
