package stack

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"gvisor.dev/gvisor/pkg/waiter"
)

// spliceBuffers hold what WriteTo and ReadFrom move at once: the few packets of 64 KiB
// that come in while the last ones are handed on, or one where the connection's buffers
// are narrow. They are held only while something moves, or waits for an end that takes
// nothing: a connection on which nothing does holds none.
var wideSplice, narrowSplice = spliceBuffers(4 * narrowSpliceBuffer), spliceBuffers(narrowSpliceBuffer)

const narrowSpliceBuffer = 64 << 10

func spliceBuffers(size int) *sync.Pool {
	return &sync.Pool{New: func() any { b := make([]byte, size); return &b }}
}

func (c *Conn) spliceBuffers() *sync.Pool {
	if c.wide {
		return wideSplice
	}
	return narrowSplice
}

// WriteTo implements io.WriterTo: what the sandbox sends goes to w, until it ends.
func (c *Conn) WriteTo(w io.Writer) (moved int64, err error) {
	for err == nil {
		var n int64
		n, err = c.moveTo(w)
		moved += n
	}
	if err == io.EOF {
		err = nil
	}
	return moved, err
}

// moveTo waits until something can be read and moves it to w.
func (c *Conn) moveTo(w io.Writer) (int64, error) {
	if err := c.awaitReadable(); err != nil {
		return 0, err
	}
	buffers := c.spliceBuffers()
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	n, err := c.Read(*b)
	if err != nil {
		return 0, err
	}
	n, err = w.Write((*b)[:n])
	return int64(n), err
}

// awaitReadable waits until Read would not.
func (c *Conn) awaitReadable() error {
	c.reading.Lock()
	defer c.reading.Unlock()
	for c.endpoint.Readiness(waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr) == 0 {
		if c.closed.Load() {
			return net.ErrClosed
		}
		if c.readLimit.passed() {
			return os.ErrDeadlineExceeded
		}
		c.readLimit.wait(c.readable.came)
	}
	return nil
}

// ReadFrom implements io.ReaderFrom: r goes to the sandbox, until it ends. What a
// socket has received is read into the packets themselves, and no buffer is held while
// it is silent.
func (c *Conn) ReadFrom(r io.Reader) (moved int64, err error) {
	move := func() (int64, error) { return c.moveFrom(r) }
	if socket, ok := r.(syscall.Conn); ok {
		raw, err := socket.SyscallConn()
		if err != nil {
			return 0, err
		}
		move = func() (int64, error) { return c.moveFromSocket(raw) }
	}
	for err == nil {
		var n int64
		n, err = move()
		moved += n
	}
	if err == io.EOF {
		err = nil
	}
	return moved, err
}

// moveFrom moves what one read returns to the sandbox.
func (c *Conn) moveFrom(r io.Reader) (int64, error) {
	buffers := c.spliceBuffers()
	b := buffers.Get().(*[]byte)
	defer buffers.Put(b)
	n, err := r.Read(*b)
	written, writeErr := c.Write((*b)[:n])
	if writeErr != nil {
		err = writeErr
	}
	return int64(written), err
}
