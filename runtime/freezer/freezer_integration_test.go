//go:build integration

package freezer_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/freezer"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/freezertest"
)

// countInto makes this test binary a counter, see process.
const countInto = "DOZE_TEST_COUNT_INTO"

func TestMain(m *testing.M) {
	if path := os.Getenv(countInto); path != "" {
		count(path)
	}
	os.Exit(m.Run())
}

// count increments the number in a file's first eight bytes until the process is killed.
func count(path string) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	page, err := unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	for n := uint64(1); ; n++ {
		binary.NativeEndian.PutUint64(page, n)
	}
}

// process is a counter in a process of its own.
type process struct {
	cmd  *exec.Cmd
	file *os.File
	stop sync.Once
}

func start(t testing.TB, parent string) *process {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "count"))
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Truncate(int64(os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	// A child cgroup, as an engine would create it: freezing is recursive.
	dir := filepath.Join(freezer.MountPoint, parent, fmt.Sprintf("container-%d", time.Now().UnixNano()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	p := &process{cmd: exec.Command("/proc/self/exe"), file: file}
	p.cmd.Env = append(os.Environ(), countInto+"="+file.Name())
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		UseCgroupFD: true,
		CgroupFD:    int(fd.Fd()),
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *process) Count() uint64 {
	var buf [8]byte
	if _, err := p.file.ReadAt(buf[:], 0); err != nil {
		panic(err)
	}
	return binary.NativeEndian.Uint64(buf[:])
}

func (p *process) Stop() {
	p.stop.Do(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		_ = p.file.Close()
	})
}

func open(t testing.TB) *freezer.Freezer {
	t.Helper()
	f, err := freezer.Open(os.Getenv("DOZE_CGROUP"))
	if err != nil {
		t.Fatalf("%v (run it by make test-integration)", err)
	}
	return f
}

// subtree creates a subtree that no other node uses.
func subtree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(os.Getenv("DOZE_CGROUP"), "test-"+strings.ToLower(t.Name()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Deepest first; the kernel removes only cgroups without processes.
		if err := exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").Run(); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func openAt(t *testing.T, dir string) *freezer.Freezer {
	t.Helper()
	f, err := freezer.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestEmptyCgroupsOfUnknownSandboxesAreRemoved(t *testing.T) {
	dir := subtree(t)
	const empty, nested, occupied, known = sandbox.ID("empty0000000"), sandbox.ID("nested000000"), sandbox.ID("occupied0000"), sandbox.ID("known0000000")
	earlier := openAt(t, dir)
	var c *process
	for _, id := range []sandbox.ID{empty, nested, occupied, known} {
		parent, err := earlier.Prepare(id, sandbox.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if id == occupied {
			c = start(t, parent)
			t.Cleanup(c.Stop)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "sandboxes", string(nested), "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sandboxes", "other-tool"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := earlier.Close(); err != nil {
		t.Fatal(err)
	}
	left := func() (names []string) {
		entries, err := os.ReadDir(filepath.Join(dir, "sandboxes"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
		return names
	}
	f, other := openAt(t, dir), openAt(t, dir)
	isKnown := func(id sandbox.ID) bool { return id == known }
	for range 2 { // the lock is as before
		if n, err := f.RemoveStale(isKnown); n != 0 || err != nil || len(left()) != 5 {
			t.Fatalf("with another node on the subtree: removed %d, %v; left %q", n, err, left())
		}
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if n, err := f.RemoveStale(isKnown); n != 2 || err != nil {
		t.Errorf("removed %d, %v", n, err)
	}
	if got, want := left(), []string{string(known), string(occupied), "other-tool"}; !slices.Equal(got, want) {
		t.Errorf("left %q, want %q", got, want)
	}
	// Its lock is shared again.
	openAt(t, dir)
	c.Stop()
	if err := f.Remove(occupied); err != nil {
		t.Error(err)
	}
}

func TestConformance(t *testing.T) {
	freezertest.Run(t, func(t *testing.T) freezertest.System {
		return freezertest.System{
			Freezer: open(t),
			Start: func(t testing.TB, _ sandbox.ID, parent string) freezertest.Counter {
				return start(t, parent)
			},
		}
	})
}

// The kernel reports each limit of Enforced as it was set.
func TestLimitsAreSet(t *testing.T) {
	f := open(t)
	const id = "limits000000"
	t.Cleanup(func() { _ = f.Remove(id) })
	for _, c := range []struct {
		limits sandbox.Limits
		want   map[string]string
	}{
		{sandbox.Limits{CPUs: 0.25, Memory: 256 << 20, PIDs: 128}, map[string]string{
			"cpu.max": "25000 100000", "memory.max": "268435456", "pids.max": "128"}},
		{sandbox.Limits{}, map[string]string{
			"cpu.max": "max 100000", "memory.max": "max", "pids.max": "max"}},
		{sandbox.Limits{CPUs: 0.0001}, map[string]string{"cpu.max": "1000 100000"}},
	} {
		parent, err := f.Prepare(id, c.limits)
		if err != nil {
			t.Fatal(err)
		}
		for file, want := range c.want {
			controller, _, _ := strings.Cut(file, ".")
			if !slices.Contains(f.Enforced(), controller) {
				continue
			}
			got, err := os.ReadFile(filepath.Join(freezer.MountPoint, parent, file))
			if err != nil {
				t.Fatal(err)
			}
			if strings.TrimSpace(string(got)) != want {
				t.Errorf("%+v: %s is %s, want %s", c.limits, file, got, want)
			}
		}
	}
	t.Logf("enforced here: %v", f.Enforced())
}

// A new node finds a sandbox frozen that a crashed node left frozen.
func TestFrozenReportsTheFreezeOfAnEarlierNode(t *testing.T) {
	ctx := context.Background()
	const id = "adopted00000"
	first := open(t)
	t.Cleanup(func() { _ = first.Remove(id) })
	if _, err := first.Prepare(id, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := first.Freeze(ctx, id); err != nil {
		t.Fatal(err)
	}
	second := open(t)
	if _, err := second.Prepare(id, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if frozen, err := second.Frozen(ctx, id); err != nil || !frozen {
		t.Fatalf("Frozen: %v, %v", frozen, err)
	}
}

// Remove returns an error for a sandbox whose processes do not end.
func TestRemoveFailsWhileProcessesRun(t *testing.T) {
	f := open(t)
	const id = "living000000"
	parent, err := f.Prepare(id, sandbox.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, parent)
	err = f.Remove(id)
	p.Stop()
	if err == nil {
		t.Error("Remove succeeded")
	}
	if err := f.Remove(id); err != nil {
		t.Errorf("Remove after the process ended: %v", err)
	}
}

func BenchmarkFreezeThaw(b *testing.B) {
	for _, processes := range []int{0, 1, 8} {
		b.Run(fmt.Sprintf("processes=%d", processes), func(b *testing.B) {
			f := open(b)
			id := sandbox.ID(fmt.Sprintf("bench%07d", processes))
			parent, err := f.Prepare(id, sandbox.Limits{})
			if err != nil {
				b.Fatal(err)
			}
			for range processes {
				dir := filepath.Join(freezer.MountPoint, parent, fmt.Sprintf("c%d", time.Now().UnixNano()))
				if err := os.Mkdir(dir, 0o755); err != nil {
					b.Fatal(err)
				}
				fd, err := os.Open(dir)
				if err != nil {
					b.Fatal(err)
				}
				// Idle, as the processes of a sandbox that falls asleep are.
				cmd := exec.Command("sleep", "1000")
				cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(fd.Fd()), Pdeathsig: syscall.SIGKILL}
				if err := cmd.Start(); err != nil {
					b.Fatal(err)
				}
				fd.Close()
				defer cmd.Wait()
				defer cmd.Process.Kill()
			}
			b.Cleanup(func() { _ = f.Remove(id) })
			ctx := context.Background()
			var freezing, thawing time.Duration
			for b.Loop() {
				t0 := time.Now()
				if err := f.Freeze(ctx, id); err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				if err := f.Thaw(ctx, id); err != nil {
					b.Fatal(err)
				}
				freezing += t1.Sub(t0)
				thawing += time.Since(t1)
			}
			b.ReportMetric(float64(freezing.Microseconds())/float64(b.N), "freeze-µs")
			b.ReportMetric(float64(thawing.Microseconds())/float64(b.N), "thaw-µs")
		})
	}
}
