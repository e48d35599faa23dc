package wakeproxy

import "encoding/binary"

// goingAway is a WebSocket close frame of a server with status 1001, "going
// away" (RFC 6455, section 7.4.1).
var goingAway = []byte{0x88, 2, 1001 >> 8, 1001 & 0xff}

// frames follows the frames of a WebSocket in one direction, so as to know where
// one more may stand.
type frames struct {
	header  []byte // of the frame that begins, until it is whole
	payload uint64 // bytes to come of the frame whose header is whole
	closed  bool   // a close frame has begun: nothing may follow it
}

// maxFrameHeader: 2 bytes, 8 of extended length, 4 of mask (RFC 6455, section 5.2).
const maxFrameHeader = 14

// between reports whether what was scanned ends with a frame.
func (f *frames) between() bool { return len(f.header) == 0 && f.payload == 0 && !f.closed }

func (f *frames) scan(b []byte) {
	for len(b) > 0 {
		if f.payload > 0 {
			n := min(f.payload, uint64(len(b)))
			f.payload -= n
			b = b[n:]
			continue
		}
		if f.header == nil {
			f.header = make([]byte, 0, maxFrameHeader)
		}
		f.header = append(f.header, b[0])
		b = b[1:]
		if length, whole := frameLength(f.header); whole {
			f.closed = f.closed || f.header[0]&0x0f == 8
			f.header, f.payload = f.header[:0], length
		}
	}
}

// frameLength returns the length of a frame's payload once its header is whole.
func frameLength(header []byte) (length uint64, whole bool) {
	if len(header) < 2 {
		return 0, false
	}
	extended, mask := 0, int(header[1]>>7)*4
	length = uint64(header[1] & 0x7f)
	switch length {
	case 126:
		extended = 2
	case 127:
		extended = 8
	}
	if len(header) < 2+extended+mask {
		return 0, false
	}
	switch extended {
	case 2:
		length = uint64(binary.BigEndian.Uint16(header[2:]))
	case 8:
		length = binary.BigEndian.Uint64(header[2:])
	}
	return length, true
}
