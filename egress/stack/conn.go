package stack

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// Conn is an accepted flow: the node's end of a connection with a sandbox. It is a
// net.Conn whose halves can be closed one by one, and which io.Copy moves in large
// pieces in both directions.
//
// It has no keep-alive and is not given up however long the sandbox is silent: the
// other side is a kernel on this machine, which says when a connection ends.
type Conn struct {
	flow     *Flow
	endpoint tcpip.Endpoint
	queue    *waiter.Queue
	wide     bool

	reading, writing   sync.Mutex // one reader and one writer at a time
	readable, writable event
	readLimit          deadline
	writeLimit         deadline

	closed   atomic.Bool
	ending   waiter.Entry
	released sync.Once
}

// event is told when the endpoint may have become ready.
type event struct {
	entry waiter.Entry
	came  chan struct{}
}

func (e *event) register(queue *waiter.Queue, mask waiter.EventMask) {
	e.entry, e.came = waiter.NewChannelEntry(mask)
	queue.EventRegister(&e.entry)
}

func newConn(f *Flow, endpoint tcpip.Endpoint, queue *waiter.Queue) *Conn {
	c := &Conn{flow: f, endpoint: endpoint, queue: queue, wide: f.stack.widen()}
	c.readLimit.init()
	c.writeLimit.init()
	c.readable.register(queue, waiter.ReadableEvents|waiter.EventHUp|waiter.EventErr)
	c.writable.register(queue, waiter.WritableEvents|waiter.EventHUp|waiter.EventErr)
	c.ending = waiter.NewFunctionEntry(waiter.EventHUp, func(waiter.EventMask) { c.release() })
	queue.EventRegister(&c.ending)
	if !c.wide { // a size that was set does not grow
		options := endpoint.SocketOptions()
		options.SetReceiveBufferSize(narrowBuffer, true)
		options.SetSendBufferSize(narrowBuffer, true)
	}
	// Whoever writes small pieces waits for their effect.
	endpoint.SocketOptions().SetDelayOption(false)
	return c
}

// release gives back the room of a connection that is closed and of which the
// netstack keeps nothing any more. The netstack calls it with locks held.
func (c *Conn) release() {
	if !c.closed.Load() {
		return
	}
	switch tcp.EndpointState(c.endpoint.State()) {
	case tcp.StateClose, tcp.StateError:
		c.released.Do(func() { c.flow.stack.release(c.wide) })
	}
}

// Read implements net.Conn. A reset by the sandbox is syscall.ECONNRESET.
func (c *Conn) Read(b []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	for {
		if c.closed.Load() {
			return 0, net.ErrClosed
		}
		if c.readLimit.passed() {
			return 0, os.ErrDeadlineExceeded
		}
		w := tcpip.SliceWriter(b)
		result, err := c.endpoint.Read(&w, tcpip.ReadOptions{})
		switch err.(type) {
		case nil:
			c.endpoint.ModerateRecvBuf(result.Count)
			if sent := c.flow.stack.cfg.Sent; sent != nil {
				sent()
			}
			return result.Count, nil
		case *tcpip.ErrClosedForReceive:
			return 0, io.EOF
		case *tcpip.ErrWouldBlock:
			c.readLimit.wait(c.readable.came)
		default:
			return 0, connError("read", err)
		}
	}
}

// Write implements net.Conn. It returns when all of b is in the send buffer; that is
// also sent after Close.
func (c *Conn) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	return c.write(bytes.NewReader(b))
}

// payload is what write sends: as many bytes as its Len says.
type payload interface {
	io.Reader
	Len() int
}

// write sends all of a payload that is not empty.
func (c *Conn) write(p payload) (written int, err error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.arrive(); err != nil {
		return 0, &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
	}
	for p.Len() > 0 {
		if c.closed.Load() {
			return written, net.ErrClosed
		}
		if c.writeLimit.passed() {
			return written, os.ErrDeadlineExceeded
		}
		// Atomic: the room that there is stays until the payload is read.
		n, err := c.endpoint.Write(p, tcpip.WriteOptions{Atomic: true})
		written += int(n)
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			c.writeLimit.wait(c.writable.came)
		default:
			return written, connError("write", err)
		}
	}
	return written, nil
}

// arrive tells Config.Arriving that something is about to come. Nothing comes any
// more when the stack ends.
func (c *Conn) arrive() error {
	s := c.flow.stack
	if s.cfg.Arriving == nil {
		return nil
	}
	if err := s.ctx.Err(); err != nil {
		return err
	}
	return s.cfg.Arriving(s.ctx)
}

// CloseWrite says to the sandbox that nothing more comes. What it sends can still
// be read.
func (c *Conn) CloseWrite() error {
	if err := c.arrive(); err != nil {
		return err
	}
	if err := c.endpoint.Shutdown(tcpip.ShutdownWrite); err != nil {
		return connError("close", err)
	}
	return nil
}

// Close closes both halves. What was written is still delivered, also to a sandbox
// that takes it only when it wakes. As in Linux, a connection with data that nobody
// has read is reset. Idempotent.
func (c *Conn) Close() error {
	if !c.closed.Swap(true) {
		c.endpoint.Close()
		c.ended()
	}
	return nil
}

// Abort resets the connection. What the sandbox did not take is lost.
func (c *Conn) Abort() {
	if !c.closed.Swap(true) {
		c.endpoint.Abort()
		c.endpoint.Close()
		c.ended()
	}
}

func (c *Conn) ended() {
	c.readLimit.set(time.Time{})
	c.writeLimit.set(time.Time{})
	c.release()
	_ = c.arrive() // the end is with the sandbox's kernel, whoever sleeps
}

// LocalAddr is what the sandbox dialled.
func (c *Conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.flow.Destination()) }

// RemoteAddr is where in the sandbox the connection comes from.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.flow.Source()) }

func (c *Conn) SetReadDeadline(t time.Time) error { return c.readLimit.set(t) }

func (c *Conn) SetWriteDeadline(t time.Time) error { return c.writeLimit.set(t) }

func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.readLimit.set(t), c.writeLimit.set(t))
}

// connError gives an error of the netstack the number that a socket's would have.
func connError(op string, err tcpip.Error) error {
	var number error
	switch err.(type) {
	case *tcpip.ErrConnectionReset:
		number = syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		number = syscall.ECONNABORTED
	case *tcpip.ErrTimeout:
		number = syscall.ETIMEDOUT
	case *tcpip.ErrClosedForSend:
		number = syscall.EPIPE
	case *tcpip.ErrNotConnected:
		number = syscall.ENOTCONN
	default:
		number = errors.New(err.String())
	}
	return &net.OpError{Op: op, Net: "tcp", Err: number}
}

var _ interface {
	net.Conn
	io.WriterTo
	io.ReaderFrom
} = (*Conn)(nil)
