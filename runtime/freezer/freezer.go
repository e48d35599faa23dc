// Package freezer freezes and thaws sandboxes with the freezer of cgroup v2, sets
// their limits, reads their CPU time and memory, and reclaims the memory of sleeping ones.
//
// Each sandbox has one cgroup, <subtree>/sandboxes/<id>; its container's cgroups are
// below it. That cgroup belongs to the node, not to the engine or the container, so
// that freezing, accounting and limits do not depend on the engine's cgroup layout.
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

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/sandbox"
)

// MountPoint is where cgroup v2 is mounted, by convention of every container
// runtime. Prepare returns cgroups relative to it.
const MountPoint = "/sys/fs/cgroup"

const (
	// spin is how long Freeze reads cgroup.events without pause. A freeze takes
	// 30 to 70 µs if each process that has to stop finds a free core, whereas a
	// notification can be 10 ms late: the kernel sends at most one per 10 ms and
	// file (CGROUP_FILE_NOTIFY_MIN_INTV).
	spin = 200 * time.Microsecond
	// pause is the longest wait for a notification before the file is read again.
	pause = time.Millisecond

	// cpuPeriod is the kernel's default period of cpu.max, and cpuQuotaMin the
	// smallest quota that the kernel accepts, both in microseconds.
	cpuPeriod   = 100_000
	cpuQuotaMin = 1_000

	// swapMax is missing in a kernel without swap accounting.
	swapMax = "memory.swap.max"

	// removeWait bounds how long Remove waits for killed processes to exit, which
	// takes milliseconds.
	removeWait = 2 * time.Second
	// removePause is the pause between two attempts of Remove. A notification of the
	// kernel can be 10 ms late, see spin.
	removePause = time.Millisecond
)

// Freezer freezes sandboxes by writing to cgroup.freeze. Its methods may be called
// concurrently. Create one with Open.
type Freezer struct {
	dir      string   // …/sandboxes
	shared   *os.File // dir, with a shared lock for each Freezer on it
	enforced []string // controllers that are delegated down to the sandboxes

	mu      sync.Mutex
	cgroups map[sandbox.ID]*cgroup
}

// cgroup is one sandbox's cgroup.
type cgroup struct {
	dir string
	// sem serializes reads and writes of cgroup.freeze. It is not a mutex because
	// waiting for it must end with a context.
	sem *semaphore.Weighted
}

// Open uses the cgroup v2 subtree at dir, such as /sys/fs/cgroup/doze, which must
// belong to this process's user, and creates the cgroup of the sandboxes in it. Several
// nodes may share a subtree. The caller closes the Freezer.
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
		return nil, fmt.Errorf("%s is not a cgroup v2 subtree; start the node with packaging/host/enter", dir)
	}
	f := &Freezer{dir: filepath.Join(dir, "sandboxes"), cgroups: make(map[sandbox.ID]*cgroup)}
	if err := os.Mkdir(f.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create the sandboxes' cgroup: %w", err)
	}
	var err error
	if f.enforced, err = delegate(dir, f.dir); err != nil {
		return nil, err
	}
	if f.shared, err = os.Open(f.dir); err != nil {
		return nil, fmt.Errorf("lock the sandboxes' cgroup: %w", err)
	}
	if err := flock(f.shared, unix.LOCK_SH); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the sandboxes' cgroup: %w", err), f.Close())
	}
	return f, nil
}

// Close releases the lock on the subtree. The sandboxes' cgroups remain.
func (f *Freezer) Close() error { return f.shared.Close() }

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// RemoveStale removes the empty cgroups of unknown sandboxes, left over from a crash or an
// earlier version, and returns their number. Cgroups with processes remain: the kernel
// refuses to remove them. While another node uses the subtree, RemoveStale removes none,
// because an empty cgroup may belong to a container that the other node is about to start.
// Callers must not Prepare an unknown sandbox before RemoveStale returns.
func (f *Freezer) RemoveStale(known func(sandbox.ID) bool) (removed int, err error) {
	err = flock(f.shared, unix.LOCK_EX|unix.LOCK_NB)
	// Converting a lock releases it first, even if the conversion then fails.
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

// delegate enables the controllers of the limits for the subtree's and the sandboxes'
// children, and returns those that the kernel enabled.
func delegate(subtree, sandboxes string) ([]string, error) {
	var enforced []string
	for _, name := range []string{"cpu", "memory", "pids"} {
		// The kernel refuses this for the subtree while a process is directly in it;
		// packaging/host/enter starts the node in a child of the subtree.
		_ = write(subtree, "cgroup.subtree_control", "+"+name)
		_ = write(sandboxes, "cgroup.subtree_control", "+"+name)
		enabled, err := os.ReadFile(filepath.Join(sandboxes, "cgroup.subtree_control"))
		if err != nil {
			return nil, fmt.Errorf("read the sandboxes' controllers: %w", err)
		}
		if slices.Contains(strings.Fields(string(enabled)), name) {
			enforced = append(enforced, name)
		}
	}
	return enforced, nil
}

// Enforced returns the limits that are enforced, of "cpu", "memory" and "pids".
func (f *Freezer) Enforced() []string { return slices.Clone(f.enforced) }

// Prepare creates the sandbox's cgroup if it does not exist, sets its limits, and returns
// it, relative to MountPoint, as the cgroup parent of the container. Limits that are not
// Enforced are ignored.
func (f *Freezer) Prepare(id sandbox.ID, limits sandbox.Limits) (string, error) {
	if !sandbox.IsID(string(id)) {
		return "", fmt.Errorf("invalid sandbox id %q", id)
	}
	dir := filepath.Join(f.dir, string(id))
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("create the cgroup of %s: %w", id, err)
	}
	if err := f.setLimits(dir, limits); err != nil {
		return "", fmt.Errorf("set the limits of %s: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cgroups[id] == nil {
		f.cgroups[id] = &cgroup{dir: dir, sem: semaphore.NewWeighted(1)}
	}
	return strings.TrimPrefix(dir, MountPoint), nil
}

// setLimits writes the limits whose controllers are enabled.
func (f *Freezer) setLimits(dir string, limits sandbox.Limits) error {
	// Otherwise a sandbox at its limit uses the node's swap. Reclaim lifts this for itself.
	swap := "0"
	if limits.Memory == 0 {
		swap = "max"
	}
	for _, limit := range []struct{ controller, file, value string }{
		{"cpu", "cpu.max", cpuMax(limits.CPUs)},
		{"memory", "memory.max", orMax(limits.Memory)},
		{"memory", swapMax, swap},
		{"pids", "pids.max", orMax(limits.PIDs)},
	} {
		if !slices.Contains(f.enforced, limit.controller) {
			continue
		}
		if err := write(dir, limit.file, limit.value); err != nil && !(limit.file == swapMax && errors.Is(err, fs.ErrNotExist)) {
			return err
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

// Freeze returns when every process is frozen. If it fails, it thaws the sandbox again;
// if ctx ends first, it returns ctx's error (wrapped). A sandbox that was not prepared
// returns sandbox.ErrNotFound (wrapped).
func (f *Freezer) Freeze(ctx context.Context, id sandbox.ID) error {
	return f.locked(ctx, id, "freeze", func(dir string) error {
		err := write(dir, "cgroup.freeze", "1")
		if err == nil {
			err = AwaitFrozen(ctx, dir)
		}
		if err != nil {
			return errors.Join(err, write(dir, "cgroup.freeze", "0"))
		}
		return nil
	})
}

// AwaitFrozen waits until every process in the cgroup at dir, and below it, is frozen, or
// ctx ends. The caller has already requested the freeze, by cgroup.freeze or through an
// engine.
func AwaitFrozen(ctx context.Context, dir string) error {
	events, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return err
	}
	defer events.Close()
	fd := int(events.Fd()) // blocking: Go's poller does not handle kernfs files
	start := time.Now()
	var buf [128]byte
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("not all of its processes stopped: %w", err)
		}
		n, err := unix.Pread(fd, buf[:], 0)
		if err != nil {
			return fmt.Errorf("read cgroup.events: %w", err)
		}
		if strings.Contains(string(buf[:n]), "frozen 1\n") {
			return nil
		}
		if time.Since(start) < spin {
			runtime.Gosched()
			continue
		}
		// The read above marked that state as seen, so Poll misses no later change.
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(pause/time.Millisecond))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for cgroup.events: %w", err)
		}
	}
}

// Thaw lets the processes run again. It returns as soon as they may run. A sandbox that
// was not prepared returns sandbox.ErrNotFound (wrapped).
func (f *Freezer) Thaw(ctx context.Context, id sandbox.ID) error {
	return f.locked(ctx, id, "thaw", func(dir string) error { return write(dir, "cgroup.freeze", "0") })
}

// Frozen reports whether Freeze is in force, also a Freeze by another process. It waits
// for a concurrent Freeze or Thaw.
func (f *Freezer) Frozen(ctx context.Context, id sandbox.ID) (frozen bool, err error) {
	err = f.locked(ctx, id, "read the freezer of", func(dir string) error {
		value, err := os.ReadFile(filepath.Join(dir, "cgroup.freeze"))
		frozen = strings.TrimSpace(string(value)) == "1"
		return err
	})
	return frozen, err
}

// Remove forgets the sandbox and removes its cgroup. It waits at most two seconds for
// killed processes to exit, and fails if some still run then. Removing an unknown sandbox
// succeeds.
func (f *Freezer) Remove(id sandbox.ID) error {
	if !sandbox.IsID(string(id)) {
		return nil // never prepared
	}
	f.mu.Lock()
	delete(f.cgroups, id)
	f.mu.Unlock()
	dir := filepath.Join(f.dir, string(id))
	err := removeTree(dir)
	for deadline := time.Now().Add(removeWait); errors.Is(err, syscall.EBUSY) && time.Now().Before(deadline); err = removeTree(dir) {
		time.Sleep(removePause)
	}
	if err != nil {
		return fmt.Errorf("remove the cgroup of %s: %w", id, err)
	}
	return nil
}

// removeTree removes a cgroup and all cgroups below it, deepest first.
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
	// Rmdir instead of os.Remove, which would try to unlink first.
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

func (f *Freezer) cgroup(id sandbox.ID) (*cgroup, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.cgroups[id]
	if c == nil {
		return nil, fmt.Errorf("its cgroup was not prepared: %w", sandbox.ErrNotFound)
	}
	return c, nil
}

// locked calls do with the sandbox's cgroup while its semaphore is acquired.
func (f *Freezer) locked(ctx context.Context, id sandbox.ID, what string, do func(dir string) error) error {
	c, err := f.cgroup(id)
	if err == nil {
		err = c.sem.Acquire(ctx, 1)
	}
	if err == nil {
		defer c.sem.Release(1)
		err = do(c.dir)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, id, err)
	}
	return nil
}

// write writes a value to one of dir's files. Cgroup files accept a value in a single write. An
// os.File would wait forever for the end of an EAGAIN, which memory.reclaim returns: the files
// are in Go's poller, and never become writable there.
func write(dir, name, value string) error {
	path := filepath.Join(dir, name)
	fd, err := uninterrupted(func() (int, error) { return unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if _, err := uninterrupted(func() (int, error) { return unix.Write(fd, []byte(value)) }); err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// uninterrupted calls f again while a signal interrupts it.
func uninterrupted(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}

var _ sandbox.Freezer = (*Freezer)(nil)
