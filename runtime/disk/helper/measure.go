package helper

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/disk/tree"
	"github.com/doze-run/doze/runtime/disk/wire"
)

// Measure returns the usage of the disk of a snapshot, or of a container if the request names
// one.
func (d *Disks) Measure(r wire.Request, reply *wire.Reply) error {
	return d.measure(r, reply, func(ctx context.Context, m *measurement) error {
		layer := d.layerID(r.Snapshot)
		if r.Container != "" {
			base, err := d.disk(r.Container)
			if err != nil {
				return err
			}
			layer = base.layer.ID
		}
		return m.tree(ctx, d.files(layer))
	})
}

// Usage returns the total disk usage of a container on the node.
func (d *Disks) Usage(r wire.Request, reply *wire.Reply) error {
	return d.measure(r, reply, func(ctx context.Context, m *measurement) error {
		base, err := d.disk(r.Container)
		if err != nil {
			return err
		}
		if err := m.deleted(ctx, r.PID); err != nil {
			return err
		}
		err = m.tree(ctx, filepath.Join(d.config.Run, r.RunFolder))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return m.tree(ctx, d.files(base.layer.ID))
	})
}

type measurementKey struct{ container, snapshot string }

// measured is the key of a measurement.
func measured(r wire.Request) measurementKey { return measurementKey{r.Container, r.Snapshot} }

// measure calls f on a thread with the lowest priority, with a context that Cancel cancels.
func (d *Disks) measure(r wire.Request, reply *wire.Reply, f func(context.Context, *measurement) error) error {
	ctx, end := context.WithCancel(context.Background())
	defer end()
	d.mu.Lock()
	d.measurements[measured(r)] = end
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.measurements, measured(r))
	}()
	return d.respond(reply, func() error {
		m := measurement{limit: tree.Usage(r.Limit)}
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // the goroutine exits locked, which ends the thread and its priority
			lowerPriority()
			done <- f(ctx, &m)
		}()
		err := <-done
		reply.Usage = wire.Usage(m.usage)
		return err
	})
}

const (
	ioprioWhoThread = 1
	ioprioIdle      = 3 << 13 // IOPRIO_CLASS_IDLE
	niceness        = 19
)

// lowerPriority sets the lowest CPU and I/O priority for the thread. Failures are ignored: the
// measurement then runs at normal priority.
func lowerPriority() {
	_ = unix.Setpriority(unix.PRIO_PROCESS, 0, niceness) // of the thread
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoThread, 0, ioprioIdle)
}

// measurement adds usages up to a limit.
type measurement struct {
	usage, limit tree.Usage
}

// exceeded reports whether the usage exceeds the limit, so that counting can stop.
func (m *measurement) exceeded() bool {
	return m.limit.Bytes > 0 && m.usage.Bytes > m.limit.Bytes || m.limit.Entries > 0 && m.usage.Entries > m.limit.Entries
}

// tree adds the usage of the tree at path.
func (m *measurement) tree(ctx context.Context, path string) error {
	if m.exceeded() {
		return nil
	}
	limit := m.limit
	if limit.Bytes > 0 {
		limit.Bytes = max(limit.Bytes-m.usage.Bytes, 1)
	}
	if limit.Entries > 0 {
		limit.Entries = max(limit.Entries-m.usage.Entries, 1)
	}
	usage, err := tree.Measure(ctx, path, limit)
	m.usage.Bytes += usage.Bytes
	m.usage.Entries += usage.Entries
	return err
}

// maxDeleted limits the memory for inodes of one container's deleted files. Beyond that number, a file
// that is open several times counts several times.
const maxDeleted = 1 << 20

// deleted adds deleted files that processes still have open. pid is the first process of the
// container; all others descend from it.
func (m *measurement) deleted(ctx context.Context, pid int) error {
	if pid == 0 {
		return nil
	}
	type inode struct{ dev, ino uint64 }
	counted := map[inode]bool{}
	for _, pid := range descendants(pid) {
		folder := "/proc/" + strconv.Itoa(pid) + "/fd/"
		files, err := os.Open(folder)
		if err != nil {
			continue // the process has exited
		}
		for err == nil {
			var names []string
			names, err = files.Readdirnames(1000) // until io.EOF, or the end of the process
			for _, name := range names {
				var st unix.Stat_t
				if unix.Stat(folder+name, &st) != nil || st.Nlink != 0 || st.Mode&unix.S_IFMT != unix.S_IFREG || inMemory(folder+name) {
					continue
				}
				key := inode{uint64(st.Dev), st.Ino}
				if counted[key] {
					continue
				}
				if len(counted) < maxDeleted {
					counted[key] = true
				}
				m.usage.Entries++
				m.usage.Bytes += st.Blocks * 512
			}
			if ctx.Err() != nil || m.exceeded() {
				files.Close()
				return ctx.Err()
			}
		}
		files.Close()
	}
	return nil
}

// inMemory reports whether a file is on tmpfs or hugetlbfs, which use no disk.
func inMemory(path string) bool {
	var fs unix.Statfs_t
	err := unix.Statfs(path, &fs)
	return err != nil || fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.HUGETLBFS_MAGIC
}

// descendants returns a process and its running descendants. All processes of a PID namespace descend
// from its first process.
func descendants(pid int) []int {
	entries, _ := os.ReadDir("/proc")
	children := map[int][]int{}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		// PID (NAME) STATE PPID ...; the name may have parentheses.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(fields[1]); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all
}
