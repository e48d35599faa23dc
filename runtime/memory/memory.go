// Package memory reads how much memory is left to a node: of the machine and within the limits
// of the cgroups around the node, and for how long programs have waited for memory.
package memory

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Reader is the sandbox.Memory of the machine. Create one with New.
type Reader struct {
	proc    string   // /proc
	cgroups []string // with a limit that may apply to the node, its own first
	stalls  []string // files with the time of stalls, the preferred one first
}

// New returns a Reader for a node whose cgroup v2 subtree is below mount, such as
// /sys/fs/cgroup/doze below /sys/fs/cgroup. Without a subtree only the machine counts.
//
// Only the sandboxes' stalls count: the node stalls whenever it reclaims memory. Without a
// subtree, the machine's stalls count.
func New(mount, subtree string) *Reader { return newReader("/proc", mount, subtree) }

func newReader(proc, mount, subtree string) *Reader {
	r := &Reader{proc: proc}
	if subtree != "" {
		r.stalls = append(r.stalls, filepath.Join(subtree, "sandboxes", "memory.pressure"))
		for dir := filepath.Clean(subtree); ; dir = filepath.Dir(dir) {
			r.cgroups = append(r.cgroups, dir)
			if dir == mount || !strings.HasPrefix(dir, mount+"/") {
				break
			}
		}
	}
	r.stalls = append(r.stalls, filepath.Join(proc, "pressure", "memory"))
	return r
}

// Read implements sandbox.Memory.
func (r *Reader) Read() (sandbox.MemoryState, error) {
	s := sandbox.MemoryState{At: time.Now()}
	if err := r.readMachine(&s); err != nil {
		return sandbox.MemoryState{}, err
	}
	machine := s.Total
	for _, dir := range r.cgroups {
		if err := narrow(&s, machine, dir); err != nil {
			return sandbox.MemoryState{}, fmt.Errorf("read the memory of cgroup %s: %w", dir, err)
		}
	}
	for _, file := range r.stalls {
		if stalled, ok := readStalls(file); ok {
			s.Stalled, s.Stalls = stalled, true
			break
		}
	}
	return s, nil
}

// readMachine reads /proc/meminfo.
//
// https://man7.org/linux/man-pages/man5/proc_meminfo.5.html
func (r *Reader) readMachine(s *sandbox.MemoryState) error {
	file := filepath.Join(r.proc, "meminfo")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for name, to := range map[string]*int64{"MemTotal": &s.Total, "MemAvailable": &s.Available, "SwapFree": &s.Swap} {
		kib, ok := field(text, name+":")
		if !ok && name != "SwapFree" {
			return fmt.Errorf("%s has no %s", file, name)
		}
		*to = kib << 10
	}
	s.Available = min(s.Available, s.Total)
	if s.Total <= 0 {
		return fmt.Errorf("%s: a machine of %d bytes", file, s.Total)
	}
	return nil
}

// narrow replaces the state by a cgroup's if its limits leave a smaller share of memory, or less
// swap. Limits above the machine's memory do not count.
//
// https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
func narrow(s *sandbox.MemoryState, machine int64, dir string) error {
	if s.Swap > 0 {
		left, limited, err := headroom(dir, "memory.swap.max", "memory.swap.current")
		if err != nil {
			return err
		}
		if limited {
			s.Swap = min(s.Swap, max(left, 0))
		}
	}
	// Beyond memory.high programs are slowed down instead of killed.
	for _, limit := range []string{"memory.max", "memory.high"} {
		total, limited, err := number(filepath.Join(dir, limit))
		if err != nil {
			return err
		}
		if !limited || total <= 0 || total >= machine {
			continue
		}
		left, _, err := headroom(dir, limit, "memory.current")
		if err != nil {
			return err
		}
		stat, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
		if err != nil {
			return err
		}
		// Files that have not been used recently are dropped when memory is needed. The
		// kubelet counts the same way.
		files, _ := field(stat, "inactive_file")
		available := min(max(left+files, 0), total)
		if float64(available)/float64(total) < float64(s.Available)/float64(s.Total) {
			s.Available, s.Total = available, total
		}
	}
	return nil
}

// headroom is what a limit of a cgroup leaves, if it has that limit.
func headroom(dir, limit, current string) (left int64, limited bool, err error) {
	most, limited, err := number(filepath.Join(dir, limit))
	if err != nil || !limited {
		return 0, false, err
	}
	used, ok, err := number(filepath.Join(dir, current))
	return most - used, ok, err
}

// number reads a file of a cgroup with one number. ok is false if it is "max", or the cgroup has
// no such file: the root, or without the memory controller.
func number(file string) (n int64, ok bool, err error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	value := strings.TrimSpace(string(text))
	if value == "max" {
		return 0, false, nil
	}
	n, err = strconv.ParseInt(value, 10, 64)
	return n, err == nil, err
}

// field returns the number after a name at the beginning of a line.
func field(text []byte, name string) (int64, bool) {
	for line := range bytes.Lines(text) {
		if fields := bytes.Fields(line); len(fields) >= 2 && string(fields[0]) == name {
			n, err := strconv.ParseInt(string(fields[1]), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// readStalls reads for how long one program or more has waited for memory. ok is false if the
// kernel does not count that: it is built or booted without PSI, or it is off for the cgroup.
//
// https://docs.kernel.org/accounting/psi.html
func readStalls(file string) (stalled time.Duration, ok bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		averages, isSome := strings.CutPrefix(line, "some ")
		if _, total, found := strings.Cut(averages, "total="); isSome && found {
			us, err := strconv.ParseInt(strings.TrimSpace(total), 10, 64)
			return time.Duration(us) * time.Microsecond, err == nil
		}
	}
	return 0, false
}

var _ sandbox.Memory = (*Reader)(nil)
