package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/doze-run/doze/runtime/sandbox"
)

// Memory returns the bytes that the sandbox's cgroup is charged for if the memory
// controller is delegated, else its processes' ResidentMemory. A frozen sandbox stays
// frozen.
func (f *Freezer) Memory(_ context.Context, id sandbox.ID) (int64, error) {
	return f.measure(id, "memory", func(dir string) (int64, error) {
		n, err := number(dir, "memory.current")
		if errors.Is(err, fs.ErrNotExist) {
			return ResidentMemory(dir)
		}
		return n, err
	})
}

// CPUTime returns the sandbox's total user and system time, including ended processes.
func (f *Freezer) CPUTime(_ context.Context, id sandbox.ID) (time.Duration, error) {
	usec, err := f.measure(id, "CPU time", func(dir string) (int64, error) {
		stat, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(stat)) {
			if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
				return strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			}
		}
		return 0, errors.New("cpu.stat has no usage_usec")
	})
	return time.Duration(usec) * time.Microsecond, err
}

// measure calls read with the sandbox's cgroup.
func (f *Freezer) measure(id sandbox.ID, what string, read func(dir string) (int64, error)) (n int64, err error) {
	c, err := f.cgroup(id)
	if err == nil {
		n, err = read(c.dir)
	}
	if err != nil {
		return 0, fmt.Errorf("read the %s of %s: %w", what, id, err)
	}
	return n, nil
}

// ResidentMemory returns the total resident memory, in bytes, of the processes in the
// cgroup at dir and below it. Memory that processes share counts once for each of them.
// Processes and cgroups that end during the call do not count.
func ResidentMemory(dir string) (total int64, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != dir:
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		}
		pids, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EOPNOTSUPP) {
			return nil // removed meanwhile; a threaded cgroup counts in its parent
		}
		if err != nil {
			return err
		}
		for pid := range strings.FieldsSeq(string(pids)) {
			total += resident(pid)
		}
		return nil
	})
	return total, err
}

// resident returns the resident memory of a process in bytes, 0 if it has ended.
//
// https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html
func resident(pid string) int64 {
	text, err := os.ReadFile("/proc/" + pid + "/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
