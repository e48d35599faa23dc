package stack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/doze-run/doze/runtime/netns/link"
)

// maxPacket is what one read can return: an IPv4 packet is no larger than that, and
// gVisor keeps chunks of this size for use again.
const maxPacket = buffer.MaxChunkSize

// device reads and writes packets. A TUN has neither recvmmsg nor anything else that
// moves several at once; with its MTU one packet is worth a system call.
type device struct {
	file *os.File
	raw  syscall.RawConn
	// offload: each packet has a packetHeader before it, and neither side computes
	// a checksum of TCP.
	offload bool

	// spare is what the next packet is read into: netstack clears each buffer that it
	// makes, which for one of 64 KiB costs as much as the packet does. The reader's alone.
	spare  *buffer.View
	header packetHeader // of the packet that was read; the reader's alone

	// mu is held for reading while the descriptor is written to: a timer of the
	// netstack may still send something when all is closed.
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
	if err := d.negotiate(); err != nil {
		return nil, err
	}
	// It tells a descriptor that blocks, whose reads nobody could end.
	return d, file.SetReadDeadline(time.Time{})
}

// negotiate finds out whether packets have headers. If so, the kernel leaves the
// checksums of what the sandbox sends to us, who need none.
func (d *device) negotiate() error {
	state, err := unix.NewIfreq("")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(d.fd, unix.TUNGETIFF, state); err != nil || state.Uint16()&unix.IFF_VNET_HDR == 0 {
		return nil // without, or a socket pair, as tests have it
	}
	d.offload = true
	if err := unix.IoctlSetInt(d.fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM); err != nil {
		return fmt.Errorf("leaving checksums to the device: %w", err)
	}
	return nil
}

// packetHeader precedes a packet: struct virtio_net_hdr of linux/virtio_net.h.
type packetHeader [link.PacketHeader]byte

// needsChecksum is VIRTIO_NET_HDR_F_NEEDS_CSUM: the kernel computes the checksum if
// the packet leaves the machine, and takes it as it is.
const needsChecksum = 1

// tcpPacketHeader is of a packet whose TCP header begins after so many bytes and has the
// sum of its pseudo-header where the checksum would be.
func tcpPacketHeader(ipHeader, tcpHeader int) (h packetHeader) {
	h[0] = needsChecksum
	binary.NativeEndian.PutUint16(h[2:], uint16(ipHeader+tcpHeader)) // the kernel puts what follows into pages
	binary.NativeEndian.PutUint16(h[6:], uint16(ipHeader))
	binary.NativeEndian.PutUint16(h[8:], header.TCPChecksumOffset)
	return h
}

// wake makes read return os.ErrDeadlineExceeded at t, or never at the zero time.
func (d *device) wake(t time.Time) { _ = d.file.SetReadDeadline(t) }

// read calls packet with what is read, until there is an error, and waits before it
// waits for more. packet owns the view.
func (d *device) read(packet func(*buffer.View) (more bool), waits func()) error {
	for {
		var failed error
		err := d.raw.Read(func(fd uintptr) bool {
			more := true
			for more {
				var view *buffer.View
				if view, failed = d.readPacket(int(fd)); failed != nil {
					break
				}
				more = packet(view)
			}
			if !errors.Is(failed, unix.EAGAIN) {
				return true
			}
			waits()
			return false
		})
		if err = errors.Join(err, failed); err != nil && !errors.Is(err, unix.EAGAIN) {
			return err
		}
	}
}

// readPacket reads one packet. A small one gets a buffer of its size, for it may
// wait in a queue that counts only what it holds.
func (d *device) readPacket(fd int) (*buffer.View, error) {
	if d.spare == nil {
		d.spare = buffer.NewViewSize(maxPacket)
	}
	for {
		n, err := d.readInto(fd, d.spare.AsSlice())
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case n <= 0:
			return nil, io.EOF // the other end of a socket pair is closed
		case n <= maxPacket/2:
			return buffer.NewViewWithData(d.spare.AsSlice()[:n]), nil
		}
		whole := d.spare
		d.spare = nil
		whole.CapLength(n)
		return whole, nil
	}
}

// readInto reads one packet without its header, which says nothing that matters: by
// Make's contract packets come one by one.
func (d *device) readInto(fd int, b []byte) (int, error) {
	if !d.offload {
		return unix.Read(fd, b)
	}
	n, err := unix.Readv(fd, [][]byte{d.header[:], b})
	return n - link.PacketHeader, err
}

// rest gives up what is held only for speed. Only the reader calls it.
func (d *device) rest() {
	if d.spare != nil {
		d.spare.Release()
		d.spare = nil
	}
}

// send sends one packet, whose checksums are computed. A packet for which there is no
// room is lost, as on any wire.
func (d *device) send(packet []byte) error {
	if !d.offload {
		return d.write([][]byte{packet})
	}
	return d.write([][]byte{make([]byte, link.PacketHeader), packet})
}

// write is send for a packet in parts, the first of which is its packetHeader if
// there is to be one.
func (d *device) write(parts [][]byte) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	for {
		_, err := unix.Writev(d.fd, parts) // EBADF when closed
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
