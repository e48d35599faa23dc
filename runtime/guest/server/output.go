package server

import (
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// After a command has exited, its own output is in its pipes already. A process that it
// left in the background may hold them open indefinitely, so they are read until they were
// silent for drainQuiet, and no longer than drainMax.
const (
	drainQuiet = 25 * time.Millisecond
	drainMax   = 250 * time.Millisecond
)

// outputPipe is our end of a pipe that a command writes to.
type outputPipe struct {
	file  *os.File
	drain time.Duration // how long it is drained at most
	last  atomic.Int64  // when draining ends, in Unix nanoseconds; 0 while the command runs
}

// outputs are our ends of a command's stdout and stderr.
type outputs [2]*outputPipe

func (o *outputs) commandEnded() {
	for _, pipe := range o {
		pipe.commandEnded()
	}
}

// close closes the outputs, which ends their copying.
func (o *outputs) close() {
	for _, pipe := range o {
		if pipe != nil {
			pipe.file.Close()
		}
	}
}

// The ends of a pipe.
const (
	readEnd  = 0
	writeEnd = 1
)

// newPipe makes a pipe with a command and returns the guest's end, which is nonblocking. The
// caller closes the other end once the command has it.
func newPipe(end int) (own *os.File, other int, err error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, os.NewSyscallError("pipe2", err)
	}
	if err := syscall.SetNonblock(fds[end], true); err != nil {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return nil, -1, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[end]), "pipe"), fds[1-end], nil
}

// commandEnded starts the draining. It sets its deadline first: copy clears the
// last one that it sees, which must not be followed by another.
func (p *outputPipe) commandEnded() {
	now := time.Now()
	p.file.SetReadDeadline(now.Add(min(drainQuiet, p.drain)))
	p.last.Store(now.Add(p.drain).UnixNano())
}

// copy calls emit, with parts of buf, for all output until every writer has closed the pipe,
// or until it is drained; then open is true: a process still holds it.
func (p *outputPipe) copy(buf []byte, emit func([]byte) error) (open bool, err error) {
	for {
		n, err := p.file.Read(buf)
		if n > 0 {
			if err := emit(buf[:n]); err != nil {
				return true, err
			}
			if last := p.last.Load(); last != 0 {
				p.file.SetReadDeadline(time.Unix(0, min(last, time.Now().Add(drainQuiet).UnixNano())))
			}
		}
		switch {
		case err == nil:
		case err == io.EOF:
			return false, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return p.readPending(buf, emit)
		default:
			return true, err
		}
	}
}

// readPending emits the present contents of the pipe: with a slow client the deadline may
// pass before all output that the command wrote before it exited is read.
func (p *outputPipe) readPending(buf []byte, emit func([]byte) error) (open bool, err error) {
	p.file.SetReadDeadline(time.Time{})
	pending, err := pendingIn(p.file)
	for err == nil && pending > 0 {
		var n int
		n, err = p.file.Read(buf[:min(pending, len(buf))])
		pending -= n
		if n > 0 {
			if err := emit(buf[:n]); err != nil {
				return true, err
			}
		}
	}
	if err == io.EOF {
		return false, nil
	}
	return true, err
}

// pendingIn is the number of bytes in a pipe; f is one of its ends.
func pendingIn(f *os.File) (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if e := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); e != nil {
		return 0, e
	}
	return n, err
}

// maxSpills is how many pipes are kept open for processes that commands left in
// the background. With more, the oldest is closed, and its writers get SIGPIPE.
const maxSpills = 256

// discarder reads and drops what background processes of ended commands write,
// because without a reader their next write would kill them.
type discarder struct {
	mu     sync.Mutex
	pipes  []*os.File // oldest first
	closed bool
	wg     sync.WaitGroup
}

// drain takes over a pipe.
func (d *discarder) drain(f *os.File) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		f.Close()
		return
	}
	if len(d.pipes) == maxSpills {
		d.pipes[0].Close()
		d.pipes = d.pipes[1:]
	}
	d.pipes = append(d.pipes, f)
	d.wg.Go(func() { // ended by the last writer, by close, or by 256 younger ones
		defer d.drop(f)
		var buf [512]byte
		for {
			if _, err := f.Read(buf[:]); err != nil {
				return
			}
		}
	})
}

func (d *discarder) drop(f *os.File) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f.Close()
	d.pipes = slices.DeleteFunc(d.pipes, func(g *os.File) bool { return g == f })
}

func (d *discarder) close() {
	d.mu.Lock()
	d.closed = true
	for _, f := range d.pipes {
		f.Close()
	}
	d.mu.Unlock()
	d.wg.Wait()
}
