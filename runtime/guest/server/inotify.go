package server

import (
	"bytes"
	"encoding/binary"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// inotifyBuffer holds more than a thousand events.
	inotifyBuffer = 64 << 10
	// maxInotifyEvent is the longest event: a read into a smaller buffer fails.
	maxInotifyEvent = unix.SizeofInotifyEvent + unix.NAME_MAX + 1
)

// change is one event of inotify(7).
type change struct {
	wd     int32
	mask   uint32
	cookie uint32
	name   string
	at     uint64 // position of the event in the bytes of the queue
}

func (c *change) is(mask uint32) bool { return c.mask&mask != 0 }

// inotify is a queue of the kernel's events. One goroutine reads it.
type inotify struct {
	file *os.File
	conn syscall.RawConn

	buf      []byte
	unread   []byte // of buf: bytes that next has not returned
	received uint64 // bytes that were ever received
}

func newInotify() (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	q := &inotify{file: os.NewFile(uintptr(fd), "inotify"), buf: make([]byte, inotifyBuffer)}
	if q.conn, err = q.file.SyscallConn(); err != nil {
		q.file.Close()
		return nil, err
	}
	return q, nil
}

// close ends a read.
func (q *inotify) close() { q.file.Close() }

// add watches the directory at path, or changes its watch. It does not follow a link there.
// Errors: os.ErrClosed, or *fs.PathError.
func (q *inotify) add(path string, mask uint32) (wd int32, err error) {
	if cerr := q.conn.Control(func(fd uintptr) {
		var n int
		n, err = unix.InotifyAddWatch(int(fd), path, mask|unix.IN_ONLYDIR|unix.IN_DONT_FOLLOW|unix.IN_EXCL_UNLINK)
		wd = int32(n)
	}); cerr != nil {
		return 0, os.ErrClosed
	}
	if err != nil {
		return 0, &fs.PathError{Op: "watch", Path: path, Err: err}
	}
	return wd, nil
}

// remove ends a watch. It reports false if the kernel has ended it already: the directory is
// deleted.
func (q *inotify) remove(wd int32) (existed bool) {
	q.conn.Control(func(fd uintptr) {
		_, err := unix.InotifyRmWatch(int(fd), uint32(wd))
		existed = err == nil
	})
	return existed
}

// end returns the position of the end of the queue: of all that has happened until now.
func (q *inotify) end() uint64 {
	waiting := 0
	q.conn.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return q.received + uint64(waiting)
}

// position returns the position of the next event.
func (q *inotify) position() uint64 { return q.received - uint64(len(q.unread)) }

// wait waits until there are events.
func (q *inotify) wait() error {
	q.compact()
	n, err := q.file.Read(q.buf[len(q.unread):])
	q.extend(n)
	return err
}

// poll reads more events if there are any, without waiting. It reports whether there were.
func (q *inotify) poll() bool {
	q.compact()
	if len(q.buf)-len(q.unread) < maxInotifyEvent {
		return false
	}
	n := 0
	q.conn.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), q.buf[len(q.unread):]) })
	q.extend(max(n, 0))
	return n > 0
}

func (q *inotify) compact() { q.unread = q.buf[:copy(q.buf, q.unread)] }

func (q *inotify) extend(n int) {
	q.unread = q.buf[:len(q.unread)+n]
	q.received += uint64(n)
}

// next returns the next of the events that were received.
func (q *inotify) next() (c change, ok bool) {
	c, size := parseChange(q.unread)
	c.at = q.position()
	q.unread = q.unread[size:]
	return c, size > 0
}

// parseChange parses the event at the beginning of b. The kernel writes whole events.
func parseChange(b []byte) (c change, size int) {
	if len(b) < unix.SizeofInotifyEvent {
		return change{}, 0
	}
	native := binary.NativeEndian
	c = change{wd: int32(native.Uint32(b)), mask: native.Uint32(b[4:]), cookie: native.Uint32(b[8:])}
	size = unix.SizeofInotifyEvent + int(native.Uint32(b[12:]))
	name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:size], []byte{0})
	c.name = string(name)
	return c, size
}

// removeMovedTo removes the second event of a rename from the events that were received.
func (q *inotify) removeMovedTo(cookie uint32) (c change, ok bool) {
	for b := q.unread; ; {
		c, size := parseChange(b)
		if size == 0 {
			return change{}, false
		}
		if c.cookie == cookie && c.is(unix.IN_MOVED_TO) {
			binary.NativeEndian.PutUint32(b[4:], 0) // mask
			return c, true
		}
		b = b[size:]
	}
}

// awaitRename returns when a rename that moved a name out of the directory at path has ended.
// The kernel holds the directory's lock until the second event of the rename is in the queue
// (vfs_rename in fs/namei.c), and takes the same lock to find a name for its removal. No file
// has the name.
func awaitRename(path, unusedName string) { unix.Unlink(filepath.Join(path, unusedName)) }
