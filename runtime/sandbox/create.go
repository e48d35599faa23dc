package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/doze-run/doze/internal/durable"
	"github.com/doze-run/doze/runtime/guest"
)

// CreateRequest is the argument of Create.
type CreateRequest struct {
	Owner  string
	Name   string // empty: generated
	Image  string // empty: the node's default
	Size   string // empty: the node's default
	Env    map[string]string
	Labels map[string]string
	// SleepAfter and StopAfter: nil means the node's default, 0 never.
	SleepAfter, StopAfter *Duration
	// ArchiveAfter: nil means the node's default, 0 never.
	ArchiveAfter *Duration
	// TTL is how long the sandbox lives before it is destroyed; nil or 0: no limit.
	TTL     *Duration
	Persist Persist // empty: memory
	// Snapshot, a name or an id, is the disk that the sandbox begins with, in place of an
	// image, and the source of settings that the request does not have.
	Snapshot string
	// Warm are languages for which each cold start also starts an interpreter, which the
	// next context of the language uses. Another one replaces it then.
	Warm []Language

	fork bool // Snapshot is temporary
}

// Create returns the sandbox with that owner and name. If there is none, Create makes one,
// returns when it is running, and reports created. An existing one is returned in the state
// that it has. The creation is not bound to ctx: when ctx ends, Create returns ctx.Err(),
// the creation goes on, and another call joins it.
//
// Errors: *InvalidError (of an image also ErrImageNotAllowed), *ConflictError when the name
// exists with another image or size, ErrDestroyed while the sandbox with that name is being
// destroyed, ErrTooManySandboxes, ErrStoreFull, ErrImageMissing, or a *WakeError with the reason why it
// did not start. After an error nothing is left of the sandbox.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (sb Sandbox, created bool, err error) {
	b, created, err := m.findOrClaim(req)
	if err == nil {
		err = b.awaitMade(ctx)
	}
	if err != nil {
		return Sandbox{}, false, err
	}
	if !created && (b.isGone() || b.state() == StateDestroyed) {
		return Sandbox{}, false, fmt.Errorf("sandbox %q: %w", req.Name, ErrDestroyed)
	}
	return b.sandbox(), created, nil
}

// awaitMade waits for the end of the creation and returns its error, or ctx.Err() when ctx ends
// first.
func (b *liveSandbox) awaitMade(ctx context.Context) error {
	select {
	case <-b.made:
		return b.makeErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

// findOrClaim begins the creation, or returns the sandbox with the name of the request.
func (m *Manager) findOrClaim(req CreateRequest) (b *liveSandbox, created bool, err error) {
	if req.Snapshot != "" { // which must not be removed before the sandbox is known
		m.snapshots.changing.Lock()
		defer m.snapshots.changing.Unlock()
	}
	sb, err := m.draft(req)
	if err != nil {
		return nil, false, err
	}
	return m.claim(sb)
}

// draft checks a request and fills in the defaults.
func (m *Manager) draft(req CreateRequest) (Sandbox, error) {
	cfg := m.config()
	s, err := m.base(&req)
	if err != nil {
		return Sandbox{}, err
	}
	now := time.Now().UTC()
	sb := Sandbox{
		ID:           NewID(),
		Owner:        req.Owner,
		Name:         req.Name,
		Image:        cmp.Or(req.Image, cfg.Images.Default),
		Size:         cmp.Or(req.Size, cfg.DefaultSize),
		State:        StateStarting,
		Env:          maps.Clone(req.Env),
		Labels:       maps.Clone(req.Labels),
		Warm:         slices.Clone(req.Warm),
		SleepAfter:   Duration(cfg.SleepAfter),
		StopAfter:    Duration(cfg.StopAfter),
		ArchiveAfter: Duration(cfg.ArchiveAfter),
		Persist:      cmp.Or(req.Persist, PersistMemory),
		CreatedAt:    now,
		LastActiveAt: now,
		StateSince:   now,
	}
	if sb.Name == "" {
		sb.Name = "sandbox-" + string(sb.ID)
	}
	Patch{SleepAfter: req.SleepAfter, StopAfter: req.StopAfter, ArchiveAfter: req.ArchiveAfter, TTL: req.TTL}.apply(&sb, now)
	if err := sb.validate(); err != nil {
		return Sandbox{}, err
	}
	if _, ok := cfg.Sizes[sb.Size]; !ok {
		return Sandbox{}, &InvalidError{Field: "size", Reason: fmt.Sprintf("%q is not configured on this node", clip(sb.Size)), Want: "use one of " + sizeNames(cfg.Sizes)}
	}
	if req.Snapshot != "" {
		sb.Snapshot, sb.CreatedFrom, sb.ImageRef = s.ID, s.ID, s.Origin.ImageRef
		sb.Declared, sb.Mounts = s.Origin.Declared, s.Origin.Mounts
		return sb, nil
	}
	if len(sb.Image) > maxImage {
		return Sandbox{}, &InvalidError{Field: "image", Reason: fmt.Sprintf("has %d bytes", len(sb.Image)), Want: fmt.Sprintf("at most %d are allowed", maxImage)}
	}
	sb.ImageRef, err = cfg.Images.resolve(sb.Image)
	return sb, err
}

// base returns the snapshot that a request names, if any, and completes the request from its
// settings.
func (m *Manager) base(req *CreateRequest) (Snapshot, error) {
	if req.Snapshot == "" {
		return Snapshot{}, nil
	}
	find := m.Snapshot
	if req.fork {
		find = m.anySnapshot
	}
	s, err := find(req.Owner, req.Snapshot)
	if err != nil {
		return Snapshot{}, err
	}
	origin := s.Origin
	if req.Image != "" && req.Image != origin.Image {
		return Snapshot{}, &InvalidError{Field: "image", Reason: fmt.Sprintf("snapshot %s has the image %q", s.ID, origin.Image), Want: "leave it out"}
	}
	req.Image = origin.Image
	if _, configured := m.config().Sizes[origin.Size]; configured {
		req.Size = cmp.Or(req.Size, origin.Size)
	}
	env := map[string]string{}
	maps.Copy(env, origin.Env)
	maps.Copy(env, req.Env)
	req.Env = env
	req.Persist = cmp.Or(req.Persist, origin.Persist)
	req.SleepAfter, req.StopAfter = cmp.Or(req.SleepAfter, &origin.SleepAfter), cmp.Or(req.StopAfter, &origin.StopAfter)
	req.ArchiveAfter = cmp.Or(req.ArchiveAfter, &origin.ArchiveAfter)
	if req.Warm == nil {
		req.Warm = origin.Warm
	}
	return s, nil
}

func (sb *Sandbox) validate() error {
	return cmp.Or(
		validateName(sb.Name),
		validateEnv(sb.Env),
		sb.validateStoredEnv(),
		validateLabels(sb.Labels),
		validateIdle("sleep_after", sb.SleepAfter),
		validateIdle("stop_after", sb.StopAfter),
		validateIdle("archive_after", sb.ArchiveAfter),
		validatePersist(sb.Persist),
		validateTTL(sb.TTL),
		validateWarm(sb.Warm),
	)
}

// claim reserves the name and begins the creation, or returns the sandbox with that name.
func (m *Manager) claim(sb Sandbox) (b *liveSandbox, created bool, err error) {
	full := m.CheckSpace() // before the lock: it may read the free space
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.started {
		return nil, false, ErrClosed
	}
	if b, ok := m.names[nameKey{sb.Owner, sb.Name}]; ok {
		have := b.view.Load()
		if have.Image != sb.Image {
			return nil, false, &ConflictError{Name: sb.Name, Reason: fmt.Sprintf("exists with image %q", have.Image), Want: "request that image, use another name, or destroy it first"}
		}
		if sb.CreatedFrom != "" && have.CreatedFrom != sb.CreatedFrom {
			return nil, false, &ConflictError{Name: sb.Name, Reason: "exists, and was not created from that snapshot", Want: "use another name, or restore the snapshot in it"}
		}
		if have.Size != sb.Size {
			return nil, false, &ConflictError{Name: sb.Name, Reason: fmt.Sprintf("exists with size %q", have.Size), Want: "request that size, use another name, or destroy it first"}
		}
		return b, false, nil
	}
	if len(m.sandboxes) >= m.config().MaxSandboxes {
		return nil, false, fmt.Errorf("%w (%d)", ErrTooManySandboxes, m.config().MaxSandboxes)
	}
	if full != nil {
		return nil, false, full
	}
	for m.sandboxes[sb.ID] != nil || m.quarantined[sb.ID] != nil {
		sb.ID = NewID()
	}
	b = m.newLiveSandbox(sb)
	b.origin = originLabel(sb)
	b.transition.TryAcquire(1) // make releases it
	makeCtx, end := context.WithCancelCause(m.ctx)
	b.endMake = end
	if !m.spawn(func(context.Context) { b.make(makeCtx) }) {
		end(nil)
		return nil, false, ErrClosed
	}
	m.addLocked(b)
	return b, true, nil
}

// make makes the sandbox, whose transition lock is held since before it was published, and
// releases the lock. The goroutine belongs to the Manager.
func (b *liveSandbox) make(ctx context.Context) {
	defer b.unlockTransition()
	defer b.endMake(nil)
	ctx, cancel := context.WithTimeout(ctx, b.m.config().CreateTimeout)
	defer cancel()
	start := time.Now()
	err := b.makeContainer(ctx)
	if err == nil {
		err = b.save(ctx)
	}
	if err == nil {
		err = b.m.creations.remove(b.id)
	}
	if err != nil {
		b.makeErr = b.wakeError(ctx, err)
		b.m.log.Error("failed to create a sandbox", "sandbox", b.id, "error", err)
		b.unmake(context.WithoutCancel(ctx))
		b.m.remove(b)
		close(b.made)
		return
	}
	b.emit(Event{Type: EventCreated, Snapshot: b.view.Load().Snapshot, DurationMS: milliseconds(time.Since(start))})
	b.touch()
	b.open(0)
	close(b.made)
	b.armWoken()
	b.startSpares(b.view.Load().Warm)
}

// unmake removes all that a failed creation made, or retries that later.
func (b *liveSandbox) unmake(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	err := b.dismantle(ctx)
	if err == nil {
		return
	}
	// The record stays: it permits the removal after a restart of the node.
	if err := b.noteDestroyed(ctx, ReasonCreateFailed); err != nil {
		b.m.log.Error("failed to write the record of a failed creation", "sandbox", b.id, "error", err)
	}
	b.m.retry(OperationDestroy, b.id, err, b.dismantleAgain)
}

// dismantleAgain is another attempt to remove all that a failed creation made.
func (b *liveSandbox) dismantleAgain(ctx context.Context) error {
	if err := b.lockTransition(ctx); err != nil {
		return err
	}
	defer b.unlockTransition()
	ctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	return b.dismantle(ctx)
}

func (b *liveSandbox) makeContainer(ctx context.Context) error {
	ref := b.view.Load().diskRef()
	err := b.m.deps.Engine.EnsureImage(ctx, ref, func(line string) {
		b.emit(Event{Type: EventImagePull, Progress: clip(line)})
	})
	if err != nil {
		return err
	}
	// If the node dies from here on, it distinguishes this creation from a sandbox whose
	// record was lost: a sandbox with a record in StateStarting and a note was never
	// acknowledged, and may be removed.
	if err := b.m.creations.add(b.id); err != nil {
		return err
	}
	if err := b.save(ctx); err != nil {
		return fmt.Errorf("write its record: %w", err)
	}
	return b.coldStart(ctx) // which creates the missing container
}

// diskRef is the image that the sandbox's container is created from.
func (sb *Sandbox) diskRef() string {
	if sb.Snapshot != "" {
		return SnapshotRef(sb.Snapshot)
	}
	return sb.ImageRef
}

func (m *Manager) containerSpec(sb Sandbox, cgroupParent string) ContainerSpec {
	return ContainerSpec{
		ID:           sb.ID,
		Name:         sb.Name,
		ImageRef:     sb.diskRef(),
		Env:          sb.Env,
		CgroupParent: cgroupParent,
		GuestBinary:  m.config().GuestBinary,
		RunDir:       m.runDir(sb.ID),
		New:          sb.StartedAt.IsZero(),
		Origin:       originLabel(sb),
	}
}

// makeRunDir makes the folder for the guest's socket. The container's root is
// another uid, hence the mode; the sticky bit keeps the sandbox's other users
// from replacing the socket, and the folder above is the node's alone.
func (m *Manager) makeRunDir(id ID) error {
	dir := m.runDir(id)
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	return os.Chmod(dir, 0o777|os.ModeSticky)
}

// removeRunDir removes that folder, durably. Idempotent. The engine removes other files that the
// sandbox has put there: the node's user may not enter the sandbox's folders, and lacks the
// descriptors for a deep tree.
func (m *Manager) removeRunDir(ctx context.Context, id ID) error {
	dir := m.runDir(id)
	for _, path := range []string{m.socketPath(id), filepath.Join(dir, guest.SandboxSocketName)} {
		_ = os.Remove(path) // or the folder is not empty
	}
	if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
		if err := m.deps.Engine.RemoveFolder(ctx, dir); err != nil {
			return err
		}
	}
	return durable.Sync(filepath.Dir(dir))
}
