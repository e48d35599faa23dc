package stack

import (
	"errors"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/doze-run/doze/runtime/netns/link"
)

// segment is what a packet carries: the MTU without the headers of IPv4 and TCP and
// the timestamps that Linux asks for (RFC 7323). Written piece by piece, each packet is
// one buffer; what is split between two costs a packet more.
const segment = link.MTU - 20 - 20 - 12

// moveFromSocket waits until a socket has something and moves it to the sandbox. The
// socket can be closed meanwhile.
func (c *Conn) moveFromSocket(raw syscall.RawConn) (moved int64, err error) {
	var ready int
	waited := raw.Read(func(fd uintptr) bool {
		ready, err = received(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	if waited != nil { // it was closed, or its deadline has passed
		return 0, waited
	}
	if ready > segment {
		if n := c.flow.stack.netstack.Load(); n != nil {
			n.link.bulk.Add(1)
			defer n.link.bulk.Add(-1)
		}
	}
	for err == nil && ready > 0 {
		p := socketPayload{raw: raw, left: min(ready, segment)}
		var n int
		if n, err = c.write(&p); p.err != nil {
			err = p.err
		}
		ready -= n
		moved += int64(n)
	}
	return moved, err
}

// received returns how much a socket that does not block has received, at least 1, or
// an error: io.EOF at its end, EAGAIN if there is nothing yet.
func received(fd int) (int, error) {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		return 0, os.NewSyscallError("ioctl", err)
	}
	if n > 0 {
		return n, nil
	}
	for { // whether there is nothing, or will be nothing
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

// socketPayload is what a socket has received, as the payload of a packet: the
// netstack reads it into the packet's own buffer.
type socketPayload struct {
	raw  syscall.RawConn
	left int // no more than there is in the socket
	err  error
}

func (p *socketPayload) Len() int { return p.left }

// Read implements io.Reader. The netstack asks for no more than Len.
func (p *socketPayload) Read(b []byte) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	closed := p.raw.Control(func(fd uintptr) {
		for {
			if n, err = unix.Read(int(fd), b); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	switch {
	case closed != nil:
		p.err = closed
	case err != nil:
		p.err = os.NewSyscallError("read", err)
	case n == 0:
		p.err = io.ErrUnexpectedEOF
	}
	if p.err != nil {
		return 0, p.err
	}
	p.left -= n
	return n, nil
}
