package bucketfs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// maxTransfer is the maximum size of a READ or WRITE request. Larger ones are not faster here,
	// and use more memory.
	maxTransfer = 128 << 10
	// headroom of a buffer for the headers of a request or response, 4 KiB by the kernel's rule.
	headroom = 4 << 10
	// maxHandled limits the requests that are handled concurrently. Further ones stay in the kernel.
	maxHandled = 1024
	// maxBuffers limits the large buffers, in each direction: 8 MiB.
	maxBuffers = 64
)

// Opcodes of the FUSE protocol, see include/uapi/linux/fuse.h.
const (
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opRead        = 15
	opWrite       = 16
	opRelease     = 18
	opFsync       = 20
	opSetxattr    = 21
	opGetxattr    = 22
	opListxattr   = 23
	opRemovexattr = 24
	opFlush       = 25
	opReaddir     = 28
	opReleasedir  = 29
	opFsyncdir    = 30
	opInterrupt   = 36
	opDestroy     = 38
	opIoctl       = 39
	opFallocate   = 43
	opLseek       = 46
	opCopyRange   = 47
	opBatchForget = 42
	opReaddirplus = 44
)

// notifyPrune is the code of a notification that makes the kernel forget nodes.
const notifyPrune = 9

// maxPruned limits the nodes of such a notification.
const maxPruned = 512

// Sizes and offsets in requests and responses.
const (
	inHeader    = 40
	outHeader   = 16
	opcodeAt    = 4
	uniqueAt    = 8
	readSizeAt  = inHeader + 16
	setValidAt  = inHeader
	smallBuffer = 4 << 10
)

// device reads requests from /dev/fuse and writes the responses. go-fuse's Server cannot end a
// connection whose mount it does not know, and does not bound the memory of responses, so this uses
// go-fuse's protocol only.
type device struct {
	file     *os.File // non-blocking, so that Close ends Read
	protocol *fuse.ProtocolServer

	retired atomic.Bool // see Server.Retire
	handled sync.WaitGroup
	slots   chan struct{}
	in, out *buffers
}

// openDevice takes ownership of dev.
func openDevice(dev *os.File, protocol *fuse.ProtocolServer) (*device, error) {
	defer dev.Close()
	conn, err := dev.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open FUSE device: %w", err)
	}
	fd, dupErr := -1, error(nil)
	err = conn.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	})
	if err = errors.Join(err, dupErr); err != nil {
		return nil, fmt.Errorf("duplicate FUSE device: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("set FUSE device non-blocking: %w", err)
	}
	return &device{
		file:     os.NewFile(uintptr(fd), dev.Name()),
		protocol: protocol,
		slots:    make(chan struct{}, maxHandled),
		in:       newBuffers(),
		out:      newBuffers(),
	}, nil
}

// handshake reads the kernel's first request, INIT, and responds.
func (d *device) handshake() error {
	request := make([]byte, maxTransfer+headroom)
	n, err := d.file.Read(request)
	if err != nil {
		return fmt.Errorf("read FUSE handshake: %w", err)
	}
	d.handle(request[:n])
	return nil
}

// serve handles requests until the mount ends or the device is closed. It returns after the last
// handler, or the error that ended the connection.
func (d *device) serve() error {
	defer d.handled.Wait()
	for {
		buffer := d.in.get()
		n, err := d.read(buffer)
		if err != nil {
			d.in.put(buffer)
			if errors.Is(err, syscall.ENODEV) || errors.Is(err, os.ErrClosed) {
				return nil
			}
			return fmt.Errorf("read FUSE request: %w", err)
		}
		request, large := buffer[:n], n > smallBuffer
		if !large {
			request = append([]byte(nil), request...)
			d.in.put(buffer)
		}
		d.slots <- struct{}{}
		d.handled.Go(func() {
			d.handle(request)
			if large {
				d.in.put(buffer)
			}
			<-d.slots
		})
	}
}

// read reads a request. The kernel reports ENOENT for a request that was interrupted meanwhile.
func (d *device) read(buffer []byte) (int, error) {
	for {
		n, err := d.file.Read(buffer)
		if err == nil || !errors.Is(err, syscall.ENOENT) {
			return n, err
		}
	}
}

// handle handles a request and writes the response, if it has one.
func (d *device) handle(request []byte) {
	if len(request) < inHeader {
		return
	}
	opcode := binary.NativeEndian.Uint32(request[opcodeAt:])
	if d.retired.Load() && !isOfOpenFile(opcode, request) {
		d.respondError(request, syscall.ENOTCONN)
		return
	}
	switch opcode {
	case opSetxattr, opGetxattr, opListxattr, opRemovexattr, opIoctl:
		d.respondError(request, syscall.ENOSYS) // the kernel does not send it again
		return
	case opRead, opReaddir, opReaddirplus:
		if len(request) < readSizeAt+4 || binary.NativeEndian.Uint32(request[readSizeAt:]) > maxTransfer {
			d.respondError(request, syscall.EINVAL)
			return
		}
		buffer := d.out.get()
		defer d.out.put(buffer)
		d.respond(request, buffer)
	default:
		d.respond(request, make([]byte, smallBuffer))
	}
}

// isOfOpenFile reports whether a request is for an open file, or for the end of one. Attributes are an open file's, too,
// because the kernel looks up the name of a path first. It does not for a descriptor of O_PATH, with which truncate(2)
// changes a file that is not open: such a request has no handle.
func isOfOpenFile(opcode uint32, request []byte) bool {
	switch opcode {
	case opRead, opWrite, opFlush, opFsync, opRelease, opReaddir, opReaddirplus, opFsyncdir, opReleasedir, opGetattr,
		opFallocate, opLseek, opCopyRange, opForget, opBatchForget, opInterrupt, opDestroy:
		return true
	case opSetattr:
		if len(request) < setValidAt+4 {
			return false
		}
		valid := binary.NativeEndian.Uint32(request[setValidAt:])
		return valid&fuse.FATTR_SIZE == 0 || valid&fuse.FATTR_FH != 0
	}
	return false
}

// respond passes a request to the file system.
func (d *device) respond(request, buffer []byte) {
	n, code := d.protocol.HandleRequest([][]byte{request}, [][]byte{buffer})
	switch {
	case !code.Ok():
		d.respondError(request, syscall.Errno(code))
	case n > 0:
		d.write(buffer[:n])
	}
}

func (d *device) respondError(request []byte, errno syscall.Errno) {
	var response [outHeader]byte
	binary.NativeEndian.PutUint32(response[0:], outHeader)
	binary.NativeEndian.PutUint32(response[4:], uint32(-int32(errno)))
	copy(response[8:], request[uniqueAt:uniqueAt+8])
	d.write(response[:])
}

// write writes a response. It fails if the request was interrupted or the connection has ended; there is
// no one to report that to.
func (d *device) write(response []byte) { _, _ = d.file.Write(response) }

// prune makes the kernel forget nodes that no program uses. It returns EINVAL before Linux 6.18. It waits for no request.
func (d *device) prune(ids []uint64) error {
	notification := make([]byte, outHeader+16, outHeader+16+8*len(ids))
	binary.NativeEndian.PutUint32(notification[4:], notifyPrune)
	binary.NativeEndian.PutUint32(notification[outHeader:], uint32(len(ids)))
	for _, id := range ids {
		notification = binary.NativeEndian.AppendUint64(notification, id)
	}
	binary.NativeEndian.PutUint32(notification, uint32(len(notification)))
	_, err := d.file.Write(notification)
	return err
}

// buffers is a bounded pool of buffers for large requests and responses.
type buffers struct {
	pool  sync.Pool
	slots chan struct{}
}

func newBuffers() *buffers {
	return &buffers{
		pool:  sync.Pool{New: func() any { return new([maxTransfer + headroom]byte) }},
		slots: make(chan struct{}, maxBuffers),
	}
}

// get waits until fewer than maxBuffers are in use.
func (b *buffers) get() []byte {
	b.slots <- struct{}{}
	return b.pool.Get().(*[maxTransfer + headroom]byte)[:]
}

func (b *buffers) put(buffer []byte) {
	b.pool.Put((*[maxTransfer + headroom]byte)(buffer))
	<-b.slots
}
