package intercept

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
)

// Frames and messages of an upstream that no filter can read.
var (
	errMasked    = errors.New("a masked frame from the host")                      // RFC 6455, section 5.1
	errExtension = errors.New("a frame with an extension that was not negotiated") // section 5.2
	errControl   = errors.New("a control frame that is too long or fragmented")    // section 5.5
	errOrder     = errors.New("a frame that does not continue its message")        // section 5.4
	errFragments = errors.New("a message with too many empty fragments")
)

// maxFragments is the number of frames that a filter may read before it returns a byte.
const maxFragments = 64

const (
	finalFrame   = 0x80
	reservedBits = 0x70
	opcodeBits   = 0x0f
	controlBit   = 0x08
	maskBit      = 0x80
	maxControl   = 125
)

// messages is the upstream's end of a WebSocket (RFC 6455). Each message passes
// through a filter as a whole, however it is split into frames. The frames keep
// their boundaries.
type messages struct {
	r      *bufio.Reader
	filter Filter

	out  []byte // the header of a frame, or a control frame, to be returned next
	left uint64 // bytes of the frame whose header was returned, still to come from message

	message io.Reader // the filtered message; nil between messages
	frames  []frame   // read from r; their headers were not returned yet
	unread  uint64    // bytes of the last frame that the filter has not read yet
	final   bool      // no frame of the message follows
	err     error     // of reading it; the filter returns it with the next Read only
}

// frame is the header of a frame, and the size of its part of the message. For a
// control frame, header is the whole frame.
type frame struct {
	header []byte
	size   uint64
}

func newMessages(r io.Reader, filter Filter) *messages {
	return &messages{r: bufio.NewReader(r), filter: filter}
}

func (m *messages) Read(b []byte) (int, error) {
	for {
		switch {
		case len(m.out) > 0:
			n := copy(b, m.out)
			m.out = m.out[n:]
			return n, nil
		case m.left > 0:
			n, err := m.message.Read(b[:min(uint64(len(b)), m.left)])
			m.left -= uint64(n)
			if err == io.EOF && m.left > 0 {
				return n, io.ErrUnexpectedEOF
			}
			if n == 0 && err == nil {
				continue
			}
			return n, ignoreEOF(err)
		case len(m.frames) > 0:
			m.out, m.left = m.frames[0].header, m.frames[0].size
			m.frames = m.frames[1:]
		case m.err != nil:
			return 0, m.err
		default:
			if m.final {
				m.message, m.final = nil, false
			}
			if err := m.next(); err != nil {
				return 0, err
			}
		}
	}
}

// ignoreEOF drops io.EOF: the end of a message does not end the connection.
func ignoreEOF(err error) error {
	if err == io.EOF {
		return nil
	}
	return err
}

// next reads the header of the next frame. It returns io.EOF if the connection ends
// between two messages.
func (m *messages) next() error {
	header := make([]byte, 2, 2+8+maxControl)
	if _, err := io.ReadFull(m.r, header); err != nil {
		if m.message != nil && err == io.EOF {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	size := uint64(header[1] &^ maskBit)
	switch {
	case header[1]&maskBit != 0:
		return errMasked
	case header[0]&reservedBits != 0:
		return errExtension
	case header[0]&controlBit != 0:
		return m.control(header, size)
	case (header[0]&opcodeBits == 0) != (m.message != nil):
		return errOrder
	case len(m.frames) == maxFragments:
		return errFragments
	}
	header, size, err := m.size(header, size)
	if err != nil {
		return err
	}
	m.frames = append(m.frames, frame{header, size})
	m.unread, m.final = size, header[0]&finalFrame != 0
	if m.message == nil {
		m.message = m.filter.Body((*payload)(m))
	}
	return nil
}

// size reads the extended forms of a frame's length.
func (m *messages) size(header []byte, short uint64) ([]byte, uint64, error) {
	more := 0
	switch short {
	case 126:
		more = 2
	case 127:
		more = 8
	default:
		return header, short, nil
	}
	header = header[:2+more]
	if _, err := io.ReadFull(m.r, header[2:]); err != nil {
		return nil, 0, noEOF(err)
	}
	if more == 2 {
		return header, uint64(binary.BigEndian.Uint16(header[2:])), nil
	}
	return header, binary.BigEndian.Uint64(header[2:]), nil
}

// control reads a control frame, which may arrive between the frames of a message.
func (m *messages) control(header []byte, size uint64) error {
	if size > maxControl || header[0]&finalFrame == 0 {
		return errControl
	}
	if len(m.frames) == maxFragments {
		return errFragments
	}
	whole := header[:2+size]
	if _, err := io.ReadFull(m.filter.Body(io.LimitReader(m.r, int64(size))), whole[2:]); err != nil {
		return noEOF(err)
	}
	m.frames = append(m.frames, frame{header: whole})
	return nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// payload is a message as its filter reads it: the data of all its frames.
type payload messages

func (p *payload) Read(b []byte) (int, error) {
	m := (*messages)(p)
	for m.unread == 0 {
		if m.final {
			return 0, io.EOF
		}
		if m.err = noEOF(m.next()); m.err != nil {
			return 0, m.err
		}
	}
	n, err := m.r.Read(b[:min(uint64(len(b)), m.unread)])
	m.unread -= uint64(n)
	m.err = noEOF(err)
	return n, m.err
}
