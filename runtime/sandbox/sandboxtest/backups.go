package sandboxtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/doze-run/doze/runtime/gitignore"
	"github.com/doze-run/doze/runtime/sandbox"
)

// Backups implements sandbox.Backups for an Engine's snapshots, with an object store in memory. Its Faults
// apply to the operations "create", "capture", "restore", which is also Download, "list" and "delete".
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
	files, err := selected(s.files, record.BackupSelection)
	if err != nil {
		return sandbox.Backup{}, err
	}
	progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Total: contentOf(files)})
	return b.store(ctx, record, record.CreatedAt, files, progress)
}

// CreateRunning implements sandbox.Backups.
func (b *Backups) CreateRunning(ctx context.Context, record sandbox.Backup, stop sandbox.StopPrograms, progress func(sandbox.BackupProgress)) (sandbox.Backup, error) {
	b.engine.mu.Lock()
	c := b.engine.containers[record.Sandbox]
	b.engine.mu.Unlock()
	if c == nil {
		return sandbox.Backup{}, fmt.Errorf("disk of %s: %w", record.Sandbox, sandbox.ErrNoContainer)
	}
	files, err := b.filesOf(c, record)
	if err != nil {
		return sandbox.Backup{}, err
	}
	progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Total: contentOf(files)})
	began, stopped := record.CreatedAt, time.Time{}
	record.Frozen, record.Origin, err = stop(ctx, func(ctx context.Context) error {
		if err := b.begin(ctx, "capture"); err != nil {
			return err
		}
		b.engine.mu.Lock()
		now := b.engine.containers[record.Sandbox]
		b.engine.mu.Unlock()
		if now != c {
			return fmt.Errorf("disk of %s: %w", record.Sandbox, sandbox.ErrNeedsSnapshot)
		}
		stopped = time.Now().UTC()
		files, err = b.filesOf(c, record)
		return err
	})
	if err != nil {
		return sandbox.Backup{}, err
	}
	record.CreatedAt = stopped
	return b.store(ctx, record, began, files, progress)
}

// filesOf returns the files of a container's disk that a backup contains.
func (b *Backups) filesOf(c *container, record sandbox.Backup) (map[string]string, error) {
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	return selected(c.disk(), record.BackupSelection)
}

// store stores a backup that began at a time.
func (b *Backups) store(ctx context.Context, record sandbox.Backup, began time.Time, files map[string]string, progress func(sandbox.BackupProgress)) (sandbox.Backup, error) {
	if err := b.begin(ctx, "create"); err != nil {
		return sandbox.Backup{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.stored) >= sandbox.MaxBackups {
		return sandbox.Backup{}, fmt.Errorf("%w (%d)", sandbox.ErrTooManyBackups, sandbox.MaxBackups)
	}
	record.Usage, record.Layers, record.Stored = contentOf(files), []string{b.image}, b.missing(files)
	record.Duration = sandbox.Duration(time.Since(began))
	b.stored[record.ID] = storedBackup{record, files}
	progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Done: record.Usage, Total: record.Usage})
	return record, nil
}

// folder is where the fake's files are.
const folder = "/srv"

// selected returns the files of a disk that a backup contains. The folder .git of the fake is a file.
func selected(files map[string]string, part sandbox.BackupSelection) (map[string]string, error) {
	if i := missingPath(files, part.Paths); i >= 0 {
		return nil, sandbox.MissingPath("paths", fmt.Sprintf("%q does not exist", part.Paths[i]))
	}
	excludes := gitignore.ParseFile([]byte(strings.Join(part.Excludes, "\n")))
	var ignores gitignore.Patterns
	if _, worktree := files[".git"]; worktree && part.Gitignore {
		ignores = gitignore.ParseFile([]byte(files[".gitignore"]))
	}
	files = maps.Clone(files)
	maps.DeleteFunc(files, func(name, _ string) bool {
		at := folder + "/" + name
		if part.Partial() && !atPath(part.Paths, at) {
			return true
		}
		if slices.Contains(part.Paths, at) {
			return false
		}
		ignored, matched := excludes.Match(at[1:], false)
		if !matched && name != ".git" {
			ignored, _ = ignores.Match(name, false)
		}
		return ignored
	})
	return files, nil
}

// missingPath returns the index of the first path that a disk does not have, or -1.
func missingPath(files map[string]string, paths []string) int {
	return slices.IndexFunc(paths, func(p string) bool {
		_, ok := files[strings.TrimPrefix(p, folder+"/")]
		return !ok && p != folder
	})
}

// atPath reports whether a file is at one of the paths.
func atPath(paths []string, file string) bool {
	return slices.Contains(paths, file) || slices.Contains(paths, folder)
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
	if record.Partial() {
		return sandbox.DiskUsage{}, errors.New("the backup has only a part of a disk")
	}
	usage, err := b.download(ctx, record, name, anyImage, progress)
	if err != nil {
		return sandbox.DiskUsage{}, err
	}
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	b.engine.snapshots[sandbox.SnapshotRef(name)].published = true
	return usage, nil
}

// Download implements sandbox.Backups.
func (b *Backups) Download(ctx context.Context, record sandbox.Backup, name sandbox.SnapshotID, progress func(sandbox.BackupProgress)) (sandbox.DiskUsage, error) {
	return b.download(ctx, record, name, true, progress)
}

// download creates an unpublished snapshot with the files of a backup.
func (b *Backups) download(ctx context.Context, record sandbox.Backup, name sandbox.SnapshotID, anyImage bool, progress func(sandbox.BackupProgress)) (sandbox.DiskUsage, error) {
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
	b.engine.snapshots[sandbox.SnapshotRef(name)] = &snapshot{files: maps.Clone(stored.files)}
	b.engine.mu.Unlock()
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
