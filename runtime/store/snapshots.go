package store

import (
	"context"
	"fmt"

	"github.com/doze-run/doze/runtime/sandbox"
)

func snapshotKey(id sandbox.SnapshotID) ([]byte, error) {
	if err := checkID(sandbox.ID(id)); err != nil {
		return nil, err
	}
	return append([]byte("p/"), id...), nil
}

// PutSnapshot implements sandbox.Store. A record of more than 800 KiB is refused with a
// *sandbox.InvalidError.
func (s *Badger) PutSnapshot(ctx context.Context, snapshot sandbox.Snapshot) error {
	key, err := snapshotKey(snapshot.ID)
	if err != nil {
		return err
	}
	value, err := encode("snapshot", snapshot, s.maxRecord)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key, value: value})
}

// DeleteSnapshot implements sandbox.Store.
func (s *Badger) DeleteSnapshot(ctx context.Context, id sandbox.SnapshotID) error {
	key, err := snapshotKey(id)
	if err != nil {
		return err
	}
	return s.writeAndWait(ctx, &write{key: key})
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
