package guest

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// FrameType is the type of a frame. Output of commands and processes crosses
// the socket in frames: one byte of type, four bytes of length (big endian), at
// most MaxFrame bytes of payload.
type FrameType byte

const (
	FrameStart    FrameType = 1 // exec: JSON of Started, first
	FrameStdout   FrameType = 2
	FrameStderr   FrameType = 3
	FrameComplete FrameType = 4 // exec: JSON of ExecResult, last
	FrameExit     FrameType = 5 // logs: JSON of Process, last
	FrameSkipped  FrameType = 6 // logs, terminals: JSON of Skipped

	// With ExecRequest.StreamStdin, to the guest:
	FrameStdin    FrameType = 7 // at most StdinWindow bytes that are not acknowledged
	FrameStdinEOF FrameType = 8 // empty
	// and from the guest:
	FrameStdinAck    FrameType = 9  // JSON of StdinAck
	FrameStdinClosed FrameType = 10 // empty: the command reads no more of it

	// Of a terminal, whose viewers also get FrameStdout, FrameSkipped, FrameStdinAck and
	// FrameComplete and send FrameStdin:
	FrameReady  FrameType = 11 // JSON of TerminalReady: the replay is complete
	FrameResize FrameType = 12 // to the guest: JSON of TerminalSize
	FrameSignal FrameType = 13 // to the guest: JSON of TerminalSignal
)

// FrameHeader is the length of what precedes a payload.
const FrameHeader = 5

// Started is the payload of FrameStart.
type Started struct {
	PID int `json:"pid"`
}

// StdinAck is the payload of FrameStdinAck: so many more bytes have gone from the
// guest's buffer into the command's pipe.
type StdinAck struct {
	Bytes int `json:"bytes"`
}

// Skipped is the payload of FrameSkipped: so much output was overwritten before
// a slow reader of the log got to it.
type Skipped struct {
	Bytes int64 `json:"bytes"`
}

// ErrFrame is returned for a frame that no guest of ours would send.
var ErrFrame = errors.New("guest sent a malformed frame")

// PutFrameHeader writes the header of a frame with n bytes of payload to b.
func PutFrameHeader(b []byte, t FrameType, n int) {
	b[0] = byte(t)
	binary.BigEndian.PutUint32(b[1:], uint32(n))
}

// ReadFrame reads one frame, using buf for the payload when it is large enough.
// It returns io.EOF between frames, io.ErrUnexpectedEOF within one, and ErrFrame
// (wrapped) for an unknown type or a payload over MaxFrame.
func ReadFrame(r io.Reader, buf []byte) (FrameType, []byte, error) {
	var header [FrameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	t, n := FrameType(header[0]), binary.BigEndian.Uint32(header[1:])
	if t < FrameStart || t > FrameSignal {
		return 0, nil, fmt.Errorf("%w: unknown type %d", ErrFrame, t)
	}
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("%w: %d bytes of payload, at most %d are allowed", ErrFrame, n, MaxFrame)
	}
	if int(n) > cap(buf) {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(r, buf); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return t, buf, nil
}

// frames is a response that consists of frames.
type frames struct {
	response *response
	buf      []byte
	endless  bool  // an end between frames is ErrLost
	done     error // of all further reads
}

// nextEvent returns the event that parse makes of the next frame; the payload is valid until
// the next call. An error ends the stream.
func nextEvent[E any](s *frames, parse func(FrameType, []byte) (E, error)) (ev E, err error) {
	if s.done != nil {
		return ev, s.done
	}
	t, data, err := ReadFrame(s.response, s.buf)
	switch {
	case err == nil:
		if cap(data) > cap(s.buf) {
			s.buf = data
		}
		if ev, err = parse(t, data); err == nil {
			return ev, nil
		}
	case errors.Is(err, io.ErrUnexpectedEOF), err == io.EOF && s.endless:
		err = ErrLost
	}
	s.fail(err)
	return *new(E), err
}

// DecodePayload decodes the JSON of a frame into v.
func DecodePayload(data []byte, v any) error {
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%w: unusable %T: %w", ErrFrame, v, err)
	}
	return nil
}

// finish reads the end of the response after its last frame, so that its
// connection can be used again.
func (s *frames) finish() {
	s.response.watch.set(endTimeout)
	var b [1]byte
	s.response.Read(b[:])
	s.fail(io.EOF)
}

// fail ends the stream with an error, or io.EOF.
func (s *frames) fail(err error) {
	s.done = err
	s.response.Close()
}

// Close ends the stream. It may be called more than once and while Next waits. A process goes
// on without its LogStream; a command is killed, with everything that it started, unless
// FrameComplete came before.
func (s *frames) Close() error { return s.response.Close() }
