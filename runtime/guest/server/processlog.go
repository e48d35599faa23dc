package server

import (
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/guest"
)

// maxLogFile is how long a log file gets before it is renamed to end in .1, in
// place of the one before: twice that is on disk at most.
const maxLogFile = 8 << 20

// The output of ended processes stays in memory as long as all of it takes endedLogs; of the
// older ones the last oldLog bytes stay. So an idle guest stays below 8 MB.
const (
	endedLogs = 1 << 20
	oldLog    = 16 << 10
)

// processLog is the output of one process, over all its restarts: the last of
// it in memory, more of it in a file that both streams share.
type processLog struct {
	path string // of the file

	mu      sync.Mutex
	ring    ring
	file    *os.File      // nil when there is none
	size    int64         // of the file
	ended   bool          // the process has ended and is not restarted
	last    int64         // position up to which it had written then
	changed chan struct{} // closed at the next change; nil while no reader waits
}

// openLog opens or continues the log file at path. Without one (the disk is full,
// or the image's is read-only), output is kept in memory only.
func openLog(path string) *processLog {
	l := &processLog{path: path}
	l.open(0)
	return l
}

func (l *processLog) open(flags int) {
	if os.MkdirAll(filepath.Dir(l.path), 0o755) != nil {
		return
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK|flags, 0o644)
	if err != nil {
		return
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		f.Close()
		return
	}
	l.file, l.size = f, info.Size()
}

// add appends output, and reports whether the log takes more memory now. It never fails: what the
// disk does not take is missing from the file only.
func (l *processLog) add(t guest.FrameType, data []byte) (grown bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	size := len(l.ring.buf)
	for rest := data; len(rest) > 0; {
		n := min(len(rest), ringRecord)
		l.ring.add(t, rest[:n])
		rest = rest[n:]
	}
	l.wake()
	l.write(data)
	return len(l.ring.buf) > size
}

// write appends output to the file. l.mu is held.
func (l *processLog) write(data []byte) {
	if l.file == nil {
		return
	}
	if l.size+int64(len(data)) > maxLogFile {
		l.file.Close()
		l.file = nil
		os.Rename(l.path, l.path+".1")
		l.open(os.O_TRUNC)
	}
	if l.file != nil {
		n, _ := l.file.Write(data)
		l.size += int64(n)
	}
}

// memory is the size of its output in memory.
func (l *processLog) memory() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.ring.buf)
}

// shrink drops all output in memory but the last, from now on.
func (l *processLog) shrink() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ring.shrink(oldLog)
}

// wake wakes the readers. l.mu is held.
func (l *processLog) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// markEnded records that the process has ended and is not restarted.
func (l *processLog) markEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended, l.last = true, l.ring.end
	l.wake()
}

// close closes the file. Further output is stored in memory only.
func (l *processLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		l.file.Close()
		l.file = nil
	}
}

// span is where the oldest output is, and the position of the end.
func (l *processLog) span() (head logPosition, tail int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ring.head(), l.ring.end
}

// logPart is what one read of a log found.
type logPart struct {
	frames  []byte
	next    logPosition     // to read from
	skipped int64           // bytes of output that were overwritten before
	ended   bool            // all that was written until the process's end was read
	changed <-chan struct{} // closed when there is more
}

// read reads from a place on into b's capacity, which must hold a record.
func (l *processLog) read(from logPosition, b []byte) logPart {
	l.mu.Lock()
	defer l.mu.Unlock()
	var p logPart
	p.frames, p.next, p.skipped = l.ring.read(from, b[:0])
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	p.ended, p.changed = l.ended && p.next.at >= l.last, l.changed
	return p
}
