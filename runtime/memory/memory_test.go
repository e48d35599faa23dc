package memory

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/memorytest"
	"github.com/doze-run/doze/testkit"
)

func TestConformance(t *testing.T) {
	memorytest.Run(t, func(*testing.T) sandbox.Memory { return New("/sys/fs/cgroup", "") })
}

// The kernel's own files, where it has PSI.
func TestStallsOfTheMachineAreRead(t *testing.T) {
	const file = "/proc/pressure/memory"
	text, err := os.ReadFile(file)
	stalled, ok := readStalls(file)
	if ok != (err == nil) {
		t.Fatalf("read: %v, error %v", ok, err)
	}
	if !ok {
		t.Skipf("this kernel counts no stalls: %v", err)
	}
	var average [3]float64
	var total int64
	if _, err := fmt.Sscanf(string(text), "some avg10=%f avg60=%f avg300=%f total=%d", &average[0], &average[1], &average[2], &total); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	if stalled < time.Duration(total)*time.Microsecond {
		t.Errorf("%s after %d µs", stalled, total)
	}
	if s, err := New("/sys/fs/cgroup", "").Read(); err != nil || !s.Stalls || s.Stalled < stalled {
		t.Errorf("%+v, error %v", s, err)
	}
}

// host is a tree of files as the kernel has them.
type host struct {
	t    *testing.T
	root string
}

const (
	mib            = 1 << 20
	mount, subtree = "cgroup", "cgroup/system.slice/doze.service"
)

func newHost(t *testing.T) host {
	h := host{t, t.TempDir()}
	h.write("proc/meminfo", "MemTotal:        8388608 kB\nMemFree:          100000 kB\nMemAvailable:    4194304 kB\nSwapTotal:       2097152 kB\nSwapFree:        1048576 kB\n")
	h.write("proc/pressure/memory", "some avg10=1.00 avg60=0.50 avg300=0.10 total=3000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n")
	return h
}

func (h host) write(path, text string) {
	h.t.Helper()
	file := filepath.Join(h.root, path)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		h.t.Fatal(err)
	}
}

// limit writes the files of a cgroup with the memory controller.
func (h host) limit(dir, most, high string, current, inactive int64) {
	h.t.Helper()
	for name, text := range map[string]string{
		"memory.max": most, "memory.high": high, "memory.current": fmt.Sprint(current), "memory.swap.max": "max", "memory.swap.current": "0",
		"memory.stat": fmt.Sprintf("anon 1\nfile 2\ninactive_file %d\n", inactive),
	} {
		h.write(filepath.Join(dir, name), text+"\n")
	}
}

func (h host) read(subtree string) sandbox.MemoryState {
	h.t.Helper()
	if subtree != "" {
		subtree = filepath.Join(h.root, subtree)
	}
	s, err := newReader(filepath.Join(h.root, "proc"), filepath.Join(h.root, mount), subtree).Read()
	testkit.NoError(h.t, "Read", err)
	s.At = time.Time{}
	return s
}

func TestTheTightestLimitCounts(t *testing.T) {
	machine := sandbox.MemoryState{Total: 8192 * mib, Available: 4096 * mib, Swap: 1024 * mib, Stalled: 3 * time.Second, Stalls: true}
	with := func(change func(*sandbox.MemoryState)) sandbox.MemoryState {
		s := machine
		change(&s)
		return s
	}
	for _, c := range []struct {
		name    string
		prepare func(host)
		want    sandbox.MemoryState
	}{
		{"no memory controller", func(host) {}, machine},
		{"no limit", func(h host) { h.limit(subtree, "max", "max", 100*mib, 0) }, machine},
		{"a limit of the service", func(h host) { h.limit(subtree, fmt.Sprint(1000*mib), "max", 900*mib, 50*mib) },
			with(func(s *sandbox.MemoryState) { s.Total, s.Available = 1000*mib, 150*mib })},
		{"a limit of the slice above it", func(h host) {
			h.limit(subtree, "max", "max", 1, 0)
			h.limit("cgroup/system.slice", fmt.Sprint(2000*mib), "max", 1500*mib, 0)
		}, with(func(s *sandbox.MemoryState) { s.Total, s.Available = 2000*mib, 500*mib })},
		{"a tighter limit of the slice above a limit of the service", func(h host) {
			h.limit(subtree, fmt.Sprint(1000*mib), "max", 700*mib, 0)
			h.limit("cgroup/system.slice", fmt.Sprint(2000*mib), "max", 1900*mib, 0)
		}, with(func(s *sandbox.MemoryState) { s.Total, s.Available = 2000*mib, 100*mib })},
		{"a limit of the container around the node", func(h host) { h.limit(mount, fmt.Sprint(2000*mib), "max", 1900*mib, 0) },
			with(func(s *sandbox.MemoryState) { s.Total, s.Available = 2000*mib, 100*mib })},
		{"memory.high", func(h host) { h.limit(subtree, fmt.Sprint(2000*mib), fmt.Sprint(1000*mib), 900*mib, 0) },
			with(func(s *sandbox.MemoryState) { s.Total, s.Available = 1000*mib, 100*mib })},
		{"over memory.high", func(h host) { h.limit(subtree, "max", fmt.Sprint(1000*mib), 1100*mib, 0) },
			with(func(s *sandbox.MemoryState) { s.Total, s.Available = 1000*mib, 0 })},
		{"a limit with more left than the machine", func(h host) { h.limit(subtree, fmt.Sprint(4000*mib), "max", 100*mib, 0) }, machine},
		{"a limit above the machine", func(h host) { h.limit(subtree, fmt.Sprint(9000*mib), "max", 8999*mib, 0) }, machine},
		{"no swap for the service", func(h host) {
			h.limit(subtree, "max", "max", 1, 0)
			h.write(subtree+"/memory.swap.max", "0\n")
		}, with(func(s *sandbox.MemoryState) { s.Swap = 0 })},
		{"less swap for the service", func(h host) {
			h.limit(subtree, "max", "max", 1, 0)
			h.write(subtree+"/memory.swap.max", fmt.Sprint(300*mib))
			h.write(subtree+"/memory.swap.current", fmt.Sprint(100*mib))
		}, with(func(s *sandbox.MemoryState) { s.Swap = 200 * mib })},
		{"stalls of the sandboxes", func(h host) {
			h.write(subtree+"/sandboxes/memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9\n")
		}, with(func(s *sandbox.MemoryState) { s.Stalled = 5 * time.Microsecond })},
		{"no swap", func(h host) { h.write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n") },
			with(func(s *sandbox.MemoryState) { s.Swap = 0 })},
		{"no PSI", func(h host) { os.RemoveAll(filepath.Join(h.root, "proc/pressure")) },
			with(func(s *sandbox.MemoryState) { s.Stalled, s.Stalls = 0, false })},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t)
			h.write(subtree+"/cgroup.procs", "")
			c.prepare(h)
			testkit.Diff(t, "the state", h.read(subtree), c.want)
		})
	}
}

func TestWithoutASubtreeTheMachineCounts(t *testing.T) {
	h := newHost(t)
	h.limit(subtree, fmt.Sprint(100*mib), "max", 100*mib, 0)
	testkit.Diff(t, "the state", h.read(""), sandbox.MemoryState{Total: 8192 * mib, Available: 4096 * mib, Swap: 1024 * mib, Stalled: 3 * time.Second, Stalls: true})
}

func TestUnreadableFilesAreErrors(t *testing.T) {
	for name, prepare := range map[string]func(host){
		"no meminfo":      func(h host) { os.Remove(filepath.Join(h.root, "proc/meminfo")) },
		"no MemAvailable": func(h host) { h.write("proc/meminfo", "MemTotal: 1 kB\n") },
		"no memory":       func(h host) { h.write("proc/meminfo", "MemTotal: 0 kB\nMemAvailable: 0 kB\n") },
		"not a number":    func(h host) { h.limit(subtree, "much", "max", 1, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			prepare(h)
			if s, err := newReader(filepath.Join(h.root, "proc"), filepath.Join(h.root, mount), filepath.Join(h.root, subtree)).Read(); err == nil {
				t.Errorf("it read %+v", s)
			}
		})
	}
}
