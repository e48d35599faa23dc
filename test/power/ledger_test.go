//go:build mounts

package power

import (
	"maps"
	"sync"
)

// disk is what a disk must have at least.
type disk struct {
	version string // of its files; empty: unknown
	records int    // acknowledged ones
}

// ledger has what the node has acknowledged.
type ledger struct {
	sandboxes map[string]disk // by name
	snapshots map[string]disk // by id
	backups   map[string]disk // by id
	deleted   map[string]bool // names of sandboxes and ids of snapshots
	done      map[string]int  // how often, by the name of the operation

	mu sync.Mutex
}

func newLedger() *ledger {
	return &ledger{sandboxes: map[string]disk{}, snapshots: map[string]disk{}, backups: map[string]disk{}, deleted: map[string]bool{}, done: map[string]int{}}
}

// note changes the ledger: after an acknowledgement, and before a request that ends what the ledger has.
func (l *ledger) note(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// copied calls f, during which nothing is noted and no request begins that ends what the ledger has, and returns the ledger
// as of that time.
func (l *ledger) copied(f func()) *ledger {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	return &ledger{
		sandboxes: maps.Clone(l.sandboxes), snapshots: maps.Clone(l.snapshots), backups: maps.Clone(l.backups), deleted: maps.Clone(l.deleted), done: maps.Clone(l.done),
	}
}

// recorded notes that a sandbox has at least this number of records. The caller holds the lock.
func (l *ledger) recorded(sandbox string, records int) {
	d := l.sandboxes[sandbox]
	d.records = max(d.records, records)
	l.sandboxes[sandbox] = d
}
