package server

import (
	"cmp"
	"encoding/binary"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	// ringSize bounds the output of a process in memory.
	ringSize = 256 << 10
	// ringRecord bounds one record, so that one write never displaces much.
	ringRecord = 8 << 10
)

// ring keeps the last frames of a process's output, as they go over the wire, in at most
// limit bytes. The zero value is ready. It is not safe for concurrent use.
type ring struct {
	circular
	output int64 // bytes of payload before the oldest frame
	limit  int   // of the buffer, a power of two; 0: ringSize
}

// logPosition is where a frame begins.
type logPosition struct {
	at     int64 // position
	output int64 // bytes of payload before it
}

// after returns the position after a frame of so many bytes.
func (p logPosition) after(frame int64) logPosition {
	return logPosition{p.at + frame, p.output + frame - guest.FrameHeader}
}

// head is the position of the oldest frame.
func (r *ring) head() logPosition { return logPosition{r.start, r.output} }

// add appends a frame of at most ringRecord bytes of payload, dropping the
// oldest ones when there is no room.
func (r *ring) add(t guest.FrameType, data []byte) {
	r.drop(r.grow(guest.FrameHeader+len(data), cmp.Or(r.limit, ringSize)))
	var header [guest.FrameHeader]byte
	guest.PutFrameHeader(header[:], t, len(data))
	r.put(header[:])
	r.put(data)
}

// drop drops the oldest frames, of n bytes or more.
func (r *ring) drop(n int64) {
	for n > 0 {
		length := r.frame(r.start)
		next := r.head().after(length)
		r.start, r.output = next.at, next.output
		n -= length
	}
}

// shrink bounds the ring to size bytes, a power of two above ringRecord, from now on.
func (r *ring) shrink(size int) {
	r.limit = size
	if len(r.buf) > size {
		r.drop(r.end - r.start - int64(size))
		r.resize(size)
	}
}

// frame is the length of the frame at a position, with its header.
func (r *ring) frame(at int64) int64 {
	header := r.appendTo(make([]byte, 0, guest.FrameHeader), at, at+guest.FrameHeader)
	return guest.FrameHeader + int64(binary.BigEndian.Uint32(header[1:]))
}

// read appends whole frames from a position on to b, as many as fit in its capacity. It
// returns the position after them and how many bytes of output before them were dropped.
func (r *ring) read(from logPosition, b []byte) (frames []byte, next logPosition, skipped int64) {
	if from.at < r.start {
		skipped, from = r.output-from.output, r.head()
	}
	for from.at < r.end {
		length := r.frame(from.at)
		if len(b)+int(length) > cap(b) {
			break
		}
		b = r.appendTo(b, from.at, from.at+length)
		from = from.after(length)
	}
	return b, from, skipped
}
