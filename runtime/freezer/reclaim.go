package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/doze-run/doze/runtime/sandbox"
)

const (
	// reclaimStep is requested from the kernel at a time: a step cannot be interrupted, and
	// takes some 30 ms with zram.
	reclaimStep = 16 << 20
	// A step that frees less than reclaimProgress, idleSteps times in a row, is the end. A page
	// that was used recently needs two passes: the kernel first marks it as unused.
	reclaimProgress = 1 << 20
	idleSteps       = 3
)

// Reclaim moves as much as it can of the sandbox's memory to swap, and drops its cached files.
// It returns errors.ErrUnsupported (wrapped) if the memory controller is not delegated, or
// the kernel has no memory.reclaim (Linux 5.19).
//
// https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
func (f *Freezer) Reclaim(ctx context.Context, id sandbox.ID) (r sandbox.Reclaimed, err error) {
	c, err := f.cgroup(id)
	switch {
	case err != nil:
	case !slices.Contains(f.enforced, "memory"):
		err = fmt.Errorf("the memory controller is not delegated: %w", errors.ErrUnsupported)
	default:
		r, err = reclaim(ctx, c.dir)
	}
	if err != nil {
		return r, fmt.Errorf("reclaim the memory of %s: %w", id, err)
	}
	return r, nil
}

func reclaim(ctx context.Context, dir string) (r sandbox.Reclaimed, err error) {
	if r.Before, err = number(dir, "memory.current"); err != nil {
		return r, err
	}
	r.After = r.Before
	if ctx.Err() != nil {
		return r, nil
	}
	allowed, err := allowSwap(dir)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, allowed()) }()
	for idle := 0; idle < idleSteps && ctx.Err() == nil; {
		// The kernel would spend a long time searching for memory that it cannot reclaim, such as its own.
		left, err := reclaimable(dir)
		if err != nil {
			return r, err
		}
		if left < reclaimProgress {
			break
		}
		err = write(dir, "memory.reclaim", strconv.FormatInt(min(left, reclaimStep), 10))
		if errors.Is(err, fs.ErrNotExist) {
			return r, fmt.Errorf("the kernel has no memory.reclaim: %w", errors.ErrUnsupported)
		}
		// EAGAIN: it has reclaimed less.
		if err != nil && !errors.Is(err, syscall.EAGAIN) {
			return r, err
		}
		if left, err = number(dir, "memory.current"); err != nil {
			return r, err
		}
		idle++
		if r.After-left >= reclaimProgress {
			idle = 0
		}
		r.After = left
	}
	return r, nil
}

// reclaimable returns the bytes of a cgroup that programs and cached files use and that are not
// locked.
func reclaimable(dir string) (sum int64, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "inactive_anon", "active_anon", "inactive_file", "active_file":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("memory.stat: %w", err)
			}
			sum += n
		}
	}
	return sum, nil
}

// allowSwap lets the cgroup use swap until the returned function is called. Memory that is
// in swap then stays there.
func allowSwap(dir string) (end func() error, err error) {
	text, err := os.ReadFile(filepath.Join(dir, swapMax))
	limit := strings.TrimSpace(string(text))
	if errors.Is(err, fs.ErrNotExist) || err == nil && limit == "max" {
		return func() error { return nil }, nil
	}
	if err == nil {
		err = write(dir, swapMax, "max")
	}
	return func() error { return write(dir, swapMax, limit) }, err
}

// number reads a file with one number.
func number(dir, name string) (int64, error) {
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
}
