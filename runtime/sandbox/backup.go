package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// BackupID names a backup permanently: 12 characters of [a-z0-9].
type BackupID string

// Backup is the record of a backup, a copy of a sandbox's disk in the object store. The object store
// has the record, too, so that a backup outlives the node.
type Backup struct {
	ID      BackupID `json:"id"`
	Owner   string   `json:"owner"`
	Sandbox ID       `json:"sandbox"` // whose disk was backed up
	// CreatedAt is when the disk was as in the backup.
	CreatedAt time.Time `json:"created_at"`
	// Usage is the number of entries of the disk and the size of their content, without holes.
	Usage DiskUsage `json:"usage"`
	// Stored is the number of bytes that the node sent to the object store for this backup. Content of
	// earlier backups is not sent again.
	Stored int64 `json:"stored"`
	// Duration is how long the backup took. Frozen is how long the programs of the sandbox were stopped.
	Duration Duration `json:"duration"`
	Frozen   Duration `json:"frozen,omitzero"`
	// Origin has the settings of the sandbox at the time of the backup.
	Origin Sandbox `json:"origin"`
	// Layers are the digests of the image on which the disk is based, lowest first.
	Layers []string `json:"layers"`
	BackupSelection
}

// BackupPhase is a phase of a backup or a restore.
type BackupPhase string

const (
	BackupSnapshot BackupPhase = "snapshot" // a temporary snapshot is made
	BackupUpload   BackupPhase = "upload"
	BackupDownload BackupPhase = "download"
)

// BackupProgress is how much has been read from, or written to, a disk.
type BackupProgress struct {
	Phase       BackupPhase
	Done, Total DiskUsage
}

// Backups stores disks of sandboxes in an object store. All methods are safe for concurrent use. Errors of the
// object store are *ObjectStoreError.
type Backups interface {
	// Create stores a snapshot without its image, and returns b with Usage, Stored, Layers and Duration, the
	// time since b.CreatedAt. The backup is complete in the object store when Create returns. progress is
	// called a few times per second, never concurrently. The caller must prevent the deletion of the
	// snapshot until Create returns. If one of b.Paths does not exist, Create returns *InvalidError. If the owner has
	// MaxBackups, Create returns ErrTooManyBackups (wrapped).
	Create(ctx context.Context, b Backup, snapshot SnapshotID, progress func(BackupProgress)) (Backup, error)
	// CreateRunning is Create for the disk of the sandbox b.Sandbox, whose programs run. It reads the disk, then calls
	// stop once, and then stores what has changed. It returns b with the time of the stop as CreatedAt, too. The caller must prevent the deletion of the snapshots that the disk is
	// based on until CreateRunning returns. It returns the error of stop if that fails. If it cannot read the disk in
	// this way, it returns ErrNeedsSnapshot (wrapped).
	CreateRunning(ctx context.Context, b Backup, stop StopPrograms, progress func(BackupProgress)) (Backup, error)
	// Restore creates a snapshot from a backup that is not partial. The snapshot is durable when Restore returns. The snapshot is based on the image of the backup. If the node does
	// not have that image, Restore uses the image that has its name now if anyImage is true, and returns
	// *ImageMismatchError otherwise. If the disk is full, Restore returns ErrStoreFull (wrapped). After an
	// error, Disks.Delete removes the incomplete snapshot.
	Restore(ctx context.Context, b Backup, snapshot SnapshotID, anyImage bool, progress func(BackupProgress)) (DiskUsage, error)
	// Download downloads a partial backup for Disks.Overlay. Errors are as for Restore, but the image is not needed.
	Download(ctx context.Context, b Backup, snapshot SnapshotID, progress func(BackupProgress)) (DiskUsage, error)
	// List returns the backups of an owner, in any order.
	List(ctx context.Context, owner string) ([]Backup, error)
	// Delete deletes backups and ignores unknown ids. Maintenance removes content that no other backup has.
	Delete(ctx context.Context, ids []BackupID) error
	// CacheBytes returns the disk space of the repository's cache on the node, as of at most a minute ago.
	// It does not contact the object store, and takes at most a second.
	CacheBytes(ctx context.Context) (int64, error)
}

// StopPrograms stops the programs of a sandbox while it calls capture, and returns how long they did not run, and the
// settings of the sandbox then. It returns the error of capture.
type StopPrograms func(ctx context.Context, capture func(context.Context) error) (frozen Duration, origin Sandbox, err error)

// ObjectStoreFailure is the kind of an ObjectStoreError.
type ObjectStoreFailure string

const (
	ObjectStoreUnreachable ObjectStoreFailure = "unreachable" // no connection, a timeout, or a server error
	ObjectStoreDenied      ObjectStoreFailure = "denied"      // the object store rejects the credentials
	ObjectStoreNoBucket    ObjectStoreFailure = "no_bucket"
	ObjectStorePassword    ObjectStoreFailure = "password" // the repository has another password
	ObjectStoreDamaged     ObjectStoreFailure = "damaged"  // an object is missing or is not what was stored
)

// ObjectStoreError is a failure of the object store.
type ObjectStoreError struct {
	Failure ObjectStoreFailure
	Err     error
}

func (e *ObjectStoreError) Error() string { return "object store: " + e.Err.Error() }

func (e *ObjectStoreError) Unwrap() error { return e.Err }

// ImageMismatchError means that the node does not have the image of a backup.
type ImageMismatchError struct {
	Image string // name of the image in the backup
}

func (e *ImageMismatchError) Error() string {
	return fmt.Sprintf("the node has no image %q with the layers that the backup is based on", e.Image)
}

var (
	// ErrNoObjectStore means that the node is configured without an object store.
	ErrNoObjectStore = errors.New("the node has no object store for backups")
	// ErrBackupNotFound means that no backup of the owner has that id.
	ErrBackupNotFound = errors.New("backup not found")
	// ErrBackupInUse: the backup has the disk of an archived sandbox.
	ErrBackupInUse = errors.New("backup has the disk of an archived sandbox")
	// ErrBackupUnsupported means that a backup cannot represent the disk.
	ErrBackupUnsupported = errors.New("disk cannot be backed up")
	// ErrNeedsSnapshot means that only a snapshot of the sandbox can be backed up.
	ErrNeedsSnapshot = errors.New("only a snapshot of the sandbox can be backed up")
	// ErrTooManyBackups means that the owner has MaxBackups.
	ErrTooManyBackups = errors.New("too many backups")
)

const (
	// MaxBackups is the maximum number of backups of an owner. Beyond it, Backup returns ErrTooManyBackups.
	MaxBackups = 10_000
	// backupTimeout bounds one backup or one restore. 100 GB need 1.2 MB/s. It must not exceed the 24 hours for which
	// maintenance of the repository keeps content that no backup has yet.
	backupTimeout = 24 * time.Hour
)

// BackupRequest is the argument of Backup.
type BackupRequest struct {
	BackupSelection
	// RetainLast is how many of the sandbox's newest backups of the same paths to retain; Backup deletes the others. 0 retains all.
	RetainLast int
}

// Backup stores the disk of a sandbox in any state in the object store, and returns the record. It
// never wakes the sandbox. Running programs stop while the last changes are copied. progress may be nil, and is not
// called after Backup returns. If ctx ends first, the backup continues. After an error, the next backup
// sends only the missing content, and again what this one has sent in its last 5 seconds, or in the last twentieth of its duration
// up to a minute.
//
// Errors: ErrNoObjectStore, ErrTooManyBackups, ErrBackupUnsupported, *ObjectStoreError, and the errors of
// CreateSnapshot. ErrBusy means that the sandbox is already being backed up.
func (m *Manager) Backup(ctx context.Context, id ID, req BackupRequest, progress func(BackupProgress)) (Backup, error) {
	if req.RetainLast < 0 {
		return Backup{}, &InvalidError{Field: "keep_last", Reason: "is negative", Want: "use 1 or more, or leave it out to keep all"}
	}
	if err := req.validate(); err != nil {
		return Backup{}, err
	}
	if m.deps.Backups == nil {
		return Backup{}, ErrNoObjectStore
	}
	b, err := m.live(id)
	if err != nil {
		return Backup{}, err
	}
	var backup Backup
	progress, detach := detachable(progress)
	defer detach()
	err = m.do(ctx, func(ctx context.Context) (err error) {
		if !b.backingUp.CompareAndSwap(false, true) {
			return fmt.Errorf("a backup of %s is in progress: %w", b, ErrBusy)
		}
		defer b.backingUp.Store(false)
		ctx, cancel := context.WithTimeout(ctx, backupTimeout)
		defer cancel()
		if backup, _, err = b.backUp(ctx, BackupID(NewID()), req.BackupSelection, progress); err != nil {
			b.emit(Event{Type: EventBackupFailed, Error: err.Error()})
			return err
		}
		b.emit(Event{Type: EventBackedUp, Backup: backup.ID, Bytes: backup.Usage.Bytes, Stored: backup.Stored, DurationMS: milliseconds(time.Duration(backup.Duration))})
		m.pruneBackups(ctx, b, backup, req.RetainLast)
		return nil
	})
	if err != nil {
		return Backup{}, err
	}
	return backup, nil
}

// backUp stores a part of the disk in the object store, and returns the snapshot that was stored: a temporary one if the
// disk has changes, or none if programs run.
func (b *liveSandbox) backUp(ctx context.Context, id BackupID, part BackupSelection, progress func(BackupProgress)) (Backup, SnapshotID, error) {
	m := b.m
	owner := b.view.Load().Owner
	if err := b.retrieve(ctx); err != nil {
		return Backup{}, "", err
	}
	backup := Backup{ID: id, Owner: owner, Sandbox: b.id, CreatedAt: time.Now().UTC(), BackupSelection: part}
	if base, ok := b.pinUnchanged(); ok {
		defer m.unpinSnapshot(base)
		sb := b.sandbox()
		backup.Origin = sb.template()
		backup, err := m.deps.Backups.Create(ctx, backup, base, progress)
		return backup, base, err
	}
	if state := b.state(); state == StateRunning || state == StateAsleep {
		if backup, err := b.backUpRunning(ctx, backup, progress); !errors.Is(err, ErrNeedsSnapshot) {
			return backup, "", err
		}
	}
	progress(BackupProgress{Phase: BackupSnapshot})
	s, err := b.snapshot(ctx, SnapshotRequest{temporary: true})
	if err != nil {
		return Backup{}, "", err
	}
	defer m.deleteTemporary(ctx, s)
	if s, err = m.pinSnapshot(owner, s.ID); err != nil {
		return Backup{}, "", err
	}
	defer m.unpinSnapshot(s.ID)
	backup.Frozen, backup.Origin = s.Frozen, s.Origin
	backup, err = m.deps.Backups.Create(ctx, backup, s.ID, progress)
	return backup, s.ID, err
}

// backUpRunning stores the disk of a sandbox with a container in the object store. It returns ErrNeedsSnapshot if the
// sandbox gets another disk, or stops.
func (b *liveSandbox) backUpRunning(ctx context.Context, backup Backup, progress func(BackupProgress)) (Backup, error) {
	if err := b.m.CheckSpace(); err != nil { // the files that change are copied
		return Backup{}, err
	}
	if base, ok := b.pinBase(); ok {
		defer b.m.unpinSnapshot(base)
	}
	return b.m.deps.Backups.CreateRunning(ctx, backup, b.stopForCapture, progress)
}

// stopForCapture calls capture while the programs of the sandbox do not run. It returns ErrNeedsSnapshot if the sandbox
// has no container that runs.
func (b *liveSandbox) stopForCapture(ctx context.Context, capture func(context.Context) error) (frozen Duration, origin Sandbox, err error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	if err := b.lockUsable(ctx); err != nil {
		return 0, Sandbox{}, err
	}
	defer b.unlockTransition()
	sb := b.sandbox()
	if sb.State != StateRunning && sb.State != StateAsleep {
		return 0, Sandbox{}, fmt.Errorf("sandbox %s is %s: %w", b, sb.State, ErrNeedsSnapshot)
	}
	frozen, err = b.whileFrozen(ctx, capture)
	return frozen, sb.template(), err
}

// pinUnchanged pins the snapshot that a stopped sandbox is based on, if the disk has no changes since that snapshot.
// Another snapshot would add an empty layer.
func (b *liveSandbox) pinUnchanged() (SnapshotID, bool) {
	if sb := b.sandbox(); sb.State != StateStopped || !sb.Rebase {
		return "", false
	}
	return b.pinBase()
}

// pinBase pins the snapshot that the sandbox is based on, if any, until unpinSnapshot.
func (b *liveSandbox) pinBase() (SnapshotID, bool) {
	b.m.snapshots.changing.Lock()
	defer b.m.snapshots.changing.Unlock()
	base := b.sandbox().Snapshot
	if base == "" {
		return "", false
	}
	b.m.snapshots.mu.Lock()
	defer b.m.snapshots.mu.Unlock()
	b.m.snapshots.pins[base]++
	return base, true
}

// deleteTemporary deletes a temporary snapshot, later if that fails. Disks that are based on it keep its files.
func (m *Manager) deleteTemporary(ctx context.Context, s Snapshot) {
	_, err := m.deleteSnapshot(context.WithoutCancel(ctx), s.Owner, s.ID)
	failed := err != nil && !errors.Is(err, ErrSnapshotNotFound)
	if failed {
		m.log.Warn("failed to delete a temporary snapshot, trying again later", "snapshot", s.ID, "error", err)
	}
	m.snapshots.setUnwanted(s.ID, failed)
}

// detachable returns a function that calls progress until detach is called. detach waits for a call in progress.
func detachable(progress func(BackupProgress)) (call func(BackupProgress), detach func()) {
	calls := make(chan struct{}, 1)
	calls <- struct{}{}
	call = func(p BackupProgress) {
		if _, attached := <-calls; attached {
			if progress != nil {
				progress(p)
			}
			calls <- struct{}{}
		}
	}
	return call, func() {
		<-calls
		close(calls)
	}
}

// pruneBackups deletes all but the newest keep backups of a sandbox with the paths of last; 0 deletes none. The backup
// last stays even if a wrong clock has made others newer.
func (m *Manager) pruneBackups(ctx context.Context, b *liveSandbox, last Backup, keep int) {
	if keep == 0 {
		return
	}
	list, err := m.Backups(ctx, b.view.Load().Owner, b.id)
	if err == nil {
		list = slices.DeleteFunc(list, func(b Backup) bool { return b.ID == last.ID || !samePaths(b.Paths, last.Paths) || m.archives(b.ID) })
		err = m.deleteBackups(ctx, list[min(keep-1, len(list)):], ReasonRetention)
	}
	if err != nil {
		m.log.Warn("failed to delete old backups, the next backup tries again", "sandbox", b.id, "error", err)
	}
}

// Backups returns the backups of an owner, newest first. If of is not empty, Backups returns only the backups
// of that sandbox. It reads the list from the object store.
func (m *Manager) Backups(ctx context.Context, owner string, of ID) ([]Backup, error) {
	if m.deps.Backups == nil {
		return nil, ErrNoObjectStore
	}
	list, err := m.deps.Backups.List(ctx, owner)
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(b Backup) bool { return b.Owner != owner || of != "" && b.Sandbox != of })
	slices.SortFunc(list, func(a, b Backup) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return list, nil
}

// backup returns a backup of an owner.
func (m *Manager) backup(ctx context.Context, owner string, id BackupID) (Backup, error) {
	list, err := m.Backups(ctx, owner, "")
	if err != nil {
		return Backup{}, err
	}
	if i := slices.IndexFunc(list, func(b Backup) bool { return b.ID == id }); i >= 0 {
		return list[i], nil
	}
	return Backup{}, fmt.Errorf("backup %q: %w", clip(string(id)), ErrBackupNotFound)
}

// DeleteBackup deletes a backup of an owner.
func (m *Manager) DeleteBackup(ctx context.Context, owner string, id BackupID) error {
	b, err := m.backup(ctx, owner, id)
	if err != nil {
		return err
	}
	if m.archives(id) {
		return fmt.Errorf("backup %s: %w", id, ErrBackupInUse)
	}
	return m.deleteBackups(ctx, []Backup{b}, ReasonRequested)
}

func (m *Manager) deleteBackups(ctx context.Context, list []Backup, why StateReason) error {
	if len(list) == 0 {
		return nil
	}
	ids := make([]BackupID, len(list))
	for i, b := range list {
		ids[i] = b.ID
	}
	if err := m.deps.Backups.Delete(ctx, ids); err != nil {
		return err
	}
	for _, backup := range list {
		if b, err := m.live(backup.Sandbox); err == nil && b.state() != StateDestroyed {
			b.emit(Event{Type: EventBackupDeleted, Backup: backup.ID, Bytes: backup.Usage.Bytes, Reason: why})
		}
	}
	return nil
}

// RestoreBackupRequest is the argument of RestoreBackup.
type RestoreBackupRequest struct {
	Backup BackupID
	// AnyImage allows another image with the same name if the node does not have the backup's image.
	AnyImage bool
	Force    bool // also while a lease is held
}

// RestoreBackup is like Restore, but restores a backup of the same owner. The backup may be of another
// sandbox. The sandbox keeps running until the whole backup is on the node. A partial backup replaces only its paths; the
// sandbox keeps the rest of its disk and its image. progress and ctx are as for Backup.
//
// Errors: ErrNoObjectStore, ErrBackupNotFound, *ImageMismatchError, *ObjectStoreError, ErrStoreFull, and
// the errors of Restore. After these errors, the disk of the sandbox is unchanged.
func (m *Manager) RestoreBackup(ctx context.Context, id ID, req RestoreBackupRequest, progress func(BackupProgress)) (Sandbox, error) {
	progress, detach := detachable(progress)
	defer detach()
	return m.on(id, func(b *liveSandbox) error {
		return m.do(ctx, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, backupTimeout)
			defer cancel()
			backup, err := m.backup(ctx, b.view.Load().Owner, req.Backup)
			if err != nil {
				return err
			}
			if err := b.checkIdle(ctx, req.Force); err != nil { // before the download
				return err
			}
			if backup.Partial() {
				return b.restorePaths(ctx, b.pathsOfBackup(backup, progress), req.Force)
			}
			s, err := b.download(ctx, backup, req.AnyImage, progress)
			if err != nil {
				return err
			}
			if err := b.checkIdle(ctx, req.Force); err != nil {
				m.deleteTemporary(ctx, s)
				return err
			}
			ran, err := b.restore(ctx, s.ID, req.Force, Event{Backup: backup.ID})
			if err == nil || b.undone(ctx) {
				m.deleteTemporary(ctx, s) // the sandbox keeps its files
			}
			if err == nil && ran {
				_, err = m.Wake(ctx, id)
			}
			return err
		})
	})
}

// checkIdle returns ErrBusy while a lease is held, unless force is true.
func (b *liveSandbox) checkIdle(ctx context.Context, force bool) error {
	if force {
		return nil
	}
	if err := b.awaitSpares(ctx, modeRequested); err != nil {
		return err
	}
	if b.leases() > 0 {
		return b.busy()
	}
	return nil
}

// download restores a backup as a temporary snapshot of the sandbox.
func (b *liveSandbox) download(ctx context.Context, backup Backup, anyImage bool, progress func(BackupProgress)) (Snapshot, error) {
	if err := b.m.checkFits("backup", backup.Usage); err != nil {
		return Snapshot{}, err
	}
	s, err := b.m.claimSnapshot(ctx, b, SnapshotRequest{temporary: true})
	if err != nil {
		return Snapshot{}, err
	}
	start := time.Now()
	s.Depth, s.Origin = 1, backup.Origin
	s.Usage, err = b.whileSpace(ctx, progress, func(ctx context.Context, progress func(BackupProgress)) (DiskUsage, error) {
		return b.m.deps.Backups.Restore(ctx, backup, s.ID, anyImage, progress)
	})
	if err == nil {
		done := s
		done.Progress, done.Duration = snapshotDone, Duration(time.Since(start))
		if err = b.m.putSnapshot(ctx, done); err == nil {
			return done, nil
		}
	}
	return Snapshot{}, b.downloadFailed(ctx, s, err)
}

// whileSpace calls download with a context that ends when the node gets short of space.
func (b *liveSandbox) whileSpace(ctx context.Context, progress func(BackupProgress), download func(context.Context, func(BackupProgress)) (DiskUsage, error)) (DiskUsage, error) {
	filling, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	usage, err := download(filling, func(p BackupProgress) {
		if err := b.m.CheckUpload(); err != nil { // before the node stops sandboxes
			cancel(err)
		}
		progress(p)
	})
	if full := context.Cause(filling); err != nil && ctx.Err() == nil && full != nil {
		err = full
	}
	return usage, err
}

// downloadFailed drops the snapshot of a failed download, and returns the error for the caller.
func (b *liveSandbox) downloadFailed(ctx context.Context, s Snapshot, err error) error {
	b.m.dropSnapshot(ctx, s)
	if b.isGone() {
		return fmt.Errorf("sandbox %s: %w", b, ErrDestroyed)
	}
	return fullDisk(err)
}

// blockSize is what an entry takes in addition to its content, at most, in most file systems.
const blockSize = 4096

// checkFits is CheckSpace, and returns ErrStoreFull (wrapped), too, if restoring a disk of this size from what is named
// would leave less free space than the node's reserve on a file system of the sandboxes.
func (m *Manager) checkFits(what string, u DiskUsage) error {
	if err := m.CheckSpace(); err != nil {
		return err
	}
	spaces, err := m.deps.Disks.Space()
	if err != nil {
		return err
	}
	u.Bytes += u.Entries * blockSize
	for _, space := range spaces {
		if !space.Roots {
			continue
		}
		with := space
		with.Free = space.Free.minus(u)
		if space.Total.Entries == 0 { // no limit
			with.Free.Entries = 0
		}
		if short := m.config().shortage([]DiskSpace{with}, false); short != nil {
			short.space = space
			return fmt.Errorf("%w: the %s needs %s; %s", ErrStoreFull, what, short.growth(short.of(u)), short)
		}
	}
	return nil
}
