package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// SnapshotID names a snapshot permanently: 12 characters of [a-z0-9].
type SnapshotID string

// Snapshot is an immutable disk of a sandbox: what the store keeps and readers get. Values
// handed out are copies, whose maps and slices are never changed.
type Snapshot struct {
	ID      SnapshotID `json:"id"`
	Name    string     `json:"name,omitempty"` // unique per owner; empty: none
	Owner   string     `json:"owner"`
	Sandbox ID         `json:"sandbox"` // whose disk it is
	// Parent is the snapshot that it is based on; empty: an image.
	Parent SnapshotID `json:"parent,omitempty"`
	// Depth counts the snapshots on which it is based, itself included.
	Depth     int       `json:"depth"`
	CreatedAt time.Time `json:"created_at"`
	// ExpiresAt is when the node deletes it; zero: never.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	// Usage is what it adds to its parent. It is zero until it has been measured.
	Usage DiskUsage `json:"usage,omitzero"`
	// Duration is how long the snapshot took, Frozen how long its programs stopped for it.
	Duration Duration `json:"duration"`
	Frozen   Duration `json:"frozen,omitzero"`
	// Origin has the settings of the sandbox, for new sandboxes.
	Origin Sandbox `json:"origin"`
	// Paths are absolute paths of files and folders. A snapshot with paths is partial: it has the merged files of the disk
	// and the image at these paths, it is based on the image, and restoring it replaces a disk at these paths only.
	Paths []string `json:"paths,omitempty"`

	// Temporary snapshots are only for one operation of the node, which deletes them. They are not
	// listed. The next start of the node, or their expiry, deletes the ones that are left.
	Temporary bool             `json:"temporary,omitempty"`
	Progress  SnapshotProgress `json:"progress,omitempty"`
}

// Partial reports whether the snapshot has only a part of the disk.
func (s Snapshot) Partial() bool { return len(s.Paths) > 0 }

// SnapshotProgress is a step in the life of a snapshot that clients do not see.
type SnapshotProgress string

const (
	snapshotCopying SnapshotProgress = "copying" // not acknowledged
	snapshotMoving  SnapshotProgress = "moving"  // not acknowledged; it may have the sandbox's files
	snapshotDone    SnapshotProgress = ""
	snapshotDeleted SnapshotProgress = "deleted" // disks are based on it
	// snapshotLayer: deleted, and other snapshots are based on it. The record only accounts for its
	// files, and has no Name and no Origin.
	snapshotLayer SnapshotProgress = "layer"
)

// DiskUsage is the usage of a disk or a part of one.
type DiskUsage struct {
	Bytes   int64 `json:"bytes"`   // allocated; blocks that are shared with other files count
	Entries int64 `json:"entries"` // files, folders, links and others
}

// SnapshotRef is the image of a snapshot, as an Engine knows it.
func SnapshotRef(id SnapshotID) string { return "localhost/doze/snapshot:" + string(id) }

const (
	// maxSnapshots of the node. One more is refused with ErrTooManySnapshots.
	maxSnapshots = 10_000
	// maxLayers of the node. The files of further ones count as DiskReport's Other.
	maxLayers = maxSnapshots
	// maxSnapshotDepth bounds the layers of a disk: the kernel takes the names of all layers
	// in one page. A snapshot that would reach it has the files of all snapshots below, and is based on the image. A
	// restore of paths adds another layer.
	maxSnapshotDepth = 64
	// maxMovedDepth: beyond it, the disk of a stopped sandbox is copied into the snapshot, and
	// the sandbox keeps its base.
	maxMovedDepth = 32
	// temporaryAge is longer than any operation that needs a temporary snapshot.
	temporaryAge = 2 * backupTimeout
	// snapshotTimeout bounds one snapshot; with 40 MB/s, that is a disk of 70 GB.
	snapshotTimeout = 30 * time.Minute
)

// snapshots are all snapshots of the node.
type snapshots struct {
	mu   sync.Mutex
	byID map[SnapshotID]Snapshot
	// pins counts the readers of a snapshot's files.
	pins map[SnapshotID]int
	// unwanted are temporary ones whose deletion failed.
	unwanted map[SnapshotID]struct{}
	// changing is held while the record of an acknowledged snapshot changes, and from the lookup of
	// a snapshot until a sandbox is based on it. It is held over writes of records, not
	// over copies of disks.
	changing sync.Mutex
	// collecting is held while the files of deleted snapshots are removed.
	collecting sync.Mutex
}

// SnapshotRequest is the argument of CreateSnapshot.
type SnapshotRequest struct {
	Name string // empty: none
	// MaxAge is after which time the node deletes it; 0: never.
	MaxAge Duration
	// RetainLast: of the sandbox's snapshots of the same paths without a name, only the newest RetainLast stay; 0: all.
	RetainLast int
	// Paths as in Snapshot; empty: the whole disk.
	Paths []string

	temporary bool
}

func (r SnapshotRequest) validate() error {
	if r.Name != "" {
		if err := validateName(r.Name); err != nil {
			return err
		}
	}
	if err := validatePaths(r.Paths); err != nil {
		return err
	}
	if err := checkSelection("paths have", r.Paths); err != nil {
		return err
	}
	if r.RetainLast < 0 {
		return &InvalidError{Field: "keep_last", Reason: "is negative", Want: "use 1 or more, or leave it out to keep all"}
	}
	if r.MaxAge != 0 && (r.MaxAge < Duration(minTTL) || r.MaxAge > Duration(maxTTL)) {
		return &InvalidError{Field: "max_age", Reason: fmt.Sprintf("%s is out of range", r.MaxAge), Want: fmt.Sprintf("use %s to %s, or leave it out for no limit", minTTL, maxTTL)}
	}
	return nil
}

// CreateSnapshot makes a snapshot of the disk of a sandbox in any state and returns it. Programs
// that run stop for the last part of the copy only. It is on the disk when CreateSnapshot returns.
// When ctx ends first, the snapshot goes on. It wakes nothing.
//
// Errors: *InvalidError, *SnapshotExistsError, ErrTooManySnapshots, ErrStoreFull. Then nothing
// of the snapshot is left.
func (m *Manager) CreateSnapshot(ctx context.Context, id ID, req SnapshotRequest) (Snapshot, error) {
	if err := req.validate(); err != nil {
		return Snapshot{}, err
	}
	b, err := m.live(id)
	if err != nil {
		return Snapshot{}, err
	}
	var s Snapshot
	err = m.do(ctx, func(ctx context.Context) (err error) {
		if s, err = b.snapshot(ctx, req); err != nil {
			return err
		}
		b.emit(Event{Type: EventSnapshotted, Snapshot: s.ID, Bytes: s.Usage.Bytes, DurationMS: milliseconds(time.Duration(s.Duration))})
		m.prune(ctx, id, req.Paths, req.RetainLast)
		return nil
	})
	if err != nil {
		return Snapshot{}, err
	}
	return s, nil
}

func (b *liveSandbox) snapshot(ctx context.Context, req SnapshotRequest) (Snapshot, error) {
	if err := b.retrieve(ctx); err != nil {
		return Snapshot{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	s, err := b.m.claimSnapshot(ctx, b, req)
	if err != nil {
		return Snapshot{}, err
	}
	if err := b.capture(ctx, &s); err != nil {
		b.m.dropSnapshot(ctx, s)
		return Snapshot{}, err
	}
	if s.Usage == (DiskUsage{}) {
		b.m.spawn(func(ctx context.Context) { b.m.measureSnapshot(ctx, s.ID) })
	}
	return s, nil
}

// claimSnapshot reserves name and record of a new snapshot.
func (m *Manager) claimSnapshot(ctx context.Context, b *liveSandbox, req SnapshotRequest) (Snapshot, error) {
	sb := b.sandbox()
	now := time.Now().UTC()
	s := Snapshot{ID: SnapshotID(NewID()), Name: req.Name, Owner: sb.Owner, Sandbox: b.id, CreatedAt: now, Origin: sb.template(), Paths: slices.Clone(req.Paths), Temporary: req.temporary, Progress: snapshotCopying}
	switch {
	case req.temporary: // in case its deletion fails
		s.ExpiresAt = now.Add(temporaryAge)
	case req.MaxAge != 0:
		s.ExpiresAt = now.Add(time.Duration(req.MaxAge))
	}
	m.snapshots.mu.Lock()
	if m.snapshots.count() >= maxSnapshots || len(m.snapshots.byID)-m.snapshots.countOf(snapshotLayer) >= 2*maxSnapshots { // deleted ones may stay for a while
		m.snapshots.mu.Unlock()
		return Snapshot{}, fmt.Errorf("%w (%d)", ErrTooManySnapshots, maxSnapshots)
	}
	if other, ok := m.snapshots.named(s.Owner, s.Name); ok && s.Name != "" {
		m.snapshots.mu.Unlock()
		return Snapshot{}, &SnapshotExistsError{Name: s.Name, ID: other.ID}
	}
	m.snapshots.byID[s.ID] = s
	m.snapshots.mu.Unlock()
	if err := m.deps.Store.PutSnapshot(ctx, s); err != nil {
		m.snapshots.forget(s.ID)
		return Snapshot{}, fmt.Errorf("write the record of a snapshot: %w", err)
	}
	return s, nil
}

// template returns the settings of a sandbox for new ones with its disk.
func (sb *Sandbox) template() Sandbox {
	origin := sb.settings()
	origin.Env, origin.Warm = sb.Environment(), sb.Warm
	origin.Ports = nil // a port has a token, which belongs to one sandbox
	return origin
}

// capture copies or moves the disk of the sandbox into the snapshot, and completes its record.
func (b *liveSandbox) capture(ctx context.Context, s *Snapshot) error {
	disks := b.m.deps.Disks
	start := time.Now()
	if b.state() == StateRunning {
		if err := b.m.CheckSpace(); err != nil {
			return err
		}
		if err := disks.Prefetch(ctx, b.id, s.ID, s.Paths); err != nil {
			return fullDisk(err)
		}
	}
	how, base, err := b.captureLocked(ctx, s)
	if err != nil {
		return fullDisk(err)
	}
	if base != "" {
		defer b.m.unpinSnapshot(base)
	}
	return b.publish(ctx, s, how, start)
}

// captured is how a disk was captured.
type captured int

const (
	copied     captured = iota
	copiedAll           // and the snapshot is to have the files of all snapshots below
	copiedPart          // and the snapshot is partial
	moved
)

// publish completes a snapshot that was captured, and its record. start is when it began.
func (b *liveSandbox) publish(ctx context.Context, s *Snapshot, how captured, start time.Time) error {
	if how != moved {
		if err := b.m.deps.Disks.Publish(ctx, b.id, s.ID, how == copiedAll); err != nil {
			return fullDisk(err)
		}
	}
	done := *s
	if how == copiedPart {
		done.Usage = b.m.measurePart(ctx, s.ID)
	}
	done.Progress, done.Duration = snapshotDone, Duration(time.Since(start))
	if err := b.m.putSnapshot(ctx, done); err != nil {
		return err
	}
	*s = done
	return nil
}

// measurePart returns the usage of a partial snapshot, which has files of the layers below its capture. It returns zero if
// the usage has to be measured later.
func (m *Manager) measurePart(ctx context.Context, id SnapshotID) DiskUsage {
	usage, err := m.deps.Disks.Measure(ctx, "", id)
	if err != nil {
		return DiskUsage{}
	}
	return usage
}

// captureLocked is the part of capture that needs the transition lock, which it holds. Unless it moved the disk, the
// copy is to be published. base is the snapshot that the disk is based on, if any. Publishing needs its files while the
// sandbox can get another disk, so captureLocked pins it, and the caller unpins it.
func (b *liveSandbox) captureLocked(ctx context.Context, s *Snapshot) (how captured, base SnapshotID, err error) {
	if err := b.lockUsable(ctx); err != nil {
		return 0, "", err
	}
	defer b.unlockTransition()
	if how, err = b.captureHeld(ctx, s); err != nil || how == moved {
		return how, "", err
	}
	base, _ = b.pinBase()
	return how, base, nil
}

// captureHeld is captureLocked for a caller that holds the transition lock.
func (b *liveSandbox) captureHeld(ctx context.Context, s *Snapshot) (how captured, err error) {
	switch b.state() {
	case StateArchived: // since the caller has retrieved it
		return 0, fmt.Errorf("sandbox %s has been archived: %w", b, ErrBusy)
	case StateStopped:
		if b.leftover.Load() {
			return 0, fmt.Errorf("sandbox %s is stopped, but its container has not ended: %w", b, ErrBusy)
		}
		if err := b.rebase(ctx); err != nil {
			return 0, err
		}
	}
	sb := b.sandbox()
	s.Parent, s.Depth = sb.Snapshot, 1
	if parent, ok := b.m.snapshots.get(sb.Snapshot); ok {
		s.Depth = parent.Depth + 1
	}
	switch {
	case s.Partial():
		s.Parent, s.Depth, how = "", 1, copiedPart
	case s.Depth >= maxSnapshotDepth:
		s.Parent, s.Depth, how = "", 1, copiedAll
	}
	if sb.State == StateStopped && s.Depth <= maxMovedDepth && how == copied {
		return moved, b.move(ctx, s) // needs no space
	}
	if err := b.m.CheckSpace(); err != nil {
		return 0, err
	}
	s.Frozen, err = b.whileFrozen(ctx, func(ctx context.Context) (err error) {
		s.Usage, err = b.m.deps.Disks.Capture(ctx, b.id, s.ID, s.Paths)
		return err
	})
	if how == copiedAll {
		s.Usage = DiskUsage{} // it is measured later
	}
	return how, err
}

// whileFrozen calls f while the programs of the sandbox do not run, and returns for how long it has stopped them. The
// sandbox stays in its state: requests wait. The caller holds the transition lock.
func (b *liveSandbox) whileFrozen(ctx context.Context, f func(context.Context) error) (frozen Duration, err error) {
	if b.state() != StateRunning {
		return 0, f(ctx)
	}
	start := time.Now()
	if err := b.freezeForCopy(ctx); err != nil {
		return 0, err
	}
	err = f(ctx)
	err = errors.Join(err, b.thawAfterCopy(ctx))
	return Duration(time.Since(start)), err
}

// freezeForCopy freezes a running sandbox.
func (b *liveSandbox) freezeForCopy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, freezeWait)
	defer cancel()
	if err := b.m.deps.Freezer.Freeze(ctx, b.id); err != nil {
		return &FreezeError{ID: b.id, Err: errors.Join(err, b.thawAfterCopy(ctx))}
	}
	return nil
}

func (b *liveSandbox) thawAfterCopy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deathWait)
	defer cancel()
	if err := b.m.deps.Freezer.Thaw(ctx, b.id); err != nil {
		return fmt.Errorf("thaw %s after the copy of its disk: %w", b.id, err)
	}
	return nil
}

// move makes the disk of a stopped sandbox the snapshot, on which the sandbox is then based.
// Needs the transition lock.
func (b *liveSandbox) move(ctx context.Context, s *Snapshot) error {
	s.Progress = snapshotMoving
	if err := b.m.putSnapshot(ctx, *s); err != nil {
		s.Progress = snapshotCopying // dropSnapshot removes it
		return err
	}
	if err := b.m.deps.Disks.Move(ctx, b.id, s.ID); err != nil {
		asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopSlack)
		defer cancel()
		moved, merr := b.m.deps.Disks.Moved(asking, s.ID)
		if merr == nil && !moved {
			s.Progress = snapshotCopying
			return err
		}
		b.unsettled = new(*s)
		return errors.Join(err, merr)
	}
	b.based(s.ID)
	err := b.save(ctx)
	if err != nil {
		b.m.journal.dirty(b)
		b.unsettled = new(*s)
	}
	return err
}

// settleMove completes a snapshot of b whose Move was interrupted, and bases the sandbox on it if it has the sandbox's files.
// If it has none, settleMove deletes it. A nil b was destroyed. Needs the transition lock, or that the Manager starts.
func (m *Manager) settleMove(ctx context.Context, b *liveSandbox, s Snapshot) error {
	moved, err := m.deps.Disks.Moved(ctx, s.ID)
	if err != nil {
		return fmt.Errorf("complete snapshot %s: %w", s.ID, err)
	}
	s.Progress = snapshotDeleted
	if moved {
		if !s.Temporary {
			s.Progress = snapshotDone
		}
		if b != nil && b.view.Load().Snapshot == s.Parent && !b.view.Load().Rebase { // it has no other disk since
			err := b.changeSaved(ctx,
				func(sb *Sandbox) { sb.Snapshot, sb.Rebase = s.ID, true },
				func(sb *Sandbox) { sb.Snapshot, sb.Rebase = s.Parent, false })
			if err != nil {
				return err
			}
			b.emptyDisk()
		}
	}
	return m.putSnapshot(ctx, s)
}

// based makes a snapshot that has the sandbox's files the base of its disk. Its container is replaced by one that
// has the snapshot's files before its next start.
func (b *liveSandbox) based(id SnapshotID) {
	b.change(func(sb *Sandbox) { sb.Snapshot, sb.Rebase = id, true })
	b.emptyDisk()
}

// rebase replaces the container of a sandbox whose disk begins again, as its image or a snapshot.
// Needs the transition lock of a sandbox that is stopped.
func (b *liveSandbox) rebase(ctx context.Context) error {
	if b.unsettled != nil { // before anything is discarded
		if err := b.m.settleMove(ctx, b, *b.unsettled); err != nil {
			return err
		}
		b.unsettled = nil
		b.m.collectSoon()
	}
	sb := b.sandbox()
	if !sb.Rebase {
		return nil
	}
	// The files are of no use any more, and their number must not delay the removal. A container
	// that runs on has them open.
	if !b.leftover.Load() {
		if err := b.m.deps.Disks.Discard(ctx, b.id); err != nil && !errors.Is(err, ErrNoContainer) {
			return err
		}
	}
	if err := b.m.deps.Engine.Remove(ctx, b.id); err != nil {
		return err
	}
	parent, err := b.m.deps.Freezer.Prepare(b.id, b.limits())
	if err != nil {
		return fmt.Errorf("prepare its cgroup: %w", err)
	}
	if err := b.m.makeRunDir(b.id); err != nil {
		return fmt.Errorf("create its run folder: %w", fullDisk(err))
	}
	spec := b.m.containerSpec(sb, parent)
	spec.New = true // the old one has no files any more
	if err := b.createContainer(ctx, spec); err != nil {
		return fmt.Errorf("create its container from %s: %w", sb.diskRef(), err)
	}
	// Before anything is written to the new disk: another rebase would discard that.
	err = b.changeSaved(ctx, func(sb *Sandbox) { sb.Rebase = false }, func(sb *Sandbox) { sb.Rebase = true })
	b.collectAfterwards() // the removed container may have been the last that was based on a deleted snapshot
	return err
}

// Restore replaces the disk of a sandbox by a snapshot of the same owner and returns the sandbox.
// Its programs end; it keeps name, ports and rules. If it was running, it is woken again;
// otherwise it is stopped. Without force it returns ErrBusy while a lease is held. When ctx ends
// first, the restore and the wake go on. A partial snapshot replaces only its paths, as a partial backup: see RestoreBackup.
func (m *Manager) Restore(ctx context.Context, id ID, snapshot SnapshotID, force bool) (Sandbox, error) {
	return m.on(id, func(b *liveSandbox) error {
		s, err := m.Snapshot(b.view.Load().Owner, string(snapshot))
		if err != nil {
			return err
		}
		if s.Partial() {
			return m.do(ctx, func(ctx context.Context) error { return b.restorePartial(ctx, s, force) })
		}
		if !force {
			if err := b.awaitSpares(ctx, modeRequested); err != nil {
				return err
			}
		}
		return m.do(ctx, func(ctx context.Context) error {
			ran, err := b.restore(ctx, snapshot, force, Event{Snapshot: snapshot})
			if err == nil && ran {
				_, err = m.Wake(ctx, id)
			}
			return err
		})
	})
}

// restore replaces the disk by a snapshot. ev is the beginning of its event.
func (b *liveSandbox) restore(ctx context.Context, id SnapshotID, force bool, ev Event) (ran bool, err error) {
	start := time.Now()
	if err := b.lockUsable(ctx); err != nil {
		return false, err
	}
	defer b.unlockTransition()
	owner := b.view.Load().Owner
	if _, err := b.m.anySnapshot(owner, string(id)); err != nil { // before anything ends
		return false, err
	}
	how := modeRequested
	if force {
		how = modeForced
	}
	ran = b.state() == StateRunning
	if err := b.stopLocked(ctx, how, ending{reason: ReasonRestored}, 0); err != nil {
		return false, err
	}
	b.m.snapshots.changing.Lock()
	defer b.m.snapshots.changing.Unlock()
	s, err := b.m.anySnapshot(owner, string(id)) // it may have been deleted during the stop
	if err != nil {
		return false, err
	}
	before := b.sandbox()
	err = b.changeSaved(ctx,
		func(sb *Sandbox) {
			sb.Snapshot, sb.Rebase = s.ID, true
			sb.Image, sb.ImageRef = s.Origin.Image, s.Origin.ImageRef
			if sb.State == StateArchived {
				sb.addStale(sb.Archived.ID)
				sb.State, sb.StateReason, sb.StateSince, sb.Archived = StateStopped, ReasonRestored, time.Now().UTC(), nil
			}
		},
		func(sb *Sandbox) {
			sb.Snapshot, sb.Rebase = before.Snapshot, before.Rebase
			sb.Image, sb.ImageRef = before.Image, before.ImageRef
			sb.State, sb.StateReason, sb.StateSince, sb.Archived = before.State, before.StateReason, before.StateSince, before.Archived
			if before.Archived != nil {
				sb.removeStale(before.Archived.ID)
			}
		})
	if err != nil {
		return false, err
	}
	if before.Archived != nil {
		b.deleteArchive(before.Archived.ID)
	}
	ev.Type, ev.Bytes, ev.DurationMS = EventRestored, s.Usage.Bytes, milliseconds(time.Since(start))
	b.emit(ev)
	return ran, nil
}

// maxForks bounds the sandboxes of one Fork.
const maxForks = 100

// ForkRequest is the argument of Fork.
type ForkRequest struct {
	Count int      // 1 to 100
	Names []string // of all forks, or empty: generated
}

// Fork creates sandboxes with the disk and the settings of another, which goes on, and returns
// them running. Ports and egress rules are not copied. After an error, also the end of ctx, and if the node dies, none of
// them stays.
func (m *Manager) Fork(ctx context.Context, id ID, req ForkRequest) ([]Sandbox, error) {
	if req.Count < 1 || req.Count > maxForks {
		return nil, &InvalidError{Field: "count", Reason: fmt.Sprintf("%d is out of range", req.Count), Want: fmt.Sprintf("use 1 to %d", maxForks)}
	}
	if len(req.Names) != 0 && len(req.Names) != req.Count {
		return nil, &InvalidError{Field: "names", Reason: fmt.Sprintf("has %d names for %d forks", len(req.Names), req.Count), Want: "name each fork, or none"}
	}
	b, err := m.live(id)
	if err != nil {
		return nil, err
	}
	owner := b.view.Load().Owner
	for i, name := range req.Names {
		if err := validateName(name); err != nil {
			return nil, err
		}
		if _, err := m.Get(owner, name); err == nil || slices.Contains(req.Names[:i], name) {
			return nil, &ConflictError{Name: name, Reason: "exists", Want: "use a name that is free"}
		}
	}
	if err := m.CheckSpace(); err != nil { // before the disk of a stopped sandbox is moved
		return nil, err
	}
	var forks []Sandbox
	err = m.do(ctx, func(running context.Context) (err error) {
		start := time.Now()
		s, err := b.snapshot(running, SnapshotRequest{temporary: true})
		if err != nil {
			return err
		}
		if forks, err = m.createForks(ctx, running, s, req); err != nil {
			m.deleteTemporary(running, s)
			return err
		}
		b.emit(Event{Type: EventForked, Forks: req.Count, Bytes: s.Usage.Bytes, DurationMS: milliseconds(time.Since(start))})
		return nil
	})
	if err != nil { // it may go on
		return nil, err
	}
	return forks, nil
}

// createForks creates the sandboxes of a Fork, and deletes its temporary snapshot s: until then, the next start of the node
// destroys the forks. After an error, or when ctx ends, it destroys those that it has created, unless running ends.
func (m *Manager) createForks(ctx, running context.Context, s Snapshot, req ForkRequest) ([]Sandbox, error) {
	forks := make([]*liveSandbox, req.Count)
	all, creating := errgroup.WithContext(ctx)
	all.SetLimit(recoverers)
	for i := range forks {
		create := CreateRequest{Owner: s.Owner, Snapshot: string(s.ID), Labels: s.Origin.Labels, fork: true}
		if len(req.Names) > 0 {
			create.Name = req.Names[i]
		}
		all.Go(func() (err error) {
			forks[i], err = m.createFork(creating, create)
			return err
		})
	}
	err := cmp.Or(all.Wait(), ctx.Err())
	if err == nil {
		_, err = m.deleteSnapshot(context.WithoutCancel(running), s.Owner, s.ID)
	}
	list := make([]Sandbox, req.Count)
	for i, b := range forks {
		switch {
		case err == nil:
			list[i] = b.sandbox()
		case b != nil:
			err = errors.Join(err, b.destroy(running, ReasonCreateFailed))
		}
	}
	return list, err
}

// createFork creates a sandbox whose name is free. After an error the sandbox, if it is not nil, may
// exist.
func (m *Manager) createFork(ctx context.Context, req CreateRequest) (*liveSandbox, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	b, created, err := m.findOrClaim(req)
	if err == nil && !created {
		err = &ConflictError{Name: req.Name, Reason: "exists", Want: "use a name that is free"}
	}
	if err != nil {
		return nil, err
	}
	return b, b.awaitMade(ctx)
}

// Snapshot returns a snapshot of an owner by id or name. A name that is the id of another snapshot of the owner does not hide it.
// Temporary snapshots are unknown.
func (m *Manager) Snapshot(owner, nameOrID string) (Snapshot, error) {
	s, err := m.anySnapshot(owner, nameOrID)
	if err == nil && s.Temporary {
		return Snapshot{}, fmt.Errorf("snapshot %q: %w", clip(nameOrID), ErrSnapshotNotFound)
	}
	return s, err
}

// anySnapshot is Snapshot, also for temporary snapshots.
func (m *Manager) anySnapshot(owner, nameOrID string) (Snapshot, error) {
	m.snapshots.mu.Lock()
	defer m.snapshots.mu.Unlock()
	s, ok := m.snapshots.byID[SnapshotID(nameOrID)]
	if !ok || s.Owner != owner {
		s, ok = m.snapshots.named(owner, nameOrID)
	}
	if !ok || s.Owner != owner || s.Progress != snapshotDone {
		return Snapshot{}, fmt.Errorf("snapshot %q: %w", clip(nameOrID), ErrSnapshotNotFound)
	}
	return s, nil
}

// Snapshots returns up to limit snapshots of an owner, of one sandbox if of is not empty, newest
// first, after the snapshot after. next is the last id if there are more, otherwise empty.
func (m *Manager) Snapshots(owner string, of ID, after SnapshotID, limit int) (list []Snapshot, next SnapshotID) {
	m.snapshots.mu.Lock()
	defer m.snapshots.mu.Unlock()
	last, begun := m.snapshots.byID[after]
	for _, s := range m.snapshots.byID {
		if s.Owner == owner && s.Progress == snapshotDone && !s.Temporary && (of == "" || s.Sandbox == of) && (!begun || newestFirst(s, last) > 0) {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, newestFirst)
	if limit > 0 && len(list) > limit {
		list = list[:limit]
		next = list[limit-1].ID
	}
	return list, next
}

// newestFirst is the order of snapshots in lists.
func newestFirst(a, b Snapshot) int {
	return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
}

// DeleteSnapshot deletes a snapshot of an owner. Sandboxes and snapshots that are based on it
// keep their files, which stay on the disk until the last of them is gone.
func (m *Manager) DeleteSnapshot(ctx context.Context, owner string, id SnapshotID) error {
	return m.deleteSnapshotFor(ctx, owner, id, ReasonRequested)
}

func (m *Manager) deleteSnapshotFor(ctx context.Context, owner string, id SnapshotID, why StateReason) error {
	if _, err := m.Snapshot(owner, string(id)); err != nil {
		return err
	}
	s, err := m.deleteSnapshot(ctx, owner, id)
	if err != nil {
		return err
	}
	if b, err := m.live(s.Sandbox); err == nil && b.state() != StateDestroyed {
		b.emit(Event{Type: EventSnapshotDeleted, Snapshot: s.ID, Bytes: s.Usage.Bytes, Reason: why})
	}
	return nil
}

func (m *Manager) deleteSnapshot(ctx context.Context, owner string, id SnapshotID) (Snapshot, error) {
	m.snapshots.changing.Lock()
	defer m.snapshots.changing.Unlock()
	s, err := m.anySnapshot(owner, string(id))
	if err != nil {
		return Snapshot{}, err
	}
	s.Progress = snapshotDeleted
	if err := m.putSnapshot(ctx, s); err != nil {
		return Snapshot{}, err
	}
	m.collectSoon()
	return s, nil
}

// named returns the snapshot with that name; mu is held.
func (s *snapshots) named(owner, name string) (Snapshot, bool) {
	for _, have := range s.byID {
		if have.Owner == owner && have.Name == name && name != "" && have.Progress != snapshotDeleted {
			return have, true
		}
	}
	return Snapshot{}, false
}

// count returns the number of snapshots that are not deleted; mu is held.
func (s *snapshots) count() int {
	return len(s.byID) - s.countOf(snapshotDeleted) - s.countOf(snapshotLayer)
}

// countOf returns the number of snapshots with that progress; mu is held.
func (s *snapshots) countOf(p SnapshotProgress) (n int) {
	for _, have := range s.byID {
		if have.Progress == p {
			n++
		}
	}
	return n
}

// children returns how many snapshots are based directly on each snapshot.
func (s *snapshots) children() map[SnapshotID]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	children := map[SnapshotID]int{}
	for _, have := range s.byID {
		children[have.Parent]++
	}
	return children
}

func (s *snapshots) get(id SnapshotID) (Snapshot, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have, ok := s.byID[id]
	return have, ok
}

// show shows a record to readers.
func (s *snapshots) show(record Snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[record.ID] = record
}

func (s *snapshots) forget(id SnapshotID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, id)
}

// setUnwanted sets whether the deletion of a snapshot is to be retried.
func (s *snapshots) setUnwanted(id SnapshotID, unwanted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if unwanted {
		s.unwanted[id] = struct{}{}
	} else {
		delete(s.unwanted, id)
	}
}

// where returns the snapshots for which f returns true.
func (s *snapshots) where(f func(Snapshot) bool) []Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Snapshot
	for _, have := range s.byID {
		if f(have) {
			list = append(list, have)
		}
	}
	return list
}

// putSnapshot writes the record, and shows it to readers once it is on the disk.
func (m *Manager) putSnapshot(ctx context.Context, s Snapshot) error {
	if err := m.deps.Store.PutSnapshot(ctx, s); err != nil {
		return fmt.Errorf("write the record of snapshot %s: %w", s.ID, err)
	}
	m.snapshots.show(s)
	return nil
}
