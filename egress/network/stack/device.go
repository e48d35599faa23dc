package stack

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
)

// device reads and writes packets: the first of each connection, and datagrams.
type device struct {
	file *os.File
	raw  syscall.RawConn

	// mu is held for reading while the descriptor is written to: an answer to a name
	// query may come when all is closed.
	mu sync.RWMutex
	fd int // -1 when closed
}

// openDevice takes the file over; it is closed if that fails.
func openDevice(file *os.File) (_ *device, err error) {
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	d := &device{file: file}
	if d.raw, err = file.SyscallConn(); err != nil {
		return nil, err
	}
	// File.Fd would make it block.
	if err := d.raw.Control(func(fd uintptr) { d.fd = int(fd) }); err != nil {
		return nil, err
	}
	// This fails for a descriptor that blocks: its reads could not be ended.
	return d, file.SetReadDeadline(time.Time{})
}

// wake makes read return os.ErrDeadlineExceeded at t, or never at the zero time.
func (d *device) wake(t time.Time) { _ = d.file.SetReadDeadline(t) }

// read calls packet with what is read until there is an error. The packet is the
// callee's until it returns. No buffer is held while there is nothing to read.
func (d *device) read(packet func([]byte) (more bool)) error {
	for {
		var failed error
		err := d.raw.Read(func(fd uintptr) bool {
			b := packets.Get().(*[link.MTU]byte)
			defer packets.Put(b)
			for more := true; more; {
				var n int
				switch n, failed = unix.Read(int(fd), b[:]); {
				case errors.Is(failed, unix.EINTR):
				case errors.Is(failed, unix.EAGAIN):
					return false
				case failed != nil:
					return true
				case n == 0:
					failed = io.EOF // the other end of a socket pair is closed
					return true
				default:
					more = packet(b[:n])
				}
			}
			return true
		})
		if err = errors.Join(err, failed); err != nil && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
}

// packets are buffers for what devices read.
var packets = sync.Pool{New: func() any { return new([link.MTU]byte) }}

// send sends one packet. One for which there is no room is lost, as on any wire.
func (d *device) send(packet []byte) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for {
		_, err := unix.Write(d.fd, packet) // EBADF when closed
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (d *device) close() error {
	d.mu.Lock()
	d.fd = -1
	d.mu.Unlock()
	if err := d.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
