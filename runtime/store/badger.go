// Package store persists the node's state: the records of sandboxes, the timelines of their
// events, and documents of other packages, in Badger.
package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// errClosed is returned by all methods after Close.
var errClosed = errors.New("the store is closed")

// ErrStuck is returned when Badger does not finish a write or its Close, as on a disk that
// returns errors. Acknowledged writes are in its log, and the next Open recovers them.
var ErrStuck = errors.New("the store's disk accepts no writes; check the logs of the kernel and the node for errors of the disk and of Badger")

// tuning has the values that tests reduce.
type tuning struct {
	memTable int64  // bytes of one memtable
	headroom uint64 // bytes that must be free on the disk, see reserve
	// stuckAfter is how long a write, or half of Close, may take. On a disk that returns
	// errors, Badger retries indefinitely.
	stuckAfter time.Duration
}

var defaultTuning = tuning{memTable: 8 << 20, headroom: defaultHeadroom, stuckAfter: 20 * time.Second}

// maxRecord is the maximum size of one encoded value, in bytes.
func (t tuning) maxRecord() int { return int(min(maxRecord, t.memTable/10)) }

// Badger implements sandbox.Store in a folder that one process at a time may use. Its
// methods may be called concurrently.
type Badger struct {
	db        *badger.DB
	log       *slog.Logger
	lock      io.Closer
	reserve   *reserve
	nodeID    string
	maxRecord int

	stuckAfter time.Duration
	stuck      atomic.Bool // Badger has not finished the last write

	// commits counts, since the creation of the store, the writes that were synced before
	// they were acknowledged. The writer changes it.
	commits atomic.Uint64
	witness atomic.Pointer[func(commits uint64)]

	// The writer (see writer.go) makes every change. It ends when queue is closed and
	// empty, and then closes done.
	queue     chan *write
	done      chan struct{}
	mu        sync.RWMutex // read-locked while a write is queued
	closed    bool         // guarded by mu
	readers   sync.WaitGroup
	unwritten atomic.Int64 // queued events that are not written yet
	// The merger (see merge.go) ends with endMerger, and then closes merged.
	tableMade chan struct{} // capacity 1
	endMerger context.CancelFunc
	merged    chan struct{}

	closeOnce func() error
}

// Open opens the store in dir and creates both if they do not exist. It recovers the store
// of a killed node. log may be nil. The caller closes the store.
//
// Errors: ErrInUse (wrapped, with the pid) if another process has it open,
// *DamageError, sandbox.ErrStoreFull (wrapped) if the disk has less free space than
// writes need.
func Open(dir string, log *slog.Logger) (*Badger, error) {
	return open(dir, "", log, defaultTuning)
}

// OpenOf is Open for the existing store of a node. An empty folder is a *DamageError, and
// the store of another node an error.
func OpenOf(nodeID, dir string, log *slog.Logger) (*Badger, error) {
	return open(dir, nodeID, log, defaultTuning)
}

var discard = slog.New(slog.DiscardHandler)

// OpenInMemory opens an empty store that writes nothing to a disk, for tests. The caller
// closes it.
func OpenInMemory() (*Badger, error) {
	return openBadger("", discard, defaultTuning, io.NopCloser(nil))
}

func open(dir, nodeID string, log *slog.Logger, t tuning) (s *Badger, err error) {
	if log == nil {
		log = discard
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the store's folder: %w", err)
	}
	if err := (&reserve{dir: dir, headroom: t.headroom}).check(); err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := removeEmptyLogs(dir); err != nil {
		return nil, fmt.Errorf("clean up %s: %w", dir, err)
	}
	files, err := storeFiles(dir)
	if err != nil {
		return nil, fmt.Errorf("read the store: %w", err)
	}
	fresh := files.empty()
	switch {
	case fresh && nodeID != "":
		return nil, damaged(dir, dir, "all records, documents and events", "is empty, but the node %s had a store there", nodeID)
	case !fresh:
		if err := files.verify(); err != nil {
			return nil, err
		}
	}
	s, err = openBadger(dir, log, t, lock)
	if err != nil {
		return nil, fmt.Errorf("open the store in %s: %w", dir, err)
	}
	if nodeID != "" && s.nodeID != nodeID {
		err = fmt.Errorf("the store in %s belongs to node %s, its home to node %s; restore the store of node %[3]s", dir, s.nodeID, nodeID)
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// openBadger opens the store in dir, which is locked, or in memory if dir is empty.
func openBadger(dir string, log *slog.Logger, t tuning, lock io.Closer) (*Badger, error) {
	s := &Badger{
		log: log, lock: lock, maxRecord: t.maxRecord(), stuckAfter: t.stuckAfter,
		queue:     make(chan *write, maxQueue),
		done:      make(chan struct{}),
		tableMade: make(chan struct{}, 1),
		merged:    make(chan struct{}),
	}
	s.closeOnce = sync.OnceValue(s.close)
	err := noPanic(func() (err error) {
		s.db, err = badger.Open(badgerOptions(dir, log, t))
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("read the node's id: %w", err), s.db.Close())
	}
	if s.reserve, err = newReserve(dir, t, log); err != nil {
		return nil, errors.Join(err, s.db.Close())
	}
	s.noteTable()
	merging, endMerger := context.WithCancel(context.Background())
	s.endMerger = endMerger
	go s.writer() // ends in Close
	go s.merger(merging)
	return s, nil
}

// badgerOptions tunes for a small node: a few thousand records of about 1 KiB,
// all of them in memory elsewhere, and timelines that are rarely read.
func badgerOptions(dir string, log *slog.Logger, t tuning) badger.Options {
	return badger.DefaultOptions(dir).
		WithInMemory(dir == "").
		WithLogger(badgerLog{log}).
		// This switch applies to all writes. It is off, and the writer calls db.Sync
		// after writes that must be on the disk: an event costs 5 µs, and a record one
		// msync (0.28 ms on ext4) that concurrent writes share. If it were on, each
		// event would cost an msync.
		WithSyncWrites(false).
		// Only the writer changes data, so transactions cannot conflict.
		WithDetectConflicts(false).
		// The default of 64 MiB uses five times as much memory as all the data.
		WithMemTableSize(t.memTable).
		WithNumMemtables(2).
		// Without compression there is no block cache: tables are memory maps, and
		// the kernel's page cache takes its role and shrinks when memory is short.
		WithCompression(options.None).
		WithBlockCacheSize(0).
		WithMetricsEnabled(false).
		// A block that the disk damaged while the node runs is an error when it is
		// read. Open verifies everything, see verify.go.
		WithChecksumVerificationMode(options.OnBlockRead).
		// See merger.
		WithNumCompactors(0).
		WithNumLevelZeroTables(level0Tables).
		// Every value is below the threshold and therefore in the tables. The value
		// log stays empty, so it needs no garbage collection and cannot be torn.
		WithValueThreshold(int64(t.maxRecord()) + 1).
		WithValueLogFileSize(1 << 20)
}

// load reads the node's id and the count of commits. In a new store it creates the id.
func (s *Badger) load() error {
	var commits uint64
	err := s.db.View(func(txn *badger.Txn) error {
		if err := get(txn, commitsKey, &commits); err != nil && !errors.Is(err, badger.ErrKeyNotFound) {
			return err
		}
		return get(txn, nodeIDKey, &s.nodeID)
	})
	s.commits.Store(commits)
	if !errors.Is(err, badger.ErrKeyNotFound) {
		return err
	}
	if err := s.db.View(onlyEmpty); err != nil {
		return err
	}
	s.nodeID = string(sandbox.NewID())
	return putNodeID(s.db, s.nodeID)
}

// onlyEmpty refuses a store that has lost its node id: with another id, the node would not
// recognize its containers.
func onlyEmpty(txn *badger.Txn) error {
	it := txn.NewIterator(badger.IteratorOptions{})
	defer it.Close()
	if it.Rewind(); it.Valid() {
		return errors.New("the store has records and no node id")
	}
	return nil
}

func get(txn *badger.Txn, key []byte, v any) error {
	item, err := txn.Get(key)
	if err != nil {
		return err
	}
	return item.Value(func(encoded []byte) error { return decode(encoded, v) })
}

func putNodeID(db *badger.DB, id string) error {
	value, err := encode("node id", id, maxRecord)
	if err != nil {
		return err
	}
	if err := db.Update(func(txn *badger.Txn) error { return txn.Set(nodeIDKey, value) }); err != nil {
		return err
	}
	return db.Sync()
}

// DiskBytes implements sandbox.Store. Badger's files are sparse: only allocated blocks count.
func (s *Badger) DiskBytes() (bytes int64, err error) {
	dir := s.db.Opts().Dir
	if dir == "" {
		return 0, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("measure the store: %w", err)
	}
	for _, e := range entries {
		var stat unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, e.Name()), &stat); err == nil { // otherwise Badger has deleted it since
			bytes += stat.Blocks * 512
		}
	}
	return bytes, nil
}

// NodeID implements sandbox.Store.
func (s *Badger) NodeID() string { return s.nodeID }

// Commits returns the number of groups of records and documents that were written since
// the store was created. It never decreases: a store with fewer commits than before is an
// older copy.
func (s *Badger) Commits() uint64 { return s.commits.Load() }

// AdvanceCommits raises the count of commits to at least that number. The next write
// stores it.
func (s *Badger) AdvanceCommits(least uint64) {
	for n := s.commits.Load(); n < least && !s.commits.CompareAndSwap(n, least); n = s.commits.Load() {
	}
}

// Witness sets a function that the store calls after each commit with the count of commits,
// before it acknowledges the commit. It must not block: all writes wait for it.
func (s *Badger) Witness(f func(commits uint64)) { s.witness.Store(&f) }

// view runs fn in a snapshot, unless the store is closed.
func (s *Badger) view(fn func(*badger.Txn) error) error {
	s.mu.RLock()
	if s.closed {
		s.mu.RUnlock()
		return errClosed
	}
	s.readers.Add(1)
	s.mu.RUnlock() // fn may write
	defer s.readers.Done()
	return s.db.View(fn)
}

// each calls yield for each entry with the prefix, in the order of the keys, with the rest of
// its key and its value, which is valid until yield returns. yield may write. An error of
// yield ends the iteration.
func (s *Badger) each(ctx context.Context, prefix []byte, yield func(name string, value []byte) error) error {
	return s.view(func(txn *badger.Txn) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, PrefetchValues: true, PrefetchSize: 64})
		defer it.Close()
		var value []byte
		for it.Rewind(); it.Valid(); it.Next() {
			if err := ctx.Err(); err != nil {
				return err
			}
			key := string(it.Item().Key())
			var err error
			if value, err = it.Item().ValueCopy(value); err != nil {
				return fmt.Errorf("read the record %q: %w", key, err)
			}
			if err := yield(key[len(prefix):], value); err != nil {
				return err
			}
		}
		return nil
	})
}

// Close closes the store after all earlier writes. Idempotent.
//
// It returns ErrStuck (wrapped) on a disk that returns errors, and sandbox.ErrStoreFull
// (wrapped) on a disk without headroom. Acknowledged writes are on the disk then, but
// Badger cannot write its log into tables. The folder stays locked until the process ends,
// and the next Open recovers the store as after a kill.
func (s *Badger) Close() error {
	return s.closeOnce()
}

func (s *Badger) close() error {
	s.mu.Lock()
	s.closed = true
	close(s.queue)
	s.mu.Unlock()
	s.endMerger()
	ended := make(chan error, 1)
	go func() { ended <- s.shutDown() }()      // ends with the process if the disk never responds
	timeout := time.NewTimer(2 * s.stuckAfter) // a write may be stuck first
	defer timeout.Stop()
	select {
	case err := <-ended:
		return err
	case <-timeout.C:
		return fmt.Errorf("close the store: %w", ErrStuck)
	}
}

// shutDown waits for the writer and the readers, and closes Badger.
func (s *Badger) shutDown() error {
	<-s.done
	s.readers.Wait()
	if s.stuck.Load() {
		return fmt.Errorf("close the store: %w", ErrStuck)
	}
	if err := s.reserve.check(); err != nil {
		return errors.Join(fmt.Errorf("close the store: %w", err), s.db.Sync())
	}
	<-s.merged
	return errors.Join(s.db.Close(), s.lock.Close())
}

var _ sandbox.Store = (*Badger)(nil)
