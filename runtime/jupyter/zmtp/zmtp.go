// Package zmtp exchanges messages with a ZeroMQ peer that is not trusted: ZMTP 3.0 with the
// NULL mechanism, over a connection that the caller has opened. See
// https://rfc.zeromq.org/spec/23/.
//
// It has what a client of Jupyter kernels needs, and bounds everything that the peer sends. A
// message that is too large is discarded, and the connection remains usable.
package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/doze-run/doze/quota"
)

// Socket is a type of socket of ZeroMQ.
type Socket string

const (
	Dealer    Socket = "DEALER"
	Router    Socket = "ROUTER"
	Publish   Socket = "PUB"
	Subscribe Socket = "SUB"
)

// accepts reports whether a socket may talk to a peer of another type.
func (s Socket) accepts(peer Socket) bool {
	switch s {
	case Dealer:
		return peer == Router
	case Router:
		return peer == Dealer
	case Publish:
		return peer == Subscribe
	case Subscribe:
		return peer == Publish || peer == "XPUB"
	}
	return false
}

const (
	// MaxMessage is the maximum number of bytes of one message. A picture of a plot has some
	// 100 KiB; a page with an interactive one, which includes its library, has 5 MiB.
	MaxMessage = 16 << 20
	// MaxFrames is the maximum number of frames of one message. A message of Jupyter has 6
	// and its identities.
	MaxFrames = 64
	// MaxReady bounds the peer's READY command, which has the type of its socket and an
	// identity of up to 255 bytes.
	MaxReady = 1 << 10
	// freeMessage is the size up to which a message does not count in Limits.Memory.
	freeMessage = 64 << 10
	// MessageCost is what a message counts in Limits.Rate, in addition to its bytes: to decode a
	// small one takes as long as to hash and parse as many bytes.
	MessageCost = 2 << 10
	// readSize bounds one read, so that a connection uses Limits.Rate in small steps.
	readSize = 64 << 10
	// maxCommands in a row, between two messages, end the connection.
	maxCommands = 64
)

// ErrTooLarge is returned by Read for a message that has too many bytes or frames, or that
// exceeds the memory budget. Read has discarded the message.
var ErrTooLarge = errors.New("message too large")

// Flags of a frame.
const (
	flagMore    = 1 << 0
	flagLong    = 1 << 1
	flagCommand = 1 << 2
)

const greetingSize = 64

// Limits bound what peers send. Connections may share them. The zero value bounds nothing.
type Limits struct {
	// Memory of messages above 64 KiB, until the next call of Read.
	Memory *quota.Pool
	// Rate in bytes, with MessageCost for each message. A peer that sends more is slowed down: Read
	// waits, and the kernel's buffers fill. The burst is at least 64 KiB.
	Rate *rate.Limiter
}

// Conn is a connection after its handshake. One goroutine may call Read while others call
// Write; Close may be called at any time.
type Conn struct {
	conn    net.Conn
	r       *bufio.Reader
	limits  Limits
	held    int64 // of the memory, by the message that the last Read returned
	slowed  bool  // the present message has waited for the rate
	delayed int   // messages that have, one after the other
	closing sync.Once
	closed  chan struct{}

	writing sync.Mutex
	out     []byte // reused by Write
}

// Open does the handshake with a peer and owns conn: if it fails, it closes it.
func Open(ctx context.Context, conn net.Conn, socket Socket, limits Limits) (*Conn, error) {
	c := &Conn{conn: conn, limits: limits, closed: make(chan struct{})}
	c.r = bufio.NewReaderSize(pacedReader{c}, 4<<10)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err := c.handshake(socket)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("ZMTP handshake: %w", err)
	}
	return c, nil
}

func (c *Conn) handshake(socket Socket) error {
	var greeting [greetingSize]byte
	greeting[0], greeting[9] = 0xff, 0x7f
	greeting[10] = 3
	copy(greeting[12:], "NULL")
	// Both peers send without waiting for each other, which the buffers of a socket permit.
	ready := appendFrame(nil, flagCommand, append([]byte("\x05READY"), property("Socket-Type", string(socket))...))
	if _, err := c.conn.Write(append(greeting[:], ready...)); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.r, greeting[:]); err != nil {
		return err
	}
	mechanism := strings.TrimRight(string(greeting[12:32]), "\x00")
	switch {
	case greeting[0] != 0xff || greeting[9] != 0x7f:
		return errors.New("the peer does not speak ZMTP")
	case greeting[10] < 3:
		return fmt.Errorf("the peer speaks version %d", greeting[10])
	case mechanism != "NULL":
		return fmt.Errorf("the peer requires the mechanism %q", mechanism)
	}
	h, err := c.header()
	if err != nil {
		return err
	}
	if h.flags&flagCommand == 0 || h.size > MaxReady {
		return errors.New("the peer sent no valid READY")
	}
	body := make([]byte, h.size)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return err
	}
	peer, err := readySocket(body)
	if err == nil && !socket.accepts(peer) {
		err = fmt.Errorf("the peer's socket is a %q", peer)
	}
	return err
}

// property encodes a property of a READY command.
func property(name, value string) []byte {
	b := append([]byte{byte(len(name))}, name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// readySocket returns the type of the socket in a READY command.
func readySocket(body []byte) (Socket, error) {
	rest, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if !ok {
		return "", errors.New("the peer sent no valid READY")
	}
	for len(rest) > 0 {
		n := int(rest[0])
		if len(rest) < 1+n+4 {
			break
		}
		name := string(rest[1 : 1+n])
		size := binary.BigEndian.Uint32(rest[1+n:])
		rest = rest[1+n+4:]
		if uint64(size) > uint64(len(rest)) {
			break
		}
		if strings.EqualFold(name, "Socket-Type") {
			return Socket(rest[:size]), nil
		}
		rest = rest[size:]
	}
	return "", errors.New("the peer did not send the type of its socket")
}

type frameHeader struct {
	flags byte
	size  uint64
}

func (c *Conn) header() (h frameHeader, err error) {
	var b [9]byte
	if _, err := io.ReadFull(c.r, b[:2]); err != nil {
		return h, err
	}
	h = frameHeader{b[0], uint64(b[1])}
	if h.flags&flagLong != 0 {
		if _, err := io.ReadFull(c.r, b[2:]); err != nil {
			return h, noEOF(err)
		}
		h.size = binary.BigEndian.Uint64(b[1:])
	}
	if h.flags&^(flagMore|flagLong|flagCommand) != 0 || h.flags&flagCommand != 0 && h.flags&flagMore != 0 {
		return h, fmt.Errorf("frame with the invalid flags %#x", h.flags)
	}
	return h, nil
}

// pacedReader reads from the connection within Limits.Rate.
type pacedReader struct{ c *Conn }

func (r pacedReader) Read(b []byte) (int, error) {
	n, err := r.c.conn.Read(b[:min(len(b), readSize)])
	r.c.pace(n)
	return n, err
}

// pace counts n bytes in the rate, and waits until it permits them or the connection is closed.
func (c *Conn) pace(n int) {
	if c.limits.Rate == nil || n == 0 {
		return
	}
	wait := c.limits.Rate.ReserveN(time.Now(), n).Delay()
	if wait == 0 {
		return
	}
	c.slowed = true
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.closed:
	}
}

// Delayed is how many messages have waited for Limits.Rate, one after the other, with the last
// one. It is for the goroutine that reads.
func (c *Conn) Delayed() int { return c.delayed }

// endMessage counts a message.
func (c *Conn) endMessage() {
	c.pace(MessageCost)
	c.delayed++
	if !c.slowed {
		c.delayed = 0
	}
	c.slowed = false
}

// Read returns the frames of the next message, which are valid until the next call. It
// returns io.EOF when the peer has closed the connection between two messages, and
// ErrTooLarge for a message that it has discarded.
func (c *Conn) Read() (frames [][]byte, err error) {
	c.releaseHeld()
	defer func() {
		if err != nil {
			c.releaseHeld()
		}
	}()
	size, tooLarge := uint64(0), false
	for commands := 0; ; {
		h, err := c.header()
		if err != nil {
			if len(frames) > 0 || tooLarge {
				err = noEOF(err)
			}
			return nil, err
		}
		if h.flags&flagCommand != 0 {
			if commands++; commands > maxCommands || len(frames) > 0 || tooLarge || h.size > MaxReady {
				return nil, errors.New("the peer sent unexpected commands")
			}
			if err := c.discard(h.size); err != nil {
				return nil, err
			}
			continue
		}
		if !tooLarge {
			tooLarge = h.size > MaxMessage || size+h.size > MaxMessage || len(frames) == MaxFrames || !c.hold(size+h.size)
		}
		if tooLarge {
			frames = nil
			c.releaseHeld()
			err = c.discard(h.size)
		} else {
			var frame []byte
			frame, err = c.frame(int64(h.size))
			frames, size = append(frames, frame), size+h.size
		}
		switch {
		case err != nil:
			return nil, err
		case h.flags&flagMore != 0:
			continue
		}
		if c.endMessage(); tooLarge {
			return nil, ErrTooLarge
		}
		return frames, nil
	}
}

// frame reads a frame. A large one takes memory only as it arrives.
func (c *Conn) frame(size int64) ([]byte, error) {
	if size <= freeMessage {
		b := make([]byte, size)
		_, err := io.ReadFull(c.r, b)
		return b, noEOF(err)
	}
	var b bytes.Buffer
	_, err := io.CopyN(&b, c.r, size)
	return b.Bytes(), noEOF(err)
}

func (c *Conn) discard(size uint64) error {
	for size > 0 {
		n := min(size, MaxMessage)
		if _, err := io.CopyN(io.Discard, c.r, int64(n)); err != nil {
			return noEOF(err)
		}
		size -= n
	}
	return nil
}

// hold makes a message of that size count in the memory.
func (c *Conn) hold(size uint64) bool {
	more := int64(size) - c.held
	if c.limits.Memory == nil || size <= freeMessage || more <= 0 {
		return true
	}
	if c.limits.Memory.TryAcquire(more) != nil {
		return false
	}
	c.held += more
	return true
}

func (c *Conn) releaseHeld() {
	if c.held > 0 {
		c.limits.Memory.Release(c.held)
		c.held = 0
	}
}

// Write sends a message, and waits until the kernel has accepted it or ctx ends. A message
// that was sent in part makes the connection unusable; Write then closes it.
func (c *Conn) Write(ctx context.Context, frames ...[]byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out = c.out[:0]
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		c.out = appendFrame(c.out, flags, frame)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetWriteDeadline(time.Unix(1, 0)) })
	_, err := c.conn.Write(c.out)
	if !stop() && err == nil {
		err = ctx.Err() // the deadline is set
	}
	if cap(c.out) > freeMessage {
		c.out = nil
	}
	if err != nil {
		c.Close()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return err
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// Close closes the connection. A Read in progress fails. The last message counts in the memory
// until a Read fails, or Release is called.
func (c *Conn) Close() error {
	c.closing.Do(func() { close(c.closed) })
	return c.conn.Close()
}

// Release closes the connection and releases the last message. The caller is the one that reads.
func (c *Conn) Release() {
	c.Close()
	c.releaseHeld()
}

// noEOF makes the end of the stream inside a message an error.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
