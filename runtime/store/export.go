package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Export is the content of a store at one moment. Its caller closes it.
type Export struct {
	commits uint64
	txn     *badger.Txn
	close   func()
}

// BeginExport returns the content of the store at this moment: all writes that were
// acknowledged before the call, and of concurrent ones those up to some moment. Writes
// continue in the meantime.
func (s *Badger) BeginExport(ctx context.Context) (*Export, error) {
	if err := s.catchUp(ctx); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return nil, errClosed
	}
	s.readers.Add(1)
	e := &Export{txn: s.db.NewTransaction(false)}
	e.close = sync.OnceFunc(func() {
		e.txn.Discard()
		s.readers.Done()
	})
	if err := get(e.txn, commitsKey, &e.commits); err != nil && !errors.Is(err, badger.ErrKeyNotFound) {
		e.Close()
		return nil, fmt.Errorf("read the count of commits: %w", err)
	}
	return e, nil
}

// Close ends the export. The store does not close before. Idempotent.
func (e *Export) Close() { e.close() }

// Commits returns the store's count of commits at the moment of the export.
func (e *Export) Commits() uint64 { return e.commits }

// Entries calls yield for every entry of the store, in the order of the keys. Key and value
// are valid until yield returns. An error of yield ends the iteration.
func (e *Export) Entries(ctx context.Context, yield func(key, value []byte) error) error {
	it := e.txn.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 64})
	defer it.Close()
	var value []byte
	for it.Rewind(); it.Valid(); it.Next() {
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		if value, err = it.Item().ValueCopy(value); err != nil {
			return fmt.Errorf("read an entry of the store: %w", err)
		}
		if err := yield(it.Item().Key(), value); err != nil {
			return err
		}
	}
	return nil
}

// CheckEntry returns an error unless a store can have the entry.
func CheckEntry(key, value []byte) error {
	const version = 8 // bytes that Badger appends to keys
	if !ourKey(key) || len(key) > maxKey-version {
		return fmt.Errorf("invalid key of %d bytes", len(key))
	}
	if len(value) == 0 || len(value) > maxRecord+1 {
		return fmt.Errorf("invalid value of %d bytes", len(value))
	}
	return nil
}

// Empty reports whether dir contains no store. It may be missing.
func Empty(dir string) (bool, error) {
	files, err := storeFiles(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("read the store: %w", err)
	}
	return files.empty(), nil
}

// RemoveEmpty removes a folder that an Open which failed has left: one that contains nothing
// but the lock. It may be missing. ErrInUse (wrapped) is returned if a node uses it.
func RemoveEmpty(dir string) error {
	if err := InUse(dir); err != nil {
		return err
	}
	for _, path := range []string{filepath.Join(dir, lockName), dir} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the empty folder of the store: %w", err)
		}
	}
	return nil
}

// Create creates the store of a node in dir, which is empty or does not exist, with entries
// that an Export yielded. entries calls put for each of them. The store is on the disk when
// Create returns. After an error the caller removes dir.
//
// Errors: sandbox.ErrStoreFull (wrapped), and the errors of entries.
func Create(dir, nodeID string, entries func(put func(key, value []byte) error) error) error {
	if !sandbox.IsID(nodeID) {
		return fmt.Errorf("invalid node id %q", nodeID)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create the store's folder: %w", err)
	}
	files, err := storeFiles(dir)
	if err != nil {
		return fmt.Errorf("read the store: %w", err)
	}
	if !files.empty() {
		return fmt.Errorf("%s already contains a store", dir)
	}
	space := &reserve{dir: dir, headroom: defaultTuning.headroom, log: discard}
	if err := space.check(); err != nil {
		return err
	}
	// Badger compacts while it writes: no merger runs.
	db, err := badger.Open(badgerOptions(dir, discard, defaultTuning).WithNumCompactors(2))
	if err != nil {
		return fmt.Errorf("create a store in %s: %w", dir, err)
	}
	err = writeEntries(db, space, entries)
	if err == nil {
		err = db.View(func(txn *badger.Txn) error {
			var have string
			if err := get(txn, nodeIDKey, &have); err != nil {
				return fmt.Errorf("read the node's id: %w", err)
			}
			if have != nodeID {
				return fmt.Errorf("the entries belong to node %s, not to node %s", have, nodeID)
			}
			return nil
		})
	}
	if err == nil {
		err = db.Sync()
	}
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	if err := syncDir(dir); err != nil {
		return fmt.Errorf("sync the store's folder: %w", err)
	}
	return Verify(dir)
}

// writeEntries writes the entries.
func writeEntries(db *badger.DB, space *reserve, entries func(put func(key, value []byte) error) error) error {
	batch := db.NewWriteBatch()
	defer batch.Cancel()
	var unchecked int64 // bytes since the last check of the disk's space
	err := entries(func(key, value []byte) error {
		if err := CheckEntry(key, value); err != nil {
			return err
		}
		if unchecked += int64(len(key) + len(value)); unchecked > defaultTuning.memTable {
			if err := space.check(); err != nil {
				return err
			}
			unchecked = 0
		}
		entry := badger.NewEntry(slices.Clone(key), slices.Clone(value))
		if isEvent(key) { // an Export has no expiry
			var e sandbox.Event
			if err := decode(value, &e); err != nil {
				return fmt.Errorf("read an event: %w", err)
			}
			entry.ExpiresAt = uint64(e.Time.Add(sandbox.EventRetention).Unix())
		}
		return batch.SetEntry(entry)
	})
	if err != nil {
		return err
	}
	return batch.Flush()
}
