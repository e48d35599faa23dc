package store

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Badger writes through memory maps of sparse files. On a disk without room the
// first touch of such a page is SIGBUS, which ends the whole process, not an
// error. So the store never lets Badger touch a page that the disk might refuse:
//
//   - A write needs headroom: that many bytes free on the file system. It covers
//     what Badger may do in the background after a write (a memtable of 8 MiB
//     becomes a table, tables are merged) with a wide margin for whatever
//     other programs write meanwhile.
//   - The blocks of the active write-ahead log are allocated as soon as Badger
//     has made the file. Deletes go on without headroom while they fit in there,
//     so that removing sandboxes works when it is needed most.
//
// Below the headroom a write is refused with ErrStoreFull before Badger sees it.
const defaultHeadroom = 192 << 20

// entryOverhead is more than what an entry costs in the write-ahead log and in
// the memtable beyond its key and value (22+4+8 bytes and up to 96+8+18), and
// the end mark of a transaction.
const entryOverhead = 320

type room struct {
	dir      string
	headroom uint64
	memTable int64
	log      *slog.Logger

	// The rest belongs to the writer.
	active    int   // number of the active write-ahead log
	allocated bool  // its blocks are allocated
	used      int64 // upper bound of what was written to it
}

// newRoom looks at the logs that Badger has just opened in dir.
func newRoom(dir string, t tuning, log *slog.Logger) (*room, error) {
	r := &room{dir: dir, headroom: t.headroom, memTable: t.memTable, log: log}
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

// check returns ErrStoreFull when the disk has less than the headroom left.
func (r *room) check() error {
	var fs unix.Statfs_t
	if err := unix.Statfs(r.dir, &fs); err != nil {
		return fmt.Errorf("asking for the free space of %s: %w", r.dir, err)
	}
	free := fs.Bavail * uint64(fs.Bsize)
	if free < r.headroom {
		return fmt.Errorf("%w: %s has %d MiB free and needs %d", sandbox.ErrStoreFull, r.dir, free>>20, r.headroom>>20)
	}
	return nil
}

// admit decides whether a transaction of that cost may go to Badger.
func (r *room) admit(cost int64, onlyDeletes bool) error {
	err := r.check()
	if err != nil && onlyDeletes && r.allocated && r.used+cost < r.memTable {
		return nil
	}
	return err
}

// written accounts for a transaction that was committed. It reports whether Badger
// has turned to another log, and makes a table of what the last one has.
func (r *room) written(cost int64) (turned bool) {
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

func (r *room) walPath(n int) string {
	return filepath.Join(r.dir, fmt.Sprintf("%05d.mem", n))
}

// allocate gives the active log its blocks, and its name to the disk: Badger
// syncs the file but not the folder.
func (r *room) allocate() {
	r.allocated = false
	f, err := os.OpenFile(r.walPath(r.active), os.O_RDWR, 0)
	if err != nil {
		r.log.Warn("the store's log cannot be opened to allocate its blocks", "error", err)
		return
	}
	defer f.Close()
	// Badger turns to the next log at memTable; the transaction that reaches it
	// may be 15 % of that.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, r.memTable+r.memTable/4); err != nil {
		r.log.Debug("the blocks of the store's log cannot be allocated", "error", err)
		return
	}
	if err := syncDir(r.dir); err != nil {
		r.log.Warn("the store's folder cannot be synced", "error", err)
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

// removeEmptyLogs removes logs without a byte, which a kill leaves between two
// steps of making or removing one. Badger would refuse to open them.
func removeEmptyLogs(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".mem") && !strings.HasSuffix(e.Name(), ".vlog") {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Size() > 0 {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
