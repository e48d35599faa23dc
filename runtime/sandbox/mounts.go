package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Mount is a bucket of an object store that is mounted as a folder of a sandbox.
type Mount struct {
	Bucket string `json:"bucket"` // name in the node's configuration
	// Prefix is the folder in the bucket, without a slash at its ends; empty: the whole bucket.
	Prefix    string    `json:"prefix,omitempty"`
	Path      string    `json:"path"` // absolute
	ReadOnly  bool      `json:"read_only,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// Buckets mounts buckets in sandboxes. All methods are safe for concurrent use.
type Buckets interface {
	// Names returns the names of the buckets in order.
	Names() []string
	// Check returns nil if the object store accepts the credentials and has the bucket. It returns
	// ErrBucketNotFound (wrapped) or *ObjectStoreError.
	Check(ctx context.Context, m Mount) error
	// Mount mounts a bucket at m.Path, a folder of the sandbox whose first process is pid, in place of any earlier
	// mount there. The sandbox may be frozen. Mount does not contact the object store. The mount remains until
	// Unmount, Forget, or the end of the node, and while the generation is the returned one. It returns
	// ErrBucketNotFound, ErrNoMountPoint or ErrNoFUSE (wrapped).
	Mount(ctx context.Context, id ID, pid int, m Mount) (generation int64, err error)
	// Unmount removes the mount at a path; open files remain usable. It does nothing if there is none.
	Unmount(ctx context.Context, id ID, pid int, path string) error
	// Generation returns a number that increases when the mounts of all sandboxes have failed.
	Generation() int64
	// Lost receives a value after that. The caller mounts them again.
	Lost() <-chan struct{}
	// Forget ends the mounts of a sandbox whose container has ended, or is about to.
	Forget(id ID, pid int)
}

var (
	// ErrBucketNotFound means that the node has no bucket of that name.
	ErrBucketNotFound = errors.New("the node does not have the bucket")
	// ErrMountNotFound means that nothing is mounted at that path.
	ErrMountNotFound = errors.New("no bucket is mounted there")
	// ErrMountExists means that another bucket is mounted at that path, below it, or above it.
	ErrMountExists = errors.New("a bucket is mounted there")
	// ErrNoMountPoint means that a path is not a folder in the sandbox.
	ErrNoMountPoint = errors.New("the path cannot be a mount point")
	// ErrNoFUSE means that the node cannot use /dev/fuse.
	ErrNoFUSE = errors.New("the node cannot use FUSE")
)

const (
	// maxMounts bounds the mounts of a sandbox.
	maxMounts = 16
	// maxMountPath is the kernel's limit of a path (PATH_MAX, without the zero byte).
	maxMountPath = 4095
	// maxMountPrefix leaves half of a key, which has up to 1,024 bytes, to the names of files.
	maxMountPrefix = 512
	// mountWait bounds one mount, or the mounts of a sandbox together. A mount takes some milliseconds, and 2 s if Podman
	// has to create its user namespace.
	mountWait = 20 * time.Second
)

// Mount mounts a bucket in a sandbox, which it wakes, and returns the mount. It creates the folder if necessary. It
// changes nothing if the same bucket is already mounted there in the same way. Cold starts mount it again. Errors:
// *InvalidError, ErrDestroyed, ErrMountExists, ErrNoMountPoint, ErrNoFUSE, *ObjectStoreError, and the errors of Acquire.
func (m *Manager) Mount(ctx context.Context, id ID, mount Mount) (Mount, error) {
	b, err := m.live(id)
	if err != nil {
		return Mount{}, err
	}
	mount.Prefix = strings.TrimSuffix(mount.Prefix, "/")
	if err := m.validateMount(mount); err != nil {
		return Mount{}, err
	}
	if same, err := b.findMount(mount); err != nil || same != nil {
		return valueOf(same), err
	}
	if err := m.deps.Buckets.Check(ctx, mount); err != nil {
		return Mount{}, err
	}
	lease, err := m.Acquire(ctx, id, CauseFiles)
	if err != nil {
		return Mount{}, err
	}
	defer lease.Release()
	if err := b.lockUsable(ctx); err != nil {
		return Mount{}, err
	}
	defer b.unlockTransition()
	b.updating.Lock()
	defer b.updating.Unlock()
	if same, err := b.findMount(mount); err != nil || same != nil { // mounted meanwhile
		return valueOf(same), err
	}
	if len(b.view.Load().Mounts) >= maxMounts {
		return Mount{}, &InvalidError{Field: "path", Reason: fmt.Sprintf("is one more than the %d mounts that a sandbox can have", maxMounts), Want: "unmount a bucket first"}
	}
	start := time.Now()
	mount.CreatedAt = start.UTC()
	err = b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Mounts = withMount(sb.Mounts, mount) },
		func(sb *Sandbox) { sb.Mounts = withoutMount(sb.Mounts, mount.Path) })
	if err != nil {
		return Mount{}, err
	}
	if err := b.mountNow(ctx, mount); err != nil {
		err = errors.Join(err, b.unmountNow(ctx, mount.Path)) // a call that took too long may have mounted it
		b.change(func(sb *Sandbox) { sb.Mounts = withoutMount(sb.Mounts, mount.Path) })
		return Mount{}, errors.Join(err, b.save(context.WithoutCancel(ctx)))
	}
	b.emit(Event{Type: EventMounted, Bucket: mount.Bucket, Path: mount.Path, DurationMS: milliseconds(time.Since(start))})
	return mount, nil
}

// Unmount removes a mount from a sandbox in any state, and never wakes it. Open files remain usable until they are
// closed. Errors: ErrMountNotFound, ErrDestroyed, and the errors of the Store.
func (m *Manager) Unmount(ctx context.Context, id ID, path string) error {
	b, err := m.live(id)
	if err != nil {
		return err
	}
	if err := b.lockUsable(ctx); err != nil { // no start mounts it meanwhile
		return err
	}
	defer b.unlockTransition()
	b.updating.Lock()
	defer b.updating.Unlock()
	i := slices.IndexFunc(b.view.Load().Mounts, func(have Mount) bool { return have.Path == path })
	if i < 0 {
		return fmt.Errorf("%s of sandbox %s: %w", clip(path), b, ErrMountNotFound)
	}
	mount, start := b.view.Load().Mounts[i], time.Now()
	err = b.changeSaved(ctx,
		func(sb *Sandbox) { sb.Mounts = withoutMount(sb.Mounts, path) },
		func(sb *Sandbox) { sb.Mounts = withMount(sb.Mounts, mount) })
	if err != nil {
		return err
	}
	if err := b.unmountNow(ctx, path); err != nil {
		b.change(func(sb *Sandbox) { sb.Mounts = withMount(sb.Mounts, mount) })
		return errors.Join(err, b.save(context.WithoutCancel(ctx)))
	}
	if !b.lacksMounts() {
		b.endConditionOf(ConditionMountFailed)
	}
	b.emit(Event{Type: EventUnmounted, Bucket: mount.Bucket, Path: mount.Path, DurationMS: milliseconds(time.Since(start))})
	return nil
}

func valueOf(m *Mount) Mount {
	if m == nil {
		return Mount{}
	}
	return *m
}

// findMount returns the mount of the sandbox that is as wanted, nil if its path is free, and ErrMountExists otherwise.
func (b *liveSandbox) findMount(want Mount) (*Mount, error) {
	for _, have := range b.view.Load().Mounts {
		want.CreatedAt = have.CreatedAt
		if have == want {
			return &have, nil
		}
		if within(have.Path, want.Path) || within(want.Path, have.Path) {
			return nil, fmt.Errorf("%s is at %s: %w", have.Bucket, have.Path, ErrMountExists)
		}
	}
	return nil, nil
}

func (m *Manager) validateMount(mount Mount) error {
	if names := m.deps.Buckets.Names(); !slices.Contains(names, mount.Bucket) {
		want := "configure one with bucket in the Caddyfile"
		if len(names) > 0 {
			want = "use " + strings.Join(names, ", ")
		}
		return &InvalidError{Field: "bucket", Reason: fmt.Sprintf("%q is not a bucket of the node", clip(mount.Bucket)), Want: want}
	}
	if reason := badPrefix(mount.Prefix); reason != "" {
		return &InvalidError{Field: "prefix", Reason: reason, Want: "write it like datasets/2026"}
	}
	if reason := badMountPath(mount.Path); reason != "" {
		return &InvalidError{Field: "path", Reason: reason, Want: "write it like /data"}
	}
	return nil
}

// badPrefix returns what is wrong with a prefix, or an empty string.
func badPrefix(prefix string) string {
	switch {
	case len(prefix) > maxMountPrefix:
		return fmt.Sprintf("has %d bytes; %d are possible", len(prefix), maxMountPrefix)
	case !utf8.ValidString(prefix) || strings.ContainsRune(prefix, 0):
		return "is not text in UTF-8"
	case prefix != "" && (prefix != path.Clean(prefix) || strings.HasPrefix(prefix, "/") || strings.HasPrefix(prefix+"/", "../") || prefix == "."):
		return fmt.Sprintf("%q is not a folder in a bucket", clip(prefix))
	}
	return ""
}

// badMountPath returns what is wrong with a path, or an empty string.
func badMountPath(p string) string {
	switch {
	case len(p) > maxMountPath:
		return fmt.Sprintf("has %d bytes; %d are possible", len(p), maxMountPath)
	case !utf8.ValidString(p) || strings.ContainsRune(p, 0):
		return "is not text in UTF-8"
	case !path.IsAbs(p) || p != path.Clean(p):
		return fmt.Sprintf("%q is not an absolute path without . and ..", clip(p))
	case p == "/" || slices.ContainsFunc(unselectable, func(folder string) bool { return within(p, folder) }):
		return fmt.Sprintf("%q cannot be a mount point", clip(p))
	}
	return ""
}

// withMount returns mounts with m, sorted by path.
func withMount(mounts []Mount, m Mount) []Mount {
	mounts = append(withoutMount(mounts, m.Path), m)
	slices.SortFunc(mounts, func(a, b Mount) int { return strings.Compare(a.Path, b.Path) })
	return mounts
}

// withoutMount returns a copy of mounts without the one at a path.
func withoutMount(mounts []Mount, path string) []Mount {
	return slices.DeleteFunc(slices.Clone(mounts), func(have Mount) bool { return have.Path == path })
}

// mountNow mounts a bucket in the sandbox, which is running, and creates the folder. Needs the transition lock.
func (b *liveSandbox) mountNow(ctx context.Context, m Mount) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mountWait) // it ends, also without its client
	defer cancel()
	if _, err := b.guest.Mkdir(ctx, m.Path, 0o755); err != nil {
		return fmt.Errorf("%w: create the folder %s: %w", ErrNoMountPoint, m.Path, err)
	}
	return b.mountAgain(ctx, m)
}

// mountAgain mounts a bucket at a folder that exists. Needs the transition lock.
func (b *liveSandbox) mountAgain(ctx context.Context, m Mount) error {
	generation, err := b.m.deps.Buckets.Mount(ctx, b.id, int(b.pid.Load()), m)
	if err != nil {
		return err // a mount that has ended stays, so that programs do not write to the folder below it
	}
	b.mounted.add(m.Path, generation)
	return nil
}

// unmountNow removes a mount if the sandbox has a container that runs or is frozen. Needs the transition lock.
func (b *liveSandbox) unmountNow(ctx context.Context, path string) error {
	pid := int(b.pid.Load())
	if pid == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mountWait)
	defer cancel()
	b.mounted.remove(path) // also if it fails: then its file system may have ended, and it is mounted again
	return b.m.deps.Buckets.Unmount(ctx, b.id, pid, path)
}

// mountAll mounts the buckets of a sandbox whose container has started. Its programs must not run without them, because
// they would write into the folders below. Needs the transition lock.
func (b *liveSandbox) mountAll(ctx context.Context) error {
	for _, m := range b.view.Load().Mounts {
		if err := b.mountNow(ctx, m); err != nil {
			return fmt.Errorf("mount the bucket %s at %s: %w", m.Bucket, m.Path, err)
		}
	}
	return nil
}

// missingMounts returns the mounts that the sandbox's container lacks: all, when the node has just started or the mounts
// were lost, and otherwise those that failed.
func (b *liveSandbox) missingMounts() []Mount {
	if b.pid.Load() == 0 {
		return nil
	}
	generation := b.m.deps.Buckets.Generation()
	return slices.DeleteFunc(slices.Clone(b.view.Load().Mounts), func(m Mount) bool { return b.mounted.has(m.Path, generation) })
}

func (b *liveSandbox) lacksMounts() bool { return len(b.missingMounts()) > 0 }

// remount mounts the buckets that the sandbox lacks, frozen or not, within mountWait. Needs the transition lock.
func (b *liveSandbox) remount(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mountWait)
	defer cancel()
	var failed error
	for _, m := range b.missingMounts() {
		if err := b.mountAgain(ctx, m); err != nil {
			failed = errors.Join(failed, fmt.Errorf("mount the bucket %s at %s: %w", m.Bucket, m.Path, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return failed
}

// noteRemounted records whether the buckets are mounted again. After an error the sandbox runs on, its folders are not
// usable, and runCheck tries again. Another condition stays. Needs the transition lock.
func (b *liveSandbox) noteRemounted(err error) {
	if err == nil {
		b.endConditionOf(ConditionMountFailed)
		return
	}
	b.failures.Add(1)
	b.m.log.Error("failed to mount the buckets of a sandbox again, trying again", "sandbox", b.id, "error", err)
	if code := b.view.Load().Condition.Code; code == "" || code == ConditionMountFailed {
		b.setCondition(ConditionMountFailed, "a bucket is not mounted; the node tries again: "+err.Error())
	}
}

// awaitLostMounts makes all sandboxes mount their buckets again whenever the mounts are lost, until ctx ends.
func (m *Manager) awaitLostMounts(ctx context.Context) {
	for {
		select {
		case <-m.deps.Buckets.Lost():
		case <-ctx.Done():
			return
		}
		m.mu.RLock()
		sandboxes := slices.Collect(maps.Values(m.sandboxes))
		m.mu.RUnlock()
		for _, b := range sandboxes {
			if b.lacksMounts() {
				b.armIn(0)
			}
		}
	}
}

// mountedPaths are the paths at which the sandbox's container has its buckets, unless they were lost. It is safe for
// concurrent use.
type mountedPaths struct {
	mu    sync.Mutex
	paths map[string]int64 // the generations of the mounts, see Buckets
}

func (p *mountedPaths) add(path string, generation int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paths == nil {
		p.paths = map[string]int64{}
	}
	p.paths[path] = generation
}

func (p *mountedPaths) remove(path string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.paths, path)
}

func (p *mountedPaths) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.paths)
}

func (p *mountedPaths) has(path string, generation int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	of, ok := p.paths[path]
	return ok && of == generation
}

// noBuckets are the buckets of a node without any.
type noBuckets struct{}

func (noBuckets) Names() []string                                      { return nil }
func (noBuckets) Check(context.Context, Mount) error                   { return ErrBucketNotFound }
func (noBuckets) Mount(context.Context, ID, int, Mount) (int64, error) { return 0, ErrBucketNotFound }
func (noBuckets) Generation() int64                                    { return 0 }
func (noBuckets) Unmount(context.Context, ID, int, string) error       { return nil }
func (noBuckets) Lost() <-chan struct{}                                { return nil }
func (noBuckets) Forget(ID, int)                                       {}
