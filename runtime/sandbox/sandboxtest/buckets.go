package sandboxtest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Buckets implements sandbox.Buckets for the buckets "data" and "models", and notes the mounts. Its Faults apply to
// the operations "check", "mount", "mounted", which fails after the mount, and "unmount".
type Buckets struct {
	Faults

	lost       chan struct{}
	mu         sync.Mutex
	mounts     map[mountPoint]sandbox.Mount
	generation int64
	mountCalls int
}

// mountPoint is a path in the sandbox whose first process is pid.
type mountPoint struct {
	id   sandbox.ID
	pid  int
	path string
}

// NewBuckets returns buckets without mounts.
func NewBuckets() *Buckets {
	return &Buckets{lost: make(chan struct{}), mounts: map[mountPoint]sandbox.Mount{}}
}

// Names implements sandbox.Buckets.
func (b *Buckets) Names() []string { return []string{"data", "models"} }

// Check implements sandbox.Buckets.
func (b *Buckets) Check(ctx context.Context, m sandbox.Mount) error {
	if err := b.known(m); err != nil {
		return err
	}
	return b.begin(ctx, "check")
}

func (b *Buckets) known(m sandbox.Mount) error {
	if !slices.Contains(b.Names(), m.Bucket) {
		return fmt.Errorf("bucket %q: %w", m.Bucket, sandbox.ErrBucketNotFound)
	}
	return nil
}

// Mount implements sandbox.Buckets.
func (b *Buckets) Mount(ctx context.Context, id sandbox.ID, pid int, m sandbox.Mount) (int64, error) {
	if err := cmp.Or(b.known(m), b.begin(ctx, "mount")); err != nil {
		return 0, err
	}
	if info, err := os.Stat(m.Path); err != nil || !info.IsDir() {
		return 0, fmt.Errorf("%w: %s", sandbox.ErrNoMountPoint, m.Path)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mounts[mountPoint{id, pid, m.Path}] = m
	b.mountCalls++
	return b.generation, b.begin(ctx, "mounted")
}

// Unmount implements sandbox.Buckets.
func (b *Buckets) Unmount(ctx context.Context, id sandbox.ID, pid int, path string) error {
	if err := b.begin(ctx, "unmount"); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.mounts, mountPoint{id, pid, path})
	return nil
}

// Generation implements sandbox.Buckets.
func (b *Buckets) Generation() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.generation
}

// Lost implements sandbox.Buckets.
func (b *Buckets) Lost() <-chan struct{} { return b.lost }

// Forget implements sandbox.Buckets.
func (b *Buckets) Forget(id sandbox.ID, pid int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.mounts, func(at mountPoint, _ sandbox.Mount) bool { return at.id == id && at.pid == pid })
}

// Restart ends all mounts, as the end of a node does.
func (b *Buckets) Restart() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.mounts)
}

// Lose ends all mounts, as the end of the bucket helper does, and reports it.
func (b *Buckets) Lose() {
	b.End()
	b.Report()
}

// End ends all mounts, as the end of the bucket helper does, without a report.
func (b *Buckets) End() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.mounts)
	b.generation++
}

// Report reports that mounts were lost. It returns when the Manager handles that.
func (b *Buckets) Report() { b.lost <- struct{}{} }

// MountCalls returns how many calls of Mount have succeeded.
func (b *Buckets) MountCalls() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mountCalls
}

// Mounts returns what is mounted in a sandbox, by path.
func (b *Buckets) Mounts(id sandbox.ID) map[string]sandbox.Mount {
	b.mu.Lock()
	defer b.mu.Unlock()
	mounts := map[string]sandbox.Mount{}
	for at, m := range b.mounts {
		if at.id == id {
			mounts[at.path] = m
		}
	}
	return mounts
}
