package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Backups implements sandbox.Backups for an Engine's snapshots, with an object store in memory. Its Faults
// apply to the operations "create", "restore", "list" and "delete".
type Backups struct {
	Faults
	engine *Engine

	mu     sync.Mutex
	stored map[sandbox.BackupID]storedBackup
	image  string // digest of the node's image
}

type storedBackup struct {
	record sandbox.Backup
	files  map[string]string
}

// backupImage is the digest of the node's image before RebuildImage.
const backupImage = "sha256:1"

// Backups returns an empty object store for the snapshots of the engine.
func (e *Engine) Backups() *Backups {
	return &Backups{engine: e, stored: map[sandbox.BackupID]storedBackup{}, image: backupImage}
}

// RebuildImage replaces the image of the node by a different one with the same name.
func (b *Backups) RebuildImage() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.image += "+"
}

// Create implements sandbox.Backups.
func (b *Backups) Create(ctx context.Context, record sandbox.Backup, snapshot sandbox.SnapshotID, progress func(sandbox.BackupProgress)) (sandbox.Backup, error) {
	b.engine.mu.Lock()
	s := b.engine.snapshots[sandbox.SnapshotRef(snapshot)]
	b.engine.mu.Unlock()
	if s == nil || !s.published {
		return sandbox.Backup{}, fmt.Errorf("back up snapshot %s: not known", snapshot)
	}
	record.Usage = contentOf(s.files)
	progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Total: record.Usage})
	if err := b.begin(ctx, "create"); err != nil {
		return sandbox.Backup{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	record.Layers, record.Stored = []string{b.image}, b.missing(s.files)
	record.Duration = sandbox.Duration(time.Since(record.CreatedAt))
	b.stored[record.ID] = storedBackup{record, maps.Clone(s.files)}
	progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Done: record.Usage, Total: record.Usage})
	return record, nil
}

// missing returns the size of the contents that no backup has. The caller holds b.mu.
func (b *Backups) missing(files map[string]string) (size int64) {
	have := map[string]bool{}
	for _, s := range b.stored {
		for _, content := range s.files {
			have[content] = true
		}
	}
	for _, content := range files {
		if !have[content] {
			have[content] = true
			size += int64(len(content))
		}
	}
	return size
}

func contentOf(files map[string]string) (u sandbox.DiskUsage) {
	u.Entries = 1 + int64(len(files)) // with the root folder
	for _, content := range files {
		u.Bytes += int64(len(content))
	}
	return u
}

// Restore implements sandbox.Backups.
func (b *Backups) Restore(ctx context.Context, record sandbox.Backup, name sandbox.SnapshotID, anyImage bool, progress func(sandbox.BackupProgress)) (sandbox.DiskUsage, error) {
	b.prepare(name)
	progress(sandbox.BackupProgress{Phase: sandbox.BackupDownload, Total: record.Usage})
	if err := b.begin(ctx, "restore"); err != nil {
		return sandbox.DiskUsage{}, err
	}
	b.mu.Lock()
	stored, ok := b.stored[record.ID]
	image := b.image
	b.mu.Unlock()
	if !ok {
		return sandbox.DiskUsage{}, sandbox.ErrBackupNotFound
	}
	if !anyImage && !slices.Equal(stored.record.Layers, []string{image}) {
		return sandbox.DiskUsage{}, &sandbox.ImageMismatchError{Image: record.Origin.Image}
	}
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	b.engine.snapshots[sandbox.SnapshotRef(name)] = &snapshot{files: maps.Clone(stored.files), published: true}
	progress(sandbox.BackupProgress{Phase: sandbox.BackupDownload, Done: record.Usage, Total: record.Usage})
	return usageOf(stored.files), nil
}

// prepare creates an unfinished snapshot, such as a failed restore leaves.
func (b *Backups) prepare(name sandbox.SnapshotID) {
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	b.engine.snapshots[sandbox.SnapshotRef(name)] = &snapshot{files: map[string]string{}}
}

// List implements sandbox.Backups.
func (b *Backups) List(ctx context.Context, owner string) (list []sandbox.Backup, err error) {
	if err := b.begin(ctx, "list"); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.stored {
		if s.record.Owner == owner {
			list = append(list, s.record)
		}
	}
	return list, nil
}

// Delete implements sandbox.Backups.
func (b *Backups) Delete(ctx context.Context, ids []sandbox.BackupID) error {
	if err := b.begin(ctx, "delete"); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range ids {
		delete(b.stored, id)
	}
	return nil
}

// CacheBytes implements sandbox.Backups. The cache has what Create has stored.
func (b *Backups) CacheBytes(context.Context) (bytes int64, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.stored {
		bytes += s.record.Stored
	}
	return bytes, nil
}

var _ sandbox.Backups = (*Backups)(nil)
