package sandbox

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// Config of a Manager. DefaultConfig has every default.
type Config struct {
	// RunDir holds one folder per sandbox with the guest's socket.
	RunDir string
	// GuestBinary is the host path of doze-guest.
	GuestBinary string

	Sizes       map[string]Limits
	DefaultSize string
	Images      Images

	// SleepAfter is how long a sandbox is idle before it sleeps, StopAfter how
	// long it is asleep before it is stopped, unless it was created with others.
	SleepAfter, StopAfter time.Duration
	// ArchiveAfter is how long a sandbox is stopped before its disk is moved to the object store, unless it was
	// created with another; 0: never.
	ArchiveAfter time.Duration
	// IdleCPU is the share of one core, averaged over a quarter of SleepAfter,
	// above which a sandbox counts as used without any request.
	IdleCPU float64

	// ReclaimAfter is how long a sandbox is asleep before its memory is reclaimed, where there is
	// swap; 0: never.
	ReclaimAfter time.Duration
	// MemoryReserve is the share of the memory that stays available: below it, the sandboxes that
	// have slept longest are stopped, one at a time. 0: none is stopped for want of memory,
	// whatever MemoryStall is.
	MemoryReserve float64
	// MemoryStall: sandboxes are also stopped when programs waited for memory for this share of
	// the last 10 seconds, and less than stallGuard times MemoryReserve is available. 0: never.
	MemoryStall float64
	// MemoryInterval is how often the memory is read.
	MemoryInterval time.Duration

	// DiskReserve is the number of bytes to reserve on each file system that sandboxes write to. If
	// less is free, the node stops the sandbox that grows most and refuses operations that need
	// space. 0 means a 20th of the file system, at most 2 GiB.
	DiskReserve int64
	// DiskInterval is how often the free space is read.
	DiskInterval time.Duration
	// SnapshotInterval is how often the age of snapshots is checked.
	SnapshotInterval time.Duration

	// WakeTimeout bounds one wake; the callers that wait may stop waiting earlier.
	WakeTimeout time.Duration
	// CreateTimeout bounds one creation, the pull of its image included.
	CreateTimeout time.Duration
	// StopGrace is what processes get between SIGTERM and SIGKILL.
	StopGrace time.Duration

	// MaxSandboxes of the node. One more is refused with ErrTooManySandboxes.
	MaxSandboxes int
	// MaxWaiters of the node and MaxWaitersPerSandbox bound the callers that
	// wait for a wake at the same time. One more gets ErrTooManyWaiters.
	MaxWaiters, MaxWaitersPerSandbox int
}

// DefaultConfig returns the defaults; RunDir, GuestBinary and Images are the caller's.
func DefaultConfig() Config {
	return Config{
		Sizes: map[string]Limits{
			"lite":     {CPUs: 0.25, Memory: 256 << 20, PIDs: 128, Disk: 5 << 30, Files: 500_000, Quotas: DefaultQuotas()},
			"basic":    {CPUs: 1, Memory: 1 << 30, PIDs: 512, Disk: 10 << 30, Files: 1_000_000, Quotas: DefaultQuotas()},
			"standard": {CPUs: 2, Memory: 4 << 30, PIDs: 1024, Disk: 20 << 30, Files: 2_000_000, Quotas: DefaultQuotas()},
		},
		DefaultSize:   "basic",
		Images:        Images{Default: "base"},
		SleepAfter:    time.Minute,
		StopAfter:     24 * time.Hour,
		IdleCPU:       0.05,
		ReclaimAfter:  time.Minute,
		MemoryReserve: 0.05,
		MemoryStall:   0.1,
		// Reading takes 0.1 ms. A program that fills memory at 1 GB/s takes a second for the
		// reserve of a machine with 20 GB.
		MemoryInterval: time.Second,
		// Reading takes 50 µs. Between two reads, a disk with 2 GB/s receives at most 2 GB.
		DiskInterval:     time.Second,
		SnapshotInterval: time.Minute,
		WakeTimeout:      time.Minute,
		CreateTimeout:    15 * time.Minute,
		StopGrace:        10 * time.Second,
		MaxSandboxes:     20_000,
		// A page and its assets make about 100 concurrent requests; a burst of
		// 1,000 visitors to one sleeping sandbox must all get a response.
		MaxWaiters:           16_384,
		MaxWaitersPerSandbox: 4096,
	}
}

// The least that a size may have. The guest has 8 MB and 10 threads; with less than
// this it does not start, or is killed with the first command.
const (
	minCPUs   = 0.01 // the kernel's: 1 ms of every 100 ms
	minMemory = 32 << 20
	minPIDs   = 16
	minDisk   = 16 << 20 // logs of processes
	minFiles  = 100
)

// enough returns an error if a sandbox could not run within the limits.
func (l Limits) enough(size string) error {
	for _, limit := range []struct {
		name         string
		value, least float64
		want         string
	}{
		{"cpus", l.CPUs, minCPUs, "at least 0.01"},
		{"memory", float64(l.Memory), minMemory, "at least 32MiB"},
		{"pids", float64(l.PIDs), minPIDs, "at least 16"},
		{"disk", float64(l.Disk), minDisk, "at least 16MiB"},
		{"files", float64(l.Files), minFiles, "at least 100"},
	} {
		if limit.value != 0 && limit.value < limit.least {
			return &InvalidError{
				Field: fmt.Sprintf("size %s: %s", size, limit.name), Reason: fmt.Sprintf("%v is too little for a sandbox", limit.value),
				Want: limit.want + ", or leave it out for no limit",
			}
		}
	}
	return nil
}

// Validate returns an *InvalidError for the first value that cannot be used.
func (c Config) Validate() error {
	if len(c.Sizes) == 0 {
		return &InvalidError{Field: "sizes", Reason: "none is configured", Want: "configure at least one"}
	}
	if _, ok := c.Sizes[c.DefaultSize]; !ok {
		return &InvalidError{Field: "default_size", Reason: fmt.Sprintf("%q is not configured", c.DefaultSize), Want: "it must be one of " + sizeNames(c.Sizes)}
	}
	for name, l := range c.Sizes {
		if l.CPUs < 0 || l.Memory < 0 || l.PIDs < 0 || l.Disk < 0 || l.Files < 0 {
			return &InvalidError{Field: "size " + name, Reason: "a limit is negative", Want: "limits are positive, or 0 for none"}
		}
		if err := cmp.Or(l.enough(name), l.Quotas.validate(name)); err != nil {
			return err
		}
	}
	for _, n := range []struct {
		field string
		value int64
	}{{"wake_timeout", int64(c.WakeTimeout)}, {"create_timeout", int64(c.CreateTimeout)}, {"max_sandboxes", int64(c.MaxSandboxes)},
		{"max_waiters", int64(c.MaxWaiters)}, {"max_waiters_per_sandbox", int64(c.MaxWaitersPerSandbox)},
		{"memory_interval", int64(c.MemoryInterval)}, {"disk_interval", int64(c.DiskInterval)},
		{"snapshot_interval", int64(c.SnapshotInterval)}} {
		if n.value <= 0 {
			return &InvalidError{Field: n.field, Reason: "is not positive", Want: "leave it out for the default"}
		}
	}
	if c.StopGrace < 0 {
		return &InvalidError{Field: "stop_grace_period", Reason: "is negative", Want: "0 or more"}
	}
	if c.DiskReserve < 0 {
		return &InvalidError{Field: "disk_reserve", Reason: "is negative", Want: "leave it out for the default"}
	}
	if c.IdleCPU < 0 {
		return &InvalidError{Field: "idle_cpu", Reason: "is negative", Want: "0 or more"}
	}
	return cmp.Or(
		validateIdle("sleep_after", Duration(c.SleepAfter)),
		validateIdle("stop_after", Duration(c.StopAfter)),
		validateIdle("archive_after", Duration(c.ArchiveAfter)),
		validateIdle("reclaim_after", Duration(c.ReclaimAfter)),
		validateShare("memory_reserve", c.MemoryReserve),
		validateShare("memory_stall", c.MemoryStall),
		c.Images.validate(),
	)
}

// validateShare accepts shares below the whole; 0 means never.
func validateShare(field string, share float64) error {
	if !(share >= 0 && share < 1) {
		return &InvalidError{Field: field, Reason: fmt.Sprintf("%g%% is out of range", 100*share), Want: "use 0% for never, or less than 100%"}
	}
	return nil
}

func sizeNames(sizes map[string]Limits) string {
	return strings.Join(slices.Sorted(maps.Keys(sizes)), ", ")
}

// Images are the images that may be used, and their short names.
type Images struct {
	// Default is used when a request names none: a key of Names or a reference.
	Default string
	// Names maps short names to references, such as "base" to
	// "localhost/doze/base:latest".
	Names map[string]string
	// Allow lists patterns of other references that may be used, in the syntax
	// of path.Match applied to the whole reference, with `**` for anything.
	Allow []string
}

func (im Images) validate() error {
	for _, pattern := range im.Allow {
		if _, err := path.Match(pattern, ""); err != nil {
			return &InvalidError{Field: "allow_images", Reason: fmt.Sprintf("%q is not a valid pattern", pattern), Want: `write it like "docker.io/library/*"`}
		}
	}
	return nil
}

// resolve returns the reference for the image of a request.
func (im Images) resolve(image string) (ref string, err error) {
	if ref, ok := im.Names[image]; ok {
		return ref, nil
	}
	for _, pattern := range im.Allow {
		if pattern == "**" || matchPrefix(pattern, image) {
			return image, nil
		}
		if ok, _ := path.Match(pattern, image); ok {
			return image, nil
		}
	}
	want := "use one of " + strings.Join(slices.Sorted(maps.Keys(im.Names)), ", ")
	if len(im.Allow) > 0 {
		want += ", or a reference that matches " + strings.Join(im.Allow, ", ")
	}
	return "", &InvalidError{Field: "image", Reason: fmt.Sprintf("%q is not allowed on this node", clip(image)), Want: want, Err: ErrImageNotAllowed}
}

// matchPrefix matches "registry.example/**".
func matchPrefix(pattern, image string) bool {
	prefix, ok := strings.CutSuffix(pattern, "/**")
	return ok && strings.HasPrefix(image, prefix+"/")
}
