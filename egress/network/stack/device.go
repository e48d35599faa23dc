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

// device reads and writes packets: the first one of each connection, and datagrams.
type device struct {
	file *os.File
	raw  syscall.RawConn

	// mu is read-locked during a write to the descriptor: the response to a name
	// query may come after close.
	mu sync.RWMutex
	fd int // -1 when closed
}

// openDevice takes ownership of the file and closes it on an error.
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
	// File.Fd would make the file blocking.
	if err := d.raw.Control(func(fd uintptr) { d.fd = int(fd) }); err != nil {
		return nil, err
	}
	// This fails for a blocking descriptor, whose reads could not be interrupted.
	return d, file.SetReadDeadline(time.Time{})
}

// wake makes read return os.ErrDeadlineExceeded at t, or never at the zero time.
func (d *device) wake(t time.Time) { _ = d.file.SetReadDeadline(t) }

// read calls packet for each packet until there is an error. The callee owns the packet
// until it returns, and returns false to make read check the deadline before the next
// packet. No buffer is held while there is no packet to read.
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

// packets are the read buffers of all devices.
var packets = sync.Pool{New: func() any { return new([link.MTU]byte) }}

// send sends one packet. If the device's queue is full, the packet is lost, as on any wire.
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
