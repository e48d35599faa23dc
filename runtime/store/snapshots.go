package store

import (
	"context"
	"fmt"

	"github.com/doze-run/doze/runtime/sandbox"
)

// PutSnapshot implements sandbox.Store. A record of more than 800 KiB is refused with a
// *sandbox.InvalidError.
func (s *Badger) PutSnapshot(ctx context.Context, snapshot sandbox.Snapshot) error {
	return s.putRecord(ctx, snapshotPrefix, string(snapshot.ID), "snapshot", snapshot)
}

// DeleteSnapshot implements sandbox.Store.
func (s *Badger) DeleteSnapshot(ctx context.Context, id sandbox.SnapshotID) error {
	return s.deleteRecord(ctx, snapshotPrefix, string(id))
}

// Snapshots implements sandbox.Store. It fails on the first unreadable record: the disks of
// sandboxes are based on snapshots.
func (s *Badger) Snapshots(ctx context.Context, yield func(sandbox.Snapshot) error) error {
	return s.each(ctx, snapshotPrefix, func(id string, value []byte) error {
		var snapshot sandbox.Snapshot
		if err := decode(value, &snapshot); err != nil {
			return fmt.Errorf("record of snapshot %s: %w", id, err)
		}
		if string(snapshot.ID) != id {
			return fmt.Errorf("record of snapshot %s: it has the id %q", id, snapshot.ID)
		}
		return yield(snapshot)
	})
}
