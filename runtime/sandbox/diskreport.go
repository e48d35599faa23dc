package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// DiskReport describes what takes disk space on the node. All sizes are bytes of allocated disk space. Blocks
// that files share count for each of these files.
type DiskReport struct {
	// FileSystems that sandboxes write to; the first one has their disks.
	FileSystems []FileSystem
	// Sandboxes sums the disks of sandboxes, as last measured, without their images and snapshots.
	Sandboxes DiskTotal
	// Snapshots sums the listed snapshots. A snapshot counts 0 until it has been measured.
	Snapshots DiskTotal
	// Unused are the snapshots that no sandbox is based on. Bytes is what the deletion of all of them frees.
	Unused DiskTotal
	// Bases sums the snapshots that are not listed: deleted or temporary ones that have files of sandboxes or
	// other snapshots.
	Bases DiskTotal
	// Store is the size of the Store. BackupCache is the size of the cache of Backups, 0 without an object store.
	Store, BackupCache int64
	// Largest are the sandboxes with the largest disks, largest first.
	Largest []SandboxDisk
}

// DiskTotal is the number of sandboxes or snapshots, and the sum of their disk space.
type DiskTotal struct {
	Count int
	Bytes int64
}

func (t *DiskTotal) add(bytes int64) {
	t.Count++
	t.Bytes += bytes
}

// FileSystem is the space of a file system in bytes.
type FileSystem struct {
	Path              string // a folder of the node on it
	Total, Used, Free int64
	Reserve           int64 // the node refuses new sandboxes and snapshots if less is free
	// Other is the part of Used that the report does not have: images, other owners, sandboxes in quarantine, and
	// other programs. 0 if shared blocks hide it.
	Other int64
}

// SandboxDisk is the disk of a sandbox.
type SandboxDisk struct {
	ID    ID
	Name  string
	State State
	// Bytes is the size of its disk as last measured, without its image or snapshot. MeasuredAt is the time of
	// that measurement; zero if the disk has not been measured since the node started.
	Bytes      int64
	MeasuredAt time.Time
	// Limit of its disk; 0: none.
	Limit int64
	// Freed is what its destruction frees: Bytes, and the Bases that only it is based on.
	Freed int64
}

// DiskReport returns what takes disk space, with the owner's sandboxes and snapshots. Largest has at most
// limit sandboxes. The report uses existing measurements: it reads only the memory of the node, and the
// sizes of the file systems, the store and the cache of backups. It never wakes a sandbox.
func (m *Manager) DiskReport(ctx context.Context, owner string, limit int) (DiskReport, error) {
	spaces, err := m.deps.Disks.Space()
	if err != nil {
		return DiskReport{}, err
	}
	var r DiskReport
	if r.Store, err = m.deps.Store.DiskBytes(); err != nil {
		return DiskReport{}, err
	}
	if m.deps.Backups != nil {
		if r.BackupCache, err = m.deps.Backups.CacheBytes(ctx); err != nil {
			return DiskReport{}, err
		}
	}
	disks, layers := m.ownedDisks(owner), m.layersOf(owner)
	for i := range disks {
		layers.use(disks[i].base)
	}
	r.Snapshots, r.Unused, r.Bases = layers.totals()
	for _, d := range disks {
		r.Sandboxes.add(d.Bytes)
		d.Freed = d.Bytes + layers.exclusive(d.base)
		r.Largest = append(r.Largest, d.SandboxDisk)
	}
	slices.SortFunc(r.Largest, func(a, b SandboxDisk) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Name, b.Name)) })
	r.Largest = r.Largest[:min(limit, len(r.Largest))]
	r.FileSystems = m.fileSystems(spaces, r.Sandboxes.Bytes+r.Snapshots.Bytes+r.Bases.Bytes, r.Store+r.BackupCache)
	return r, nil
}

// fileSystems describes file systems: the first one has that many bytes of disks, and the last one that many
// bytes of the node's own data.
func (m *Manager) fileSystems(spaces []DiskSpace, disks, data int64) []FileSystem {
	list := make([]FileSystem, len(spaces))
	for i, s := range spaces {
		list[i] = FileSystem{Path: s.Path, Total: s.Total.Bytes, Used: s.Used.Bytes, Free: s.Free.Bytes, Reserve: m.config().diskReserve(s).Bytes, Other: s.Used.Bytes}
		if s.Roots {
			list[i].Other -= disks
		}
		if i == len(spaces)-1 {
			list[i].Other -= data
		}
		list[i].Other = max(list[i].Other, 0)
	}
	return list
}

// ownedDisk is a SandboxDisk with the snapshot that it is based on.
type ownedDisk struct {
	SandboxDisk
	base SnapshotID
}

// ownedDisks returns the disks of an owner's sandboxes.
func (m *Manager) ownedDisks(owner string) []ownedDisk {
	m.mu.RLock()
	defer m.mu.RUnlock()
	sizes := m.config().Sizes
	var list []ownedDisk
	for _, b := range m.sandboxes {
		sb := b.view.Load()
		if sb.Owner != owner || sb.State == StateDestroyed {
			continue
		}
		b.mu.Lock()
		measured := b.disk.counted
		b.mu.Unlock()
		limit := sb.Limits.Disk
		if sb.StartedAt.IsZero() {
			limit = sizes[sb.Size].Disk
		}
		list = append(list, ownedDisk{SandboxDisk{ID: b.id, Name: sb.Name, State: sb.State, Bytes: sb.Disk.Bytes, MeasuredAt: measured.UTC(), Limit: limit}, sb.Snapshot})
	}
	return list
}

// layers are the snapshots of an owner, listed or not, and what is based on them.
type layers struct {
	byID map[SnapshotID]layer
	used map[SnapshotID]bool // a sandbox is based on it
	// users counts the sandboxes and listed snapshots that have the files of an unlisted snapshot; 2 is two or more.
	users map[SnapshotID]int
}

// layer is the part of a Snapshot that counts here: a node can have many.
type layer struct {
	id, parent SnapshotID
	bytes      int64
	listed     bool // clients see it
}

// layersOf returns the complete snapshots of an owner. No sandbox uses them yet.
func (m *Manager) layersOf(owner string) *layers {
	l := &layers{byID: map[SnapshotID]layer{}, used: map[SnapshotID]bool{}, users: map[SnapshotID]int{}}
	m.snapshots.mu.Lock()
	for id, s := range m.snapshots.byID {
		if s.Owner == owner && s.Progress != snapshotCopying && s.Progress != snapshotMoving {
			l.byID[id] = layer{id: id, parent: s.Parent, bytes: s.Usage.Bytes, listed: s.Progress == snapshotDone && !s.Temporary}
		}
	}
	m.snapshots.mu.Unlock()
	for _, s := range l.byID {
		if s.listed {
			l.addUser(s.parent)
		}
	}
	return l
}

// addUser counts a user of the unlisted snapshots that a disk with this base consists of, down to a listed one.
func (l *layers) addUser(base SnapshotID) {
	for s, ok := l.byID[base]; ok && !s.listed && l.users[s.id] < 2; s, ok = l.byID[s.parent] {
		l.users[s.id]++
	}
}

// use notes that a sandbox is based on a snapshot, and on the snapshots below it.
func (l *layers) use(base SnapshotID) {
	l.addUser(base)
	for s, ok := l.byID[base]; ok && !l.used[s.id]; s, ok = l.byID[s.parent] {
		l.used[s.id] = true
	}
}

// exclusive returns the size of the unlisted snapshots that only one sandbox with this base has.
func (l *layers) exclusive(base SnapshotID) (bytes int64) {
	for s, ok := l.byID[base]; ok && !s.listed && l.users[s.id] == 1; s, ok = l.byID[s.parent] {
		bytes += s.bytes
	}
	return bytes
}

// totals sums the listed snapshots, the listed snapshots that no sandbox uses, and the unlisted ones. The bytes of
// unused include the unlisted ones that the deletion of the unused ones frees.
func (l *layers) totals() (listed, unused, bases DiskTotal) {
	freed := map[SnapshotID]bool{}
	for _, s := range l.byID {
		if !s.listed {
			bases.add(s.bytes)
			continue
		}
		listed.add(s.bytes)
		if l.used[s.id] {
			continue
		}
		unused.add(s.bytes)
		for below, ok := l.byID[s.parent]; ok && !below.listed && !l.used[below.id] && !freed[below.id]; below, ok = l.byID[below.parent] {
			freed[below.id] = true
			unused.Bytes += below.bytes
		}
	}
	return listed, unused, bases
}
