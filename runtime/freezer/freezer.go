// Package freezer stops and resumes sandboxes by cgroup v2's own freezer, sets
// their limits and reads their CPU time.
//
// Each sandbox has one cgroup, <subtree>/sandboxes/<id>, and its container's
// cgroups are below it. That cgroup belongs to the node, not to the engine or
// the container, so that freezing, accounting and limits do not depend on how
// the engine lays out its own.
//
// https://docs.kernel.org/admin-guide/cgroup-v2.html
package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// MountPoint is where cgroup v2 is mounted, by convention of every container
// runtime. Cgroup parents are given relative to it.
const MountPoint = "/sys/fs/cgroup"

const (
	// spin is how long Freeze reads cgroup.events without pause. A freeze takes
	// 30 to 70 µs when a core is free for each process that has to stop; and a
	// notification may come 10 ms late, because the kernel sends at most one
	// per 10 ms and file (CGROUP_FILE_NOTIFY_MIN_INTV).
	spin = 200 * time.Microsecond
	// pause is the longest wait for a notification before looking again.
	pause = time.Millisecond

	// cpuPeriod is the kernel's default, in microseconds, and cpuQuotaMin the
	// least quota it accepts.
	cpuPeriod   = 100_000
	cpuQuotaMin = 1_000

	// removeWait bounds how long Remove waits for processes that were killed
	// to be gone; the kernel takes milliseconds.
	removeWait = 2 * time.Second
)

// Freezer freezes by writing cgroup.freeze. Make one with Open.
type Freezer struct {
	dir      string   // …/sandboxes
	shared   *os.File // dir, locked: one lock for each Freezer on it
	enforced []string // controllers that are delegated down to a sandbox

	mu    sync.Mutex
	boxes map[sandbox.ID]*box
}

// box is one sandbox's cgroup.
type box struct {
	dir string
	// turn is held by whoever freezes or thaws: a channel, because waiting for
	// it must end with a context.
	turn chan struct{}
}

// Open uses the cgroup v2 subtree at dir, such as /sys/fs/cgroup/doze, which
// must belong to this process's user. What it needs there it makes. Several nodes may
// share a subtree.
func Open(dir string) (*Freezer, error) {
	dir = filepath.Clean(dir)
	if !strings.HasPrefix(dir, MountPoint+"/") {
		return nil, fmt.Errorf("cgroup subtree %q is not below %s", dir, MountPoint)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, fmt.Errorf("cgroup subtree %s: %w", dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("%s is no cgroup v2; start the node by packaging/host/enter", dir)
	}
	f := &Freezer{dir: filepath.Join(dir, "sandboxes"), boxes: make(map[sandbox.ID]*box)}
	if err := os.Mkdir(f.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making the sandboxes' cgroup: %w", err)
	}
	enforced, err := delegate(dir, f.dir)
	if err != nil {
		return nil, err
	}
	f.enforced = enforced
	if f.shared, err = os.Open(f.dir); err == nil {
		err = flock(f.shared, unix.LOCK_SH)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock the sandboxes' cgroup: %w", err), f.Close())
	}
	return f, nil
}

// Close ends the use of the subtree. The sandboxes' cgroups stay.
func (f *Freezer) Close() error {
	if f.shared == nil {
		return nil
	}
	return f.shared.Close()
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// RemoveStale removes the empty cgroups of sandboxes that are not known, which a crash or
// an earlier version left, and returns how many. The kernel refuses to remove a cgroup
// with a process. While another node uses the subtree none is removed: an empty one may
// be that of a container which it is about to start. No sandbox that is not known may be prepared
// meanwhile.
func (f *Freezer) RemoveStale(known func(sandbox.ID) bool) (removed int, err error) {
	err = flock(f.shared, unix.LOCK_EX|unix.LOCK_NB)
	// A lock that changes its kind is released first, also if that fails.
	defer func() { err = errors.Join(err, flock(f.shared, unix.LOCK_SH)) }()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("lock the sandboxes' cgroup: %w", err)
	}
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return 0, fmt.Errorf("list the sandboxes' cgroups: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		id := sandbox.ID(entry.Name())
		if !entry.IsDir() || !sandbox.IsID(entry.Name()) || known(id) {
			continue
		}
		switch err := removeTree(filepath.Join(f.dir, entry.Name())); {
		case err == nil:
			removed++
		case !errors.Is(err, syscall.EBUSY):
			errs = append(errs, err)
		}
	}
	return removed, errors.Join(errs...)
}

// delegate hands the controllers of our limits from the subtree to the
// sandboxes, as far as the kernel offers them there, and returns which.
func delegate(subtree, sandboxes string) ([]string, error) {
	var enforced []string
	for _, name := range []string{"cpu", "memory", "pids"} {
		// The subtree's own hand-on fails while a process is directly in it,
		// which whoever prepared the subtree has ruled out, or has not.
		enable(subtree, name)
		enable(sandboxes, name)
		on, err := os.ReadFile(filepath.Join(sandboxes, "cgroup.subtree_control"))
		if err != nil {
			return nil, fmt.Errorf("reading the sandboxes' controllers: %w", err)
		}
		if slices.Contains(strings.Fields(string(on)), name) {
			enforced = append(enforced, name)
		}
	}
	return enforced, nil
}

// enable hands controller name on to dir's children. Whether it did is read
// back by the caller.
func enable(dir, name string) {
	_ = write(dir, "cgroup.subtree_control", "+"+name)
}

// Enforced names the limits that are enforced.
func (f *Freezer) Enforced() []string { return slices.Clone(f.enforced) }

// Prepare makes the sandbox's cgroup with its limits, or sets the limits of
// the one that is there, and returns the parent for the container.
func (f *Freezer) Prepare(id sandbox.ID, limits sandbox.Limits) (string, error) {
	if !valid(id) {
		return "", fmt.Errorf("%q is no sandbox id", id)
	}
	dir := filepath.Join(f.dir, string(id))
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("making the cgroup of %s: %w", id, err)
	}
	if err := f.limit(dir, limits); err != nil {
		return "", fmt.Errorf("limiting %s: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.boxes[id] == nil {
		f.boxes[id] = &box{dir: dir, turn: make(chan struct{}, 1)}
	}
	return strings.TrimPrefix(dir, MountPoint), nil
}

// limit writes the limits whose controllers are there.
func (f *Freezer) limit(dir string, limits sandbox.Limits) error {
	for _, controller := range f.enforced {
		switch controller {
		case "cpu":
			if err := write(dir, "cpu.max", cpuMax(limits.CPUs)); err != nil {
				return err
			}
		case "memory":
			if err := write(dir, "memory.max", orMax(limits.Memory)); err != nil {
				return err
			}
			// Without this a sandbox at its limit moves on into the node's
			// swap. A kernel without swap accounting lacks the file.
			swap := "0"
			if limits.Memory == 0 {
				swap = "max"
			}
			if err := write(dir, "memory.swap.max", swap); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		case "pids":
			if err := write(dir, "pids.max", orMax(limits.PIDs)); err != nil {
				return err
			}
		}
	}
	return nil
}

func cpuMax(cpus float64) string {
	if cpus <= 0 {
		return "max " + strconv.Itoa(cpuPeriod)
	}
	quota := max(int64(cpus*cpuPeriod), cpuQuotaMin)
	return fmt.Sprintf("%d %d", quota, cpuPeriod)
}

func orMax(n int64) string {
	if n <= 0 {
		return "max"
	}
	return strconv.FormatInt(n, 10)
}

// Freeze returns when every process is frozen. When ctx ends before that, the
// sandbox is thawed again and Freeze returns ctx's error.
func (f *Freezer) Freeze(ctx context.Context, id sandbox.ID) error {
	b, err := f.take(ctx, id)
	if err != nil {
		return fmt.Errorf("freezing %s: %w", id, err)
	}
	defer b.leave()
	if err := b.freeze(ctx); err != nil {
		return fmt.Errorf("freezing %s: %w", id, errors.Join(err, write(b.dir, "cgroup.freeze", "0")))
	}
	return nil
}

func (b *box) freeze(ctx context.Context) error {
	if err := write(b.dir, "cgroup.freeze", "1"); err != nil {
		return err
	}
	return AwaitFrozen(ctx, b.dir)
}

// AwaitFrozen returns when every process of the cgroup at dir, and below it, is
// frozen. Whoever freezes it has said so already: this waits for the kernel.
func AwaitFrozen(ctx context.Context, dir string) error {
	events, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return err
	}
	defer events.Close()
	fd := int(events.Fd()) // kernfs files are not Go's poller's: they block
	start := time.Now()
	var buf [128]byte
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("its processes did not all stop: %w", err)
		}
		n, err := unix.Pread(fd, buf[:], 0)
		if err != nil {
			return fmt.Errorf("reading cgroup.events: %w", err)
		}
		if strings.Contains(string(buf[:n]), "frozen 1\n") {
			return nil
		}
		if time.Since(start) < spin {
			runtime.Gosched()
			continue
		}
		// The read above marked what was seen, so no change is missed.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(pause/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for cgroup.events: %w", err)
		}
	}
}

// Thaw returns once the processes may run.
func (f *Freezer) Thaw(ctx context.Context, id sandbox.ID) error {
	b, err := f.take(ctx, id)
	if err != nil {
		return fmt.Errorf("thawing %s: %w", id, err)
	}
	defer b.leave()
	if err := write(b.dir, "cgroup.freeze", "0"); err != nil {
		return fmt.Errorf("thawing %s: %w", id, err)
	}
	return nil
}

// Frozen says whether Freeze is in force.
func (f *Freezer) Frozen(ctx context.Context, id sandbox.ID) (bool, error) {
	b, err := f.take(ctx, id)
	if err != nil {
		return false, fmt.Errorf("reading the freezer of %s: %w", id, err)
	}
	defer b.leave()
	value, err := os.ReadFile(filepath.Join(b.dir, "cgroup.freeze"))
	if err != nil {
		return false, fmt.Errorf("reading the freezer of %s: %w", id, err)
	}
	return strings.TrimSpace(string(value)) == "1", nil
}

// CPUTime is the total user and system time of the sandbox, that of processes
// which have ended included.
func (f *Freezer) CPUTime(_ context.Context, id sandbox.ID) (time.Duration, error) {
	b, err := f.box(id)
	if err != nil {
		return 0, fmt.Errorf("reading the CPU time of %s: %w", id, err)
	}
	stat, err := os.ReadFile(filepath.Join(b.dir, "cpu.stat"))
	if err != nil {
		return 0, fmt.Errorf("reading the CPU time of %s: %w", id, err)
	}
	for line := range strings.Lines(string(stat)) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			usec, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("reading the CPU time of %s: %w", id, err)
			}
			return time.Duration(usec) * time.Microsecond, nil
		}
	}
	return 0, fmt.Errorf("reading the CPU time of %s: cpu.stat has no usage_usec", id)
}

// Remove forgets the sandbox and removes its cgroup. Processes that are being
// killed are waited for, at most two seconds.
func (f *Freezer) Remove(id sandbox.ID) error {
	if !valid(id) {
		return nil // never prepared
	}
	f.mu.Lock()
	delete(f.boxes, id)
	f.mu.Unlock()
	dir := filepath.Join(f.dir, string(id))
	deadline := time.Now().Add(removeWait)
	for {
		err := removeTree(dir)
		if err == nil || !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
			if err != nil {
				return fmt.Errorf("removing the cgroup of %s: %w", id, err)
			}
			return nil
		}
		waitEmpty(dir, deadline)
	}
}

// removeTree removes a cgroup and those below it, deepest first.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		if err := removeTree(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	// Rmdir and not os.Remove, which would try to unlink first.
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

// waitEmpty waits for a change of dir's cgroup.events, some milliseconds at
// most and not beyond the deadline.
func waitEmpty(dir string, deadline time.Time) {
	const look = 10 * time.Millisecond
	events, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return // gone: removeTree will see
	}
	defer events.Close()
	fd := int(events.Fd())
	var buf [128]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return
	}
	wait := min(look, time.Until(deadline))
	if strings.Contains(string(buf[:n]), "populated 0\n") {
		wait = time.Millisecond // its processes are gone but not yet reaped
	}
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(max(wait, 0).Milliseconds()))
}

func (f *Freezer) box(id sandbox.ID) (*box, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.boxes[id]
	if b == nil {
		return nil, fmt.Errorf("its cgroup was not prepared: %w", sandbox.ErrNotFound)
	}
	return b, nil
}

// take returns the box once it is the caller's turn with it; the caller leaves.
func (f *Freezer) take(ctx context.Context, id sandbox.ID) (*box, error) {
	b, err := f.box(id)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case b.turn <- struct{}{}:
		return b, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (b *box) leave() { <-b.turn }

// valid keeps ids from naming anything but one folder.
func valid(id sandbox.ID) bool {
	if id == "" || len(id) > 64 {
		return false
	}
	return strings.IndexFunc(string(id), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}) < 0
}

// write writes a value to one of dir's files. Cgroup files take a value in one
// write or refuse it; os.WriteFile would also try to create and truncate.
func write(dir, name, value string) error {
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.WriteString(value)
	return err
}

var _ sandbox.Freezer = (*Freezer)(nil)
