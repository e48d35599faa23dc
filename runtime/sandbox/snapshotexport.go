package sandbox

import (
	"cmp"
	"context"
	"io"
	"sync"
)

// ExportSnapshot exports an owner's snapshot as a container image, see Disks.Export. The caller must
// close the archive. If the snapshot is deleted meanwhile, its files are deleted after that.
func (m *Manager) ExportSnapshot(ctx context.Context, owner, nameOrID string) (io.ReadCloser, error) {
	found, err := m.Snapshot(owner, nameOrID)
	if err != nil {
		return nil, err
	}
	s, err := m.pinSnapshot(owner, found.ID)
	if err != nil {
		return nil, err
	}
	archive, err := m.deps.Disks.Export(ctx, s.ID, exportName(s))
	if err != nil {
		m.unpinSnapshot(s.ID)
		return nil, err
	}
	return &exportedSnapshot{ReadCloser: archive, unpin: sync.OnceFunc(func() { m.unpinSnapshot(s.ID) })}, nil
}

// exportName returns the name of the exported image. It differs from the names of the node's own
// snapshot images, so that importing the archive on the same node does not replace one.
func exportName(s Snapshot) string {
	return "localhost/" + s.Origin.Name + ":" + cmp.Or(s.Name, string(s.ID))
}

type exportedSnapshot struct {
	io.ReadCloser
	unpin func()
}

func (e *exportedSnapshot) Close() error {
	defer e.unpin()
	return e.ReadCloser.Close()
}

// pinSnapshot returns a snapshot and prevents the deletion of its files until unpinSnapshot.
func (m *Manager) pinSnapshot(owner string, id SnapshotID) (Snapshot, error) {
	m.snapshots.changing.Lock()
	defer m.snapshots.changing.Unlock()
	s, err := m.anySnapshot(owner, string(id))
	if err != nil {
		return Snapshot{}, err
	}
	m.snapshots.mu.Lock()
	defer m.snapshots.mu.Unlock()
	m.snapshots.pins[s.ID]++
	return s, nil
}

func (m *Manager) unpinSnapshot(id SnapshotID) {
	m.snapshots.mu.Lock()
	defer m.snapshots.mu.Unlock()
	if m.snapshots.pins[id]--; m.snapshots.pins[id] > 0 {
		return
	}
	delete(m.snapshots.pins, id)
	if m.snapshots.byID[id].Progress == snapshotDeleted {
		m.collectSoon()
	}
}
