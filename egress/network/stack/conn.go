package stack

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is an accepted flow: the node's end of a connection with a sandbox, a socket in
// the sandbox's network namespace. Its local address is the one that the sandbox dialed.
// io.Copy between it and another TCP connection leaves the bytes in the kernel (splice(2)).
//
// It has no keep-alive and does not time out, however long the sandbox is silent: the
// other side is this machine's kernel, which acknowledges data even while the sandbox
// is frozen.
type Conn struct {
	net.Conn // tcp
	tcp      *net.TCPConn
	stack    *Stack
	wide     bool
	closed   atomic.Bool
}

// newConn takes ownership of the connection. If the node is killed, the kernel resets
// the connection, so that a partial stream does not look complete.
func newConn(s *Stack, tcp *net.TCPConn) *Conn {
	c := &Conn{Conn: tcp, tcp: tcp, stack: s, wide: s.wide.TryAcquire(1) == nil}
	_ = tcp.SetLinger(0)
	_ = tcp.SetKeepAlive(false)
	if !c.wide { // a size that is set explicitly does not grow
		_ = tcp.SetReadBuffer(narrowBuffer)
		_ = tcp.SetWriteBuffer(narrowBuffer)
	}
	return c
}

// narrowBuffer is the requested buffer size in bytes of a connection that is not wide;
// Linux doubles it (socket(7), SO_RCVBUF).
const narrowBuffer = 64 << 10

// Read implements net.Conn. A reset by the sandbox is syscall.ECONNRESET.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.tcp.Read(b)
	if n > 0 {
		c.stack.cfg.Sent()
	}
	return n, err
}

// Write implements net.Conn. It returns when all of b is in the send buffer, which is
// sent even after Close.
func (c *Conn) Write(b []byte) (int, error) {
	if err := c.arrive(); err != nil {
		return 0, &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
	}
	return c.tcp.Write(b)
}

// arrive calls Config.Arriving before data or the end of the connection goes to the
// sandbox. It fails when the stack ends.
func (c *Conn) arrive() error {
	s := c.stack
	if err := s.ctx.Err(); err != nil {
		return err
	}
	return s.cfg.Arriving(s.ctx)
}

// WriteTo implements io.WriterTo: it copies the sandbox's bytes to w until the stream ends.
func (c *Conn) WriteTo(w io.Writer) (moved int64, err error) {
	return transfer(w, c.tcp, func() error { c.stack.cfg.Sent(); return nil })
}

// ReadFrom implements io.ReaderFrom: it copies r to the sandbox until r ends.
func (c *Conn) ReadFrom(r io.Reader) (moved int64, err error) {
	if from, ok := r.(*net.TCPConn); ok {
		return transfer(c.tcp, from, c.arrive)
	}
	return io.Copy(struct{ io.Writer }{c}, r)
}

// transfer moves the bytes that a connection receives to w until the stream ends. It
// calls arrives before each piece, which is all that the socket holds at that time.
func transfer(w io.Writer, from *net.TCPConn, arrives func() error) (moved int64, err error) {
	raw, err := from.SyscallConn()
	if err != nil {
		return 0, err
	}
	piece := &io.LimitedReader{R: from}
	for {
		received, err := await(raw)
		if err == io.EOF {
			return moved, nil
		}
		if err == nil {
			err = arrives()
		}
		if err != nil {
			return moved, err
		}
		piece.N = int64(received)
		n, err := io.Copy(w, piece)
		moved += n
		if err != nil {
			return moved, err
		}
	}
}

// await waits until a socket has received data and returns the number of bytes, at
// least 1, or io.EOF at the end of the stream.
func await(raw syscall.RawConn) (n int, err error) {
	waited := raw.Read(func(fd uintptr) bool {
		n, err = received(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	if waited != nil { // the connection was closed, or its deadline has passed
		return 0, waited
	}
	return n, err
}

// received is await without waiting: its error is EAGAIN if no data has arrived yet.
func received(fd int) (int, error) {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		return 0, os.NewSyscallError("ioctl", err)
	}
	if n > 0 {
		return n, nil
	}
	for { // distinguish no data yet from the end of the stream
		n, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_PEEK)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, os.NewSyscallError("recv", err)
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

// CloseWrite closes the half to the sandbox. The sandbox's bytes can still be read.
func (c *Conn) CloseWrite() error {
	if err := c.arrive(); err != nil {
		return err
	}
	return c.tcp.CloseWrite()
}

// Close closes both halves. Written bytes are still delivered, even to a sandbox that
// reads them only when it wakes. As always in Linux, a connection with unread data is
// reset. Idempotent.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	_ = c.tcp.SetLinger(-1)
	rest := c.undelivered()
	err := c.tcp.Close()
	if rest == nil {
		c.stack.remove(c)
	} else if !c.stack.background(func() { c.linger(rest) }) {
		c.abandon(rest)
	}
	_ = c.arrive() // the kernel has the end, but the sandbox may be asleep
	return err
}

// undelivered returns a second descriptor of the socket if the sandbox has not received
// everything, or nil: Linux drops a socket without a descriptor after some minutes. The
// sending half is closed, so the end of the stream follows the remaining bytes.
func (c *Conn) undelivered() (rest *os.File) {
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return nil
	}
	_ = raw.Control(func(fd uintptr) {
		if unsent, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err != nil || unsent == 0 {
			return
		}
		if unread, err := unix.IoctlGetInt(int(fd), unix.SIOCINQ); err != nil || unread > 0 {
			return
		}
		if again, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			_ = unix.Shutdown(again, unix.SHUT_WR)
			rest = os.NewFile(uintptr(again), "undelivered")
		}
	})
	return rest
}

// linger waits until the sandbox closes its half too, which it does when it has read
// everything, or until the stack ends. If the sandbox sends more bytes, which have no
// reader, the connection is reset.
func (c *Conn) linger(rest *os.File) {
	defer context.AfterFunc(c.stack.ctx, func() { _ = rest.SetReadDeadline(time.Unix(1, 0)) })()
	if _, err := rest.Read(make([]byte, 1)); err != io.EOF {
		c.abandon(rest)
		return
	}
	_ = rest.Close()
	c.stack.remove(c)
}

// abandon resets a connection with undelivered bytes.
func (c *Conn) abandon(rest *os.File) {
	if raw, err := rest.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		})
	}
	_ = rest.Close()
	c.stack.remove(c)
}

// Abort resets the connection. Bytes that the sandbox has not received are lost.
func (c *Conn) Abort() {
	if c.closed.Swap(true) {
		return
	}
	_ = c.tcp.SetLinger(0)
	_ = c.tcp.Close()
	c.stack.remove(c)
	_ = c.arrive()
}
