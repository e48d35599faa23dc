package server

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/archive"
	"github.com/doze-run/doze/runtime/guest"
)

// settleRounds bounds how many ticks of the clock settledTag waits.
const settleRounds = 5

// etagOf returns the entity tag of a regular file: its inode, size and times.
func etagOf(st *unix.Stat_t) string {
	return fmt.Sprintf(`"%x-%x-%x-%x"`, st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano())
}

// etagOfInfo is etagOf for a FileInfo of package os.
func etagOfInfo(info fs.FileInfo) string {
	st := info.Sys().(*syscall.Stat_t)
	return etagOf(&unix.Stat_t{Ino: st.Ino, Size: st.Size, Mtim: unix.Timespec(st.Mtim), Ctim: unix.Timespec(st.Ctim)})
}

// settledTag returns the entity tag of an open file, such that every later change of the file
// gives it another one. The kernel takes the times of files from a clock that advances by
// some milliseconds: two changes within a tick may have the same times. So settledTag waits
// for the tick after the last change. A file that changes in each tick, and one of the
// kernel's file systems, whose files change without a time, get a weak tag and none.
func settledTag(ctx context.Context, f *os.File) (tag string, st unix.Stat_t, err error) {
	fd := int(f.Fd())
	var clock, tick unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_REALTIME_COARSE, &tick); err != nil {
		return "", st, os.NewSyscallError("clock_getres", err)
	}
	for range settleRounds {
		// The clock is read first: a change after that has this time or a later one.
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &clock); err != nil {
			return "", st, os.NewSyscallError("clock_gettime", err)
		}
		if err := unix.Fstat(fd, &st); err != nil {
			return "", st, os.NewSyscallError("fstat", err)
		}
		if isKernelFile(fd) {
			return "", st, nil
		}
		// A time far ahead is from before the clock was set back: the next change has an
		// earlier one.
		if ago := clock.Nano() - st.Ctim.Nano(); ago > 0 || ago < -int64(time.Second) {
			return etagOf(&st), st, nil
		}
		select {
		case <-ctx.Done():
			return "", st, ctx.Err()
		case <-time.After(time.Duration(tick.Nano())):
		}
	}
	return "W/" + etagOf(&st), st, nil
}

// isKernelFile reports whether a file belongs to a file system that shows the kernel's state.
func isKernelFile(fd int) bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(fd, &fs) == nil && slices.Contains(kernelFilesystems, uint32(fs.Type))
}

var kernelFilesystems = []uint32{
	unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC,
}

// markWritten gives a file that this process has written a modification time of the precise
// clock. A later change within the same tick, by a program, has the time of the tick: so the
// entity tag of the file needs no wait.
func markWritten(f *os.File) {
	now := unix.NsecToTimespec(time.Now().UnixNano())
	unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), []unix.Timespec{now, now}, 0)
}

// conditions are what a write requires of the present file.
type conditions struct {
	ifMatch, ifNoneMatch []string // entity tags, or "*"; RFC 9110, section 13.1
	createNew            bool     // refuses an existing file as such, not as a failed condition
}

// contentTag is the beginning of an entity tag that names the content of a file by its
// SHA-256 in hexadecimal digits.
const contentTag = `"sha256-`

// parseTags parses a list of entity tags.
func parseTags(name, header string) ([]string, error) {
	header = strings.TrimSpace(header)
	if header == "" || header == "*" {
		return strings.Fields(header), nil
	}
	var tags []string
	for rest := header; ; {
		weak := strings.HasPrefix(rest, "W/")
		opaque, ok := strings.CutPrefix(strings.TrimPrefix(rest, "W/"), `"`)
		opaque, after, closed := strings.Cut(opaque, `"`)
		if !ok || !closed {
			return nil, refuse(guest.CodeInvalid, `%s %.100q is not a list of entity tags; send the ETag of a response, with its quotes`, name, header)
		}
		tag := `"` + opaque + `"`
		if weak {
			tag = "W/" + tag
		}
		tags = append(tags, tag)
		rest = strings.TrimLeft(after, " \t,")
		if rest == "" {
			return tags, nil
		}
	}
}

// onlyNew reports whether a write must not replace a file.
func (c *conditions) onlyNew() bool { return c.createNew || slices.Contains(c.ifNoneMatch, "*") }

// evaluate refuses a write to a file that is not as required. The status is nil if the file
// does not exist.
func (c *conditions) evaluate(ctx context.Context, e *entry, st *unix.Stat_t) error {
	tag := ""
	if st != nil {
		tag = etagOf(st)
	}
	failed := func(format string) error {
		err := refuse(guest.CodeChanged, format, e.path)
		err.ETag = tag
		return err
	}
	matches := func(tags []string) (bool, error) {
		switch {
		case st == nil:
			return false, nil
		case slices.Contains(tags, "*"), slices.Contains(tags, tag):
			return true, nil
		case !slices.ContainsFunc(tags, func(tag string) bool { return strings.HasPrefix(tag, contentTag) }):
			return false, nil
		}
		sum, err := e.hash(ctx)
		return err == nil && slices.Contains(tags, contentTag+hex.EncodeToString(sum)+`"`), err
	}
	if c.createNew && st != nil {
		return refuse(guest.CodeExists, "%s exists; omit create_new to replace it", e.path)
	}
	if len(c.ifMatch) > 0 {
		if ok, err := matches(c.ifMatch); err != nil || !ok {
			if err == nil && st == nil {
				return failed("%s does not exist, and If-Match requires it")
			}
			return cmp.Or(err, failed("%s does not have an ETag of If-Match; read it, make the change again, and send its new ETag"))
		}
	}
	if len(c.ifNoneMatch) > 0 {
		if ok, err := matches(c.ifNoneMatch); err != nil || ok {
			return cmp.Or(err, failed("%s exists with an ETag of If-None-Match; nothing has changed"))
		}
	}
	return nil
}

// hashFile returns the SHA-256 of what is left of a file. The end of ctx ends it.
func hashFile(ctx context.Context, f *os.File) ([]byte, error) {
	h := sha256.New()
	_, err := archive.Copy(h, untilDone{ctx, f})
	return h.Sum(nil), err
}

// untilDone is a Reader that fails when ctx has ended.
type untilDone struct {
	ctx context.Context
	io.Reader
}

func (r untilDone) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(b)
}
